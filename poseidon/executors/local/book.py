"""What the local executor knows of its sandboxes, told as an executor tells it: versions, listings, a stream.

Every change has a version of its own, from a counter that outlives us. A change that makes or removes a job takes its
version and shows in listings in one step, so a listing is everything up to its index.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog
import trio

from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Listing,
    Value,
)
from poseidon.errors import StoreError
from poseidon.executors.base import Batch
from poseidon.executors.local import ports
from poseidon.executors.local.ledger import Ledger, SandboxRecord

log = structlog.get_logger(__name__)

BLOCK = 1000
LOW = 100
FIRST_DELAY, LONGEST_DELAY = 0.5, 15.0
OUT_OF_MEMORY = "out of memory"

JOB_STATUS = {"asked": JobStatus.PENDING, "running": JobStatus.RUNNING}


class Book:
    """The records in memory, each change written to the ledger."""

    def __init__(self, ledger: Ledger, node: str) -> None:
        self._ledger = ledger
        self._node = node
        self._records: dict[JobId, SandboxRecord] = {}
        self._last = self._end = 0
        self._reserving = trio.Lock()
        self._subscribers: set[trio.MemorySendChannel[Batch]] = set()

    async def open(self) -> tuple[SandboxRecord, ...]:
        """Read what was there."""
        records = await self._ledger.load()
        self._records = {JobId(record.job): record for record in records}
        self._last = await self._ledger.reserve(BLOCK) - 1
        self._end = self._last + BLOCK
        return records

    def __contains__(self, job: JobId) -> bool:
        return job in self._records

    def __getitem__(self, job: JobId) -> SandboxRecord:
        return self._records[job]

    def __iter__(self) -> Iterator[SandboxRecord]:
        return iter(self._records.values())

    @property
    def index(self) -> int:
        """The highest version given so far."""
        return self._last

    async def prepare(self) -> None:
        """See to it that the next versions can be given without waiting."""
        async with self._reserving:
            if self._end - self._last < LOW:
                first = await self._ledger.reserve(BLOCK)
                self._last = max(self._last, first - 1)
                self._end = first + BLOCK - 1

    def _version(self) -> int:
        self._last += 1
        return self._last

    def enter(self, record: SandboxRecord) -> SandboxRecord:
        """Add a new one, with its version; `save` makes it durable. After `prepare`."""
        version = self._version()
        record = replace(record, created=version, version=version)
        self._records[JobId(record.job)] = record
        self._tell(record)
        return record

    async def save(self, record: SandboxRecord) -> None:
        """Make a new one durable."""
        await self._ledger.save(record)

    async def change(self, job: JobId, **changes: object) -> SandboxRecord:
        """Change one, durably, then tell of it. One at a time per job."""
        await durably(self.prepare)
        record = replace(self._records[job], version=self._version(), **changes)  # type: ignore[arg-type]
        await durably(partial(self._ledger.save, record))
        self._records[job] = record
        self._tell(record)
        return record

    async def remove(self, job: JobId) -> None:
        """Remove one, durably, then tell of it."""
        await durably(self.prepare)
        await durably(partial(self._ledger.forget, self._records[job].allocation))
        self.drop(job)

    def drop(self, job: JobId) -> None:
        """Remove one that the ledger doesn't have."""
        del self._records[job]
        self._publish(JobGone(job, self._version()))

    def listing(self, only: JobId | None = None) -> Listing:
        """Everything, or everything about one job."""
        records = [record for record in self if only in (None, record.job)]
        return Listing(
            jobs=tuple(job_of(record) for record in records),
            allocations=tuple(self.allocation_of(record) for record in records),
            jobs_index=self._last,
            allocations_index=self._last,
            only=only,
        )

    def allocation_of(self, record: SandboxRecord) -> Allocation:
        """A sandbox as the core's value."""
        return Allocation(
            id=AllocationId(record.allocation),
            job=JobId(record.job),
            version=record.version,
            created=record.created,
            client=client_status(record),
            desired=DesiredStatus.STOP if record.state == "stopped" else DesiredStatus.RUN,
            started=record.started or None,
            node_id=self._node,
            node_name=self._node,
            oom_killed=record.reason == OUT_OF_MEMORY,
            ports=ports.from_text(record.ports),
            follow_up=None,
            previous=None,
            next=None,
            trouble=record.reason,
        )

    def _tell(self, record: SandboxRecord) -> None:
        self._publish(job_of(record), self.allocation_of(record))

    def _publish(self, *values: Value) -> None:
        for subscriber in self._subscribers:
            subscriber.send_nowait(Batch(self._last, values))

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[AsyncIterator[Batch]]:
        """All that is told from now on."""
        # Unbounded: the values are few and small, and whoever tells them must never wait for who listens.
        send, receive = trio.open_memory_channel[Batch](math.inf)
        self._subscribers.add(send)
        try:
            async with receive:
                yield receive
        finally:
            self._subscribers.discard(send)
            send.close()


async def durably(write: Callable[[], Awaitable[object]]) -> None:
    """Try until it is on disk: what has happened to a sandbox can't be taken back."""
    delay = FIRST_DELAY
    while True:
        try:
            await write()
        except StoreError as error:
            log.error("sandbox not recorded, trying again", error=error.message, delay=delay)
            await trio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
        else:
            return


def job_of(record: SandboxRecord) -> JobSeen:
    """A sandbox's job as the core's value."""
    return JobSeen(JobId(record.job), record.version, JOB_STATUS.get(record.state, JobStatus.DEAD))


def client_status(record: SandboxRecord) -> ClientStatus:
    """What the node says of it."""
    match record.state:
        case "asked":
            return ClientStatus.PENDING
        case "running":
            return ClientStatus.RUNNING
        case "ended":
            return ClientStatus.FAILED
    return ClientStatus.COMPLETE

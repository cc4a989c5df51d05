"""An executor that costs nothing: its jobs run as soon as they are started, and run nothing.

It finds its jobs again in the store that the daemon hands it, so a restart finds them as it left them.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import trio

from poseidon.core.command import Command
from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    Environment,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Listing,
    Records,
    Value,
)
from poseidon.errors import AllocationGone
from poseidon.executors.base import Ability, Batch, LookedUp, Process
from poseidon.store.queries import load_records
from poseidon.store.store import Store

NAME = "local"
PENDING_BATCHES = 100_000
"""More than any measurement makes before its follower's turn."""


class InstantExecutor:
    """See Executor."""

    name = NAME
    settle = 0.0
    list_interval = 5.0
    start_timeout = 30.0

    def __init__(self, records: Records) -> None:
        self._jobs: dict[JobId, JobSeen] = {}
        self._allocations: dict[JobId, Allocation] = {}
        self._followers: list[trio.MemorySendChannel[Batch]] = []
        self._version = max([records.position.jobs_index, *(each.version for each in records.allocations)])
        for allocation in records.allocations:
            self._allocations[allocation.job] = allocation
            self._jobs[allocation.job] = JobSeen(allocation.job, allocation.version, JobStatus.RUNNING)

    def check(self, environment: Environment) -> None:
        """Anything goes."""

    def abilities(self) -> Sequence[Ability]:
        return ()

    async def start(self, job: JobId, environment: Environment) -> int:
        await trio.lowlevel.checkpoint()
        if job not in self._jobs:
            version = self._next()
            self._jobs[job] = JobSeen(job, version, JobStatus.RUNNING)
            self._allocations[job] = allocation = Allocation(
                id=AllocationId(f"a-{job}"),
                job=job,
                version=version,
                created=version,
                client=ClientStatus.RUNNING,
                started=str(version),
                node_name="here",
                follow_up=None,
                previous=None,
                next=None,
            )
            self._tell(self._jobs[job], allocation)
        return self._jobs[job].version

    async def stop(self, job: JobId) -> int:
        await trio.lowlevel.checkpoint()
        if self._jobs.pop(job, None) is not None:
            del self._allocations[job]
            self._tell(JobGone(job, self._next()))
        return self._version

    async def snapshot(self) -> Listing:
        await trio.lowlevel.checkpoint()
        return Listing(tuple(self._jobs.values()), tuple(self._allocations.values()), self._version, self._version)

    async def look_up(self, job: JobId) -> LookedUp:
        await trio.lowlevel.checkpoint()
        jobs = tuple(seen for seen in (self._jobs.get(job),) if seen is not None)
        allocations = tuple(each for each in (self._allocations.get(job),) if each is not None)
        return LookedUp(Listing(jobs, allocations, self._version, self._version, only=job))

    @asynccontextmanager
    async def follow(self, position: int | None) -> AsyncIterator[AsyncIterator[Batch]]:
        send, receive = trio.open_memory_channel[Batch](PENDING_BATCHES)
        self._followers.append(send)
        try:
            with send, receive:
                yield receive
        finally:
            self._followers.remove(send)

    def execute(self, allocation: Allocation, command: Command) -> AbstractAsyncContextManager[Process]:
        raise AllocationGone("nothing runs here")

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _tell(self, *values: Value) -> None:
        for follower in self._followers:
            follower.send_nowait(Batch(self._version, values))


async def open_instant(store: Store) -> InstantExecutor:
    """With the jobs that *store* remembers."""
    return InstantExecutor(await store.read(partial(load_records, executor=NAME)))

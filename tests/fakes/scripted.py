"""An executor in memory whose every misbehaviour a test can order. It runs no commands."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from poseidon.core.command import Command
from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    Environment,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Listing,
    Value,
)
from poseidon.errors import AllocationGone, ExecutorUnreachable, PoseidonError, Unsupported
from poseidon.executors.base import Ability, Batch, LookedUp, Process


@dataclass
class ScriptedExecutor:
    """Jobs run as soon as they are started, unless *held*. All changes go to the followers at once."""

    name: str = "local"
    settle: float = 0.0
    list_interval: float = 0.2
    start_timeout: float = 30.0
    held: bool = False
    """New jobs stay pending until `run`."""
    reachable: bool = True
    refusal: PoseidonError | None = None
    """What starts raise."""
    silent: bool = False
    """Followers are told nothing."""
    version: int = 0
    jobs: dict[JobId, JobSeen] = field(default_factory=dict)
    allocations: dict[AllocationId, Allocation] = field(default_factory=dict)
    started: list[JobId] = field(default_factory=list)
    stopped: list[JobId] = field(default_factory=list)
    marks: list[tuple[JobId, bool]] = field(default_factory=list)
    followers: list[trio.MemorySendChannel[Batch]] = field(default_factory=list)
    answer_delay: float = 0.0

    # The port

    def check(self, environment: Environment) -> None:
        if environment.network_access:
            raise Unsupported("no network here")

    def abilities(self) -> Sequence[Ability]:
        return ()

    async def start(self, job: JobId, environment: Environment) -> int:
        await self._answer()
        if self.refusal is not None:
            raise self.refusal
        self.started.append(job)
        if job not in self.jobs:
            self.register(job)
        return self.jobs[job].version

    async def stop(self, job: JobId) -> int:
        await self._answer()
        self.stopped.append(job)
        self.remove(job)
        return self.version

    async def snapshot(self) -> Listing:
        await self._answer()
        return Listing(tuple(self.jobs.values()), tuple(self.allocations.values()), self.version, self.version)

    async def look_up(self, job: JobId) -> LookedUp:
        await self._answer()
        seen = (self.jobs[job],) if job in self.jobs else ()
        mine = tuple(allocation for allocation in self.allocations.values() if allocation.job == job)
        used = any(known.used for known in seen if known.used)
        return LookedUp(Listing(seen, mine, self.version, self.version, only=job), used=used)

    @asynccontextmanager
    async def follow(self, position: int | None) -> AsyncIterator[AsyncIterator[Batch]]:
        await self._answer()
        send, receive = trio.open_memory_channel[Batch](10_000)
        self.followers.append(send)
        try:
            async with aclosing(self._batches(receive)) as batches:  # else its end is left to the garbage collector
                yield batches
        finally:
            if send in self.followers:
                self.followers.remove(send)
            send.close()
            receive.close()

    async def _batches(self, receive: trio.MemoryReceiveChannel[Batch]) -> AsyncGenerator[Batch, None]:
        async for batch in receive:
            if not self.reachable:
                raise ExecutorUnreachable("the line was cut")
            yield batch

    def execute(self, allocation: Allocation, command: Command) -> AbstractAsyncContextManager[Process]:
        raise AllocationGone("nothing runs here")

    async def _answer(self) -> None:
        await trio.sleep(self.answer_delay)
        if not self.reachable:
            raise ExecutorUnreachable("nobody answers")

    # What a test orders

    def register(self, job: JobId, *, used: bool | None = None) -> None:
        """A job appears, by whomever."""
        version = self._next()
        allocation = Allocation(
            AllocationId(f"a{version}"), job, version, version, ClientStatus.PENDING, node_name="here", previous=None
        )
        self._tell(JobSeen(job, version, JobStatus.RUNNING, used), replace(allocation, next=None, follow_up=None))
        if not self.held:
            self.run(job)

    def run(self, job: JobId) -> None:
        """The job's newest allocation begins a new life."""
        newest = self.newest(job)
        version = self._next()
        self._tell(
            replace(
                newest,
                version=version,
                client=ClientStatus.RUNNING,
                started=f"t{version}",
                restarts=newest.restarts + (newest.started is not None),
            )
        )

    def die(self, job: JobId) -> None:
        """The job's newest allocation fails, and nothing follows."""
        version = self._next()
        self._tell(
            replace(self.newest(job), version=version, client=ClientStatus.FAILED, started=None),
            replace(self.jobs[job], version=version, status=JobStatus.DEAD),
        )

    def change(self, job: JobId, **fields: Any) -> None:
        """The executor tells something else of the job's newest allocation."""
        self._tell(replace(self.newest(job), version=self._next(), **fields))

    def move(self, job: JobId) -> None:
        """The job's allocation is replaced by another, on another node."""
        old, version = self.newest(job), self._next()
        new = Allocation(AllocationId(f"a{version}"), job, version, version, ClientStatus.PENDING, node_name="there")
        self._tell(new, replace(old, version=version, desired=DesiredStatus.STOP, next=new.id))
        self.run(job)

    def remove(self, job: JobId) -> None:
        """The job and its allocations are no longer there."""
        if self.jobs.pop(job, None) is not None:
            version = self._next()
            for allocation in [known for known in self.allocations.values() if known.job == job]:
                del self.allocations[allocation.id]
            self._send(JobGone(job, version))

    def cut(self) -> None:
        """Followers lose their streams."""
        for follower in list(self.followers):
            follower.close()
        self.followers.clear()

    def newest(self, job: JobId) -> Allocation:
        """The allocation of *job* that was made last."""
        return max((known for known in self.allocations.values() if known.job == job), key=lambda known: known.created)

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _tell(self, *values: JobSeen | Allocation) -> None:
        for value in values:
            if isinstance(value, JobSeen):
                self.jobs[value.job] = value
            else:
                self.allocations[value.id] = value
        self._send(*values)

    def _send(self, *values: Value) -> None:
        if not self.silent:
            for follower in self.followers:
                follower.send_nowait(Batch(self.version, values))


@dataclass
class RecordingExecutor(ScriptedExecutor):
    """One that keeps records of use, as Nomad does."""

    async def mark(self, job: JobId, *, used: bool, timeout: int) -> None:
        await self._answer()
        self.marks.append((job, used))
        if job in self.jobs:
            self._tell(replace(self.jobs[job], version=self._next(), used=used))

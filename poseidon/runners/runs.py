"""One command on a runner of its own: claimed, given its files, run and destroyed, whatever happens."""

import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, EnvironmentId, ExecutionId, Reason, Runner, RunnerId
from poseidon.errors import AllocationGone, Draining, Overloaded, RunnerGone, StoreError
from poseidon.executors.base import Executor, MeasuresUsage, Stream, Usage
from poseidon.runners.execution import Client
from poseidon.runners.execution_outcomes import SHUTDOWN, EndOfInput, Input, Outcome
from poseidon.runners.executions import check
from poseidon.runners.files_archive import File, cleaned

log = structlog.get_logger(__name__)

INACTIVE_AFTER = 60
"""Seconds after which a runner goes that a crash of the daemon has taken from its run."""
TRIES = 3
"""Runners that may end before the command has begun; more than one in a row is no accident."""
CHUNK = 64 * 1024
DISCARDED = 64 * 1024 * 1024
"""Bytes per second of output beyond the limit that are taken in: a flood shall not keep the daemon busy."""
REST_AFTER = 1024 * 1024
RELEASE_WITHIN = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted. *time_limit* in seconds; *output_limit*: bytes that are kept of each stream."""

    environment: EnvironmentId
    command: Command
    time_limit: int
    output_limit: int
    files: Sequence[File] = ()
    stdin: bytes = b""


@dataclass(slots=True)
class Captured:
    """What was kept of a stream, up to *limit*, and how much there was."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0

    def add(self, data: bytes) -> None:
        self.kept += data[: self.limit - len(self.kept)]
        self.total += len(data)

    @property
    def is_cut(self) -> bool:
        return self.total > len(self.kept)

    @property
    def text(self) -> str:
        """As UTF-8; what is none becomes U+FFFD, but not half a character at the cut."""
        return getincrementaldecoder("utf-8")("replace").decode(bytes(self.kept), final=not self.is_cut)


@dataclass(slots=True)
class Report:
    """How it went. Moments are seconds since the epoch."""

    runner: Runner
    outcome: Outcome
    stdout: Captured
    stderr: Captured
    queued_at: float
    claimed_at: float
    copied_at: float
    started_at: float
    ended_at: float
    usage: Usage | None


class Claims(Protocol):
    """What runs need to do with runners."""

    async def claim(self, environment: EnvironmentId, *, timeout: int) -> Runner: ...  # noqa: ASYNC109

    def place(self, runner: Runner) -> tuple[Executor, Allocation]: ...

    async def release(self, runner: RunnerId, reason: Reason = ...) -> None: ...


class Files(Protocol):
    """What runs need to do with files."""

    async def update(self, runner: RunnerId, *, delete: Sequence[str], copy: Sequence[File]) -> None: ...


class Executions(Protocol):
    """What runs need to do with executions."""

    async def create(self, runner: RunnerId, command: Command, *, time_limit: int = 0) -> ExecutionId: ...

    async def run(self, runner: RunnerId, execution: ExecutionId, client: Client) -> None: ...


class Runs:
    """Each is a claim, a copy, an execution and a release, as clients do them one by one."""

    def __init__(
        self, claims: Claims, files: Files, executions: Executions, now: Callable[[], float] = time.time
    ) -> None:
        self._claims = claims
        self._files = files
        self._executions = executions
        self._now = now

    async def run(self, order: Order) -> Report:
        """Carry it out. What can't be right is refused before a runner is taken.

        Raises EnvironmentNotFound, BadRequest, Overloaded, Draining, FilesFailed, ExecutorError, StoreError.
        """
        check(order.command)
        for file in order.files:
            cleaned(file.path)
        queued = self._now()
        for _ in range(TRIES):
            runner = await self._claims.claim(order.environment, timeout=INACTIVE_AFTER)
            async with self._destroyed(runner):
                try:
                    return await self._use(runner, order, queued)
                except (RunnerGone, AllocationGone):  # only before the command has begun, so that it can be tried again
                    log.warning("runner ended before its run began", runner_id=runner.id)
        raise Overloaded("the runners of this execution environment end before they can be used")

    async def _use(self, runner: Runner, order: Order, queued: float) -> Report:
        claimed = self._now()
        if order.files:
            await self._files.update(runner.id, delete=(), copy=order.files)
        copied = self._now()
        before = self._usage(runner)
        client = _Collector(order, self._now)
        execution = await self._executions.create(runner.id, order.command, time_limit=order.time_limit)
        await self._executions.run(runner.id, execution, client)
        ended = self._now()
        if client.outcome is None or client.outcome is SHUTDOWN:
            raise Draining("the service is about to stop")
        usage = _difference(before, self._usage(runner))
        stdout, stderr = (client.output_of[stream] for stream in (Stream.STDOUT, Stream.STDERR))
        return Report(runner, client.outcome, stdout, stderr, queued, claimed, copied, client.started_at, ended, usage)

    @asynccontextmanager
    async def _destroyed(self, runner: Runner) -> AsyncIterator[None]:
        """At the end *runner* is destroyed."""
        try:
            yield
        finally:
            with trio.move_on_after(RELEASE_WITHIN, shield=True), suppress(RunnerGone, StoreError):
                await self._claims.release(runner.id)

    def _usage(self, runner: Runner) -> Usage | None:
        try:
            executor, allocation = self._claims.place(runner)
        except RunnerGone:
            return None
        return executor.usage(allocation) if isinstance(executor, MeasuresUsage) else None


def _difference(before: Usage | None, after: Usage | None) -> Usage | None:
    """What was used since *before*; a peak is one of the whole life."""
    if before is None or after is None:
        return None
    if before.cpu_seconds is None or after.cpu_seconds is None:
        return Usage(None, after.memory_peak)
    return Usage(after.cpu_seconds - before.cpu_seconds, after.memory_peak)


class _Collector:
    """An execution's client that brings all input at once, and keeps the beginning of the output."""

    def __init__(self, order: Order, now: Callable[[], float]) -> None:
        self.outcome: Outcome | None = None
        self.started_at = 0.0
        self.output_of = {stream: Captured(order.output_limit) for stream in Stream}
        self._input = [order.stdin[start : start + CHUNK] for start in range(0, len(order.stdin), CHUNK)]
        self._input.reverse()
        self._is_fed = False
        self._now = now
        self._discarded = 0

    async def start(self) -> None:
        self.started_at = self._now()
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Input:
        if self._input:
            await trio.lowlevel.checkpoint()
            return self._input.pop()
        if self._is_fed:
            await trio.sleep_forever()
        self._is_fed = True
        return EndOfInput()

    async def output(self, stream: Stream, data: bytes) -> None:
        captured = self.output_of[stream]
        captured.add(data)
        await trio.lowlevel.checkpoint()
        if captured.is_cut:
            self._discarded += len(data)
        if self._discarded > REST_AFTER:
            await trio.sleep(self._discarded / DISCARDED)
            self._discarded = 0

    async def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        await trio.lowlevel.checkpoint()

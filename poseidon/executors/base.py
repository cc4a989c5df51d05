"""The port to what runs jobs. The core and the shell know executors only by this.

Facts come as the core's values; errors are those of `poseidon.errors`. An executor never decides about runners.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from poseidon.core.command import Command
from poseidon.core.model import Allocation, Environment, EnvironmentId, JobId, Listing, Value
from poseidon.executors.trust import Trust


@dataclass(frozen=True, slots=True)
class Batch:
    """What one message of the stream told, up to *position* (opaque; resuming includes it). Empty: a heartbeat."""

    position: int
    values: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class LookedUp:
    """All that the executor knows of one job, its own record of use included. An unknown job has an empty listing."""

    listing: Listing
    used: bool = False
    timeout: int | None = None
    """Inactivity timeout in seconds from the executor's record; None: not told."""


@dataclass(frozen=True, slots=True)
class Ability:
    """One promise (memory, processes, cpu, users, network, …) and whether it holds here, as health and doctor tell."""

    name: str
    holds: bool
    how: str
    """By which means it holds, or why not."""


class Stream(StrEnum):
    """Where a chunk of output came from."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command's main process ended: 0–255, 128+n for signal n."""

    code: int
    out_of_memory: bool = False


class Process(Protocol):
    """A running command. Leaving its context closes the connection; make sure that it is dead before."""

    async def send(self, data: bytes) -> None:
        """Write to stdin, waiting while it is full. What comes after the end or `close_stdin` is dropped."""

    async def close_stdin(self) -> None:
        """End of file for the program (with a tty: its own end-of-file character)."""

    async def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size; without a tty nothing happens."""

    async def signal(self, number: int) -> None:
        """Send a signal to the command's foreground processes; nothing happens once it has ended."""

    async def receive(self) -> tuple[Stream, bytes] | None:
        """The next chunk (never empty, ≤ 64 KiB), or None when both streams have ended. Raises ConnectionLost."""

    async def wait(self) -> Exit:
        """Wait for the main process. Cancellable and repeatable. Raises ConnectionLost, AllocationGone."""

    async def kill(self) -> bool:
        """Kill the command with all that descends from it, sessions that left it included.

        True if it is certain that nothing of it is left; else the runner has to go. Bounded in time (≤ 5 s).
        """


class Executor(Protocol):
    """What runs jobs. Opening one never waits for it; all calls are safe to repeat."""

    @property
    def name(self) -> str:
        """As in `Environment.executor`."""

    @property
    def settle(self) -> float:
        """Seconds that a doubt must last before a look-up may confirm it (0: it knows at once)."""

    @property
    def list_interval(self) -> float:
        """Seconds between full listings while the stream is healthy."""

    @property
    def start_timeout(self) -> float:
        """Seconds that a job may be without a running life before it is given up."""

    def check(self, environment: Environment) -> None:
        """Raise Unsupported if this executor can't run it; a fast check, of limits and abilities only."""

    def abilities(self) -> Sequence[Ability]:
        """Which promises hold here."""

    async def start(self, job: JobId, environment: Environment) -> int:
        """Ask for *job*; the answer is the index as of which it exists. Raises ExecutorUnreachable, PlacementFailed."""

    async def stop(self, job: JobId) -> int:
        """Remove *job* (known or not) with all it runs; the answer is the index as of which it is to be gone."""

    async def snapshot(self) -> Listing:
        """Everything."""

    async def look_up(self, job: JobId) -> LookedUp:
        """Everything about one job."""

    def follow(self, position: int | None) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """Subscribe: once entered, nothing that happens is missed but by a break, which raises ExecutorUnreachable."""

    def execute(self, allocation: Allocation, command: Command) -> AbstractAsyncContextManager[Process]:
        """Run *command* in a running allocation. Raises AllocationGone, ExecutorUnreachable, Unsupported.

        With any error nothing of the command runs, but for LeftRunning.
        """


@runtime_checkable
class KeepsRecords(Protocol):
    """An executor that keeps records of its own (Nomad: templates, and a job's used mark)."""

    async def mark(self, job: JobId, *, used: bool, timeout: int) -> None:  # noqa: ASYNC109 - a value to write
        """Write the job's used mark. Raises ExecutorUnreachable."""


@dataclass(frozen=True, slots=True)
class JobsListed:
    """All jobs, without their allocations. *running*: those of which something runs, as the executor counts them."""

    listing: Listing
    running: frozenset[JobId] = frozenset()
    templates: frozenset[EnvironmentId] | None = None
    """Environments whose template is there, and as it was last put or read by us; None: none are kept."""


@runtime_checkable
class ListsJobs(Protocol):
    """An executor whose full listing is dear: between two breaks of the stream only its jobs are compared."""

    async def list_jobs(self) -> JobsListed:
        """A listing with `jobs_only`. Raises ExecutorUnreachable."""


@runtime_checkable
class HasAnAddress(Protocol):
    """An executor behind an address, where another one than we know may answer. Looking, listing and following is
    always possible; everything else waits for its *trust*, which whoever knows what is to be there gives and takes."""

    @property
    def address(self) -> str:
        """For messages."""

    @property
    def trust(self) -> Trust:
        """To be given, suspended and refused."""

    async def has(self, job: JobId) -> bool:
        """Whether *job* is there, in whatever state. Raises ExecutorUnreachable."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an allocation has used since it started. What isn't known is None."""

    cpu_seconds: float | None
    memory_peak: int | None
    """Bytes, the files that live in its memory included."""


@runtime_checkable
class MeasuresUsage(Protocol):
    """An executor that can tell what its allocations use."""

    def usage(self, allocation: Allocation) -> Usage | None:
        """As of now; None if it isn't measured, or doesn't run."""


@runtime_checkable
class HasCredentials(Protocol):
    """An executor that asks for a token, which may be replaced."""

    def use_credentials(self, token: str) -> None:
        """From now on, together with what its files of certificates hold. Raises ConfigError, changing nothing."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """An executor's event stream in numbers, for operators. What isn't known is None."""

    connected: bool
    age: float | None
    """Seconds since anything came, heartbeats included."""
    lag: float | None
    """Seconds between the newest change and our hearing of it, by two machines' clocks."""
    index: int
    lines: int
    events: int
    breaks: int


@runtime_checkable
class FollowsStream(Protocol):
    """An executor whose news come from elsewhere, so that they can be late."""

    def stream_figures(self) -> StreamFigures:
        """As of now."""


@runtime_checkable
class KeepsTemplates(Protocol):
    """An executor that keeps the environments too (Nomad: a job each), so that they can be taken over from it."""

    async def put_template(self, environment: Environment) -> None:
        """Create or replace. Raises ExecutorUnreachable, ExecutorError."""

    async def remove_template(self, environment: EnvironmentId) -> None:
        """Remove it, known or not. Raises ExecutorUnreachable."""

    async def environments(self) -> Sequence[Environment]:
        """All that it keeps. Raises ExecutorUnreachable."""

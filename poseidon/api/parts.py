"""What the API needs of the daemon, each part by just what is used of it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from poseidon.api.auth import Keyring
from poseidon.api.pace import Pace
from poseidon.api.surroundings import Surroundings
from poseidon.core.command import Command
from poseidon.core.listing import Entry
from poseidon.core.model import Allocation, Environment, EnvironmentId, ExecutionId, Reason, Runner, RunnerId
from poseidon.executors.base import Executor
from poseidon.runners.execution import Client
from poseidon.runners.facts import Ailment, ExecutionFacts, ExecutorFacts, PoolStatistics, RunnerFacts
from poseidon.runners.files_archive import File
from poseidon.runners.files_download import Download
from poseidon.supervisor import ServiceStatus


class Environments(Protocol):
    """The environments (poseidon.runners.environments)."""

    async def put(self, wanted: Environment) -> bool: ...

    def get(self, environment: EnvironmentId) -> Environment: ...

    def list(self) -> list[Environment]: ...

    async def remove(self, environment: EnvironmentId) -> None: ...

    async def fetch(self) -> None: ...

    async def filled(self, environment: EnvironmentId) -> None: ...

    def statistics(self) -> dict[EnvironmentId, PoolStatistics]: ...


class Claims(Protocol):
    """Who has which runner (poseidon.runners.claims)."""

    async def claim(self, environment: EnvironmentId, *, timeout: int) -> Runner: ...  # noqa: ASYNC109

    def used(self, runner: RunnerId) -> Runner: ...

    def place(self, runner: Runner) -> tuple[Executor, Allocation]: ...

    async def release(self, runner: RunnerId, reason: Reason = ...) -> None: ...

    async def stop(self, runner: RunnerId) -> None: ...

    async def tell(self, runner: RunnerId) -> RunnerFacts | None: ...

    async def executions_of(self, runner: RunnerId) -> ExecutionFacts: ...

    def list(self) -> list[RunnerFacts]: ...


class Executions(Protocol):
    """The executions (poseidon.runners.executions)."""

    async def create(self, runner: RunnerId, command: Command, *, time_limit: int = 0) -> ExecutionId: ...

    def find(self, runner: RunnerId, execution: ExecutionId) -> object: ...

    async def run(self, runner: RunnerId, execution: ExecutionId, client: Client) -> None: ...


class Files(Protocol):
    """Files of runners (poseidon.runners.files)."""

    async def update(self, runner: RunnerId, *, delete: Sequence[str], copy: Sequence[File]) -> None: ...

    async def list(self, runner: RunnerId, path: str, *, recursive: bool, privileged: bool) -> list[Entry]: ...

    def read(self, runner: RunnerId, path: str, *, privileged: bool) -> AbstractAsyncContextManager[Download]: ...


class Overview(Protocol):
    """The daemon as a whole."""

    started_at: float
    """In seconds since the epoch."""

    @property
    def draining(self) -> bool:
        """Whether it is about to stop."""

    def ailment(self) -> Ailment | None:
        """What keeps it from serving well; None if nothing does."""

    def services(self) -> Sequence[ServiceStatus]:
        """Its supervised parts."""

    def executors(self) -> Sequence[ExecutorFacts]:
        """What runs its runners, each with what it promises."""

    def store(self) -> Mapping[str, object]:
        """The database in numbers."""


@dataclass(frozen=True, slots=True)
class Parts:
    """All of it."""

    environments: Environments
    claims: Claims
    executions: Executions
    files: Files
    overview: Overview


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What can be set about the API itself."""

    keyring: Keyring = field(default_factory=Keyring)
    """The tokens; without any, none is asked for."""
    version: str = ""
    executor: str = "local"
    """Which executor runs the environments that are put."""
    surroundings: Surroundings = field(default_factory=Surroundings)
    pace: Pace = field(default_factory=lambda: Pace(rate=0, burst=1))
    fill_wait: float = 50.0
    """Seconds that a PUT may wait for its pool, if asked to; clients' own patience often ends at 60."""

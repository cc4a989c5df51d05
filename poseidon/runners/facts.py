"""What operators and clients may ask about runners and pools: plain values."""

from dataclasses import dataclass
from enum import StrEnum

from poseidon.core.model import EnvironmentId, Phase, Port, Runner, RunnerId
from poseidon.executors.base import Ability, StreamFigures


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """One runner, living or long gone. Times are seconds since the epoch; what isn't known any more is None."""

    id: RunnerId
    phase: Phase
    environment: EnvironmentId | None = None
    node: str | None = None
    allocation: str | None = None
    reason: str | None = None
    ready_at: float | None = None
    claimed_at: float | None = None
    expires_at: float | None = None
    gone_at: float | None = None
    ports: tuple[Port, ...] = ()
    job: str | None = None

    @classmethod
    def of(cls, runner: Runner, expires_at: float | None = None) -> "RunnerFacts":
        """The facts of a runner in memory."""
        return cls(
            runner.id,
            runner.phase,
            runner.environment,
            runner.node_name,
            runner.allocation,
            None if runner.reason is None else str(runner.reason),
            runner.ready_at,
            runner.claimed_at,
            expires_at,
            runner.gone_at,
            runner.ports,
            runner.job,
        )


@dataclass(frozen=True, slots=True)
class ExecutionFacts:
    """What ran in a runner, as far as it is kept."""

    count: int = 0
    last_outcome: str | None = None
    """Of the one that ended last."""


class PoolStatus(StrEnum):
    """How an environment's pool is doing."""

    OK = "ok"
    FILLING = "filling"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """An environment's pool in numbers. *message* tells what fails, if something does."""

    size: int
    idle: int
    used: int
    starting: int
    waiting: int
    status: PoolStatus
    message: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """How an executor is doing."""

    name: str
    reachable: bool
    trouble: str | None
    """Why it isn't."""
    listed: bool
    """Whether all that it runs is known."""
    abilities: tuple[Ability, ...] = ()
    stream: StreamFigures | None = None
    """None: its news can't be late."""


@dataclass(frozen=True, slots=True)
class Ailment:
    """Why the service isn't well. *code* is one of the contract's error codes."""

    code: str
    message: str

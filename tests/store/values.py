"""Values to save."""

from dataclasses import dataclass
from uuid import UUID

from poseidon.core.model import (
    Allocation,
    AllocationId,
    Changes,
    ClientStatus,
    Environment,
    EnvironmentId,
    Job,
    JobId,
    JobStatus,
    Phase,
    Reason,
    Runner,
    RunnerId,
    Transition,
)

ENVIRONMENT = EnvironmentId(29)
NOW = 1_796_028_521.123


def environment(identity: int = ENVIRONMENT, **fields: object) -> Environment:
    """One to run in."""
    return Environment(EnvironmentId(identity), "python", 3, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Life:
    """A job with its allocation and its runner."""

    job: Job
    allocation: Allocation
    runner: Runner

    @property
    def changes(self) -> Changes:
        """As when all was seen at once."""
        return Changes(jobs=(self.job,), allocations=(self.allocation,), runners=(self.runner,))


def job(number: int = 1, **fields: object) -> Job:
    """A running job of ours."""
    identity = JobId(f"{ENVIRONMENT}-{UUID(int=number)}")
    return Job(identity, ENVIRONMENT, ours=True, adopted=True, version=10, status=JobStatus.RUNNING, **fields)  # type: ignore[arg-type]


def allocation(of: Job, name: str = "a", **fields: object) -> Allocation:
    """A running one."""
    identity = AllocationId(f"{of.id}/{name}")
    return Allocation(identity, of.id, 11, 11, ClientStatus.RUNNING, started="1", node_name="n1", **fields)  # type: ignore[arg-type]


def runner(of: Allocation, phase: Phase = Phase.IDLE, identity: str = "", **fields: object) -> Runner:
    """One of environment 29; used and gone ones have their times."""
    given: dict[str, object] = {"ready_at": NOW}
    if phase is Phase.USED:
        given |= {"claimed_at": NOW + 1, "timeout": 180}
    if phase is Phase.GONE:
        given |= {"gone_at": NOW + 2, "reason": Reason.STOPPED}
    return Runner(
        RunnerId(identity or of.job),
        ENVIRONMENT,
        of.job,
        of.id,
        "1",
        "id of n1",
        "n1",
        phase,
        **(given | fields),  # type: ignore[arg-type]
    )


def life(number: int = 1, phase: Phase = Phase.IDLE, **fields: object) -> Life:
    """All three."""
    its_job = job(number)
    its_allocation = allocation(its_job)
    return Life(its_job, its_allocation, runner(its_allocation, phase, **fields))  # type: ignore[arg-type]


def transition(
    subject: str, before: str = "idle", after: str = "used", at: float = NOW, kind: str = "runner"
) -> Transition:
    """A line of history."""
    return Transition(at, kind, subject, ENVIRONMENT, before, after)

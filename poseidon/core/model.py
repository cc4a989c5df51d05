"""The values that Poseidon thinks in: environments, jobs, allocations, runners.

All frozen; times are seconds since the epoch, given by the shell. Nothing here does anything.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NewType
from uuid import UUID

EnvironmentId = NewType("EnvironmentId", int)
JobId = NewType("JobId", str)
AllocationId = NewType("AllocationId", str)
RunnerId = NewType("RunnerId", str)
ExecutionId = NewType("ExecutionId", str)


class Untold(StrEnum):
    """Marks a field that the source of a value doesn't tell: it must never decide anything final."""

    UNTOLD = "untold"


UNTOLD: Final = Untold.UNTOLD


class ClientStatus(StrEnum):
    """What the node says of an allocation (Nomad's ClientStatus)."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"
    LOST = "lost"
    UNKNOWN = "unknown"


class DesiredStatus(StrEnum):
    """What the scheduler wants of an allocation (Nomad's DesiredStatus)."""

    RUN = "run"
    STOP = "stop"
    EVICT = "evict"


class JobStatus(StrEnum):
    """What the executor says of a job (Nomad's Status); it alone proves nothing."""

    PENDING = "pending"
    RUNNING = "running"
    DEAD = "dead"


class Phase(StrEnum):
    """Of a runner. Gone is final."""

    IDLE = "idle"
    USED = "used"
    GONE = "gone"


class JobState(StrEnum):
    """Derived: what may be expected of a job."""

    STARTING = "starting"
    DOUBTFUL = "doubtful"
    LIVE = "live"
    ENDED = "ended"


class Reason(StrEnum):
    """Why a runner is gone."""

    RESTARTED = "restarted"
    MIGRATED = "migrated"
    STOPPED = "stopped"
    COMPLETE = "complete"
    FAILED = "failed"
    LOST = "lost"
    DISCONNECTED = "disconnected"
    OUT_OF_MEMORY = "out_of_memory"
    RELEASED = "released"  # DELETE /runners/{id}
    INACTIVE = "inactive"  # the inactivity timeout
    UNSTOPPABLE = "unstoppable"  # a command survived its time limit
    SPENT = "spent"  # its allocation was used before
    SURPLUS = "surplus"  # the pool is larger than wanted
    REPLACED = "replaced"  # its environment changed
    REMOVED = "removed"  # its environment was deleted
    PLACEMENT_FAILED = "placement_failed"
    OVERDUE = "overdue"  # too long without a running life
    DEAD = "dead"  # looked up: nothing will come back
    SHUTDOWN = "shutdown"  # serve --stop-runners


@dataclass(frozen=True, slots=True)
class Environment:
    """What to run in. Limits as the client gives them: cpu in MHz shares, memory in MB (0: the executor's default)."""

    id: EnvironmentId
    image: str
    pool_size: int
    cpu_limit: int = 0
    memory_limit: int = 0
    network_access: bool = False
    exposed_ports: tuple[int, ...] = ()
    executor: str = "local"
    generation: int = 1
    """Rises with each PUT that is more than a change of size; jobs of older generations are replaced."""
    compatible_since: int = 1
    """Idle runners of this generation and newer may still be claimed (an identical PUT only refreshes)."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a runner that can be reached from outside, as in the API's mappedPorts."""

    exposed: int
    address: str
    """host:port"""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One placement of a job on a node, as far as the source told. Versions and creation indices only compare."""

    id: AllocationId
    job: JobId
    version: int
    created: int
    client: ClientStatus
    desired: DesiredStatus = DesiredStatus.RUN
    slot: int = 0
    started: str | None = None
    """Start of the running task: opaque, equal for one life, None while no task runs."""
    node_id: str = ""
    node_name: str = ""
    restarts: int = 0
    migrate: bool = False
    oom_killed: bool = False
    """The newest termination of the task was an out-of-memory kill."""
    follow_up: str | Untold | None = UNTOLD
    previous: AllocationId | Untold | None = UNTOLD
    next: AllocationId | Untold | None = UNTOLD
    ports: tuple[Port, ...] = ()
    trouble: str = field(default="", compare=False)
    """What the executor tells of its failure, for people; decides nothing, and isn't stored."""


@dataclass(frozen=True, slots=True)
class JobSeen:
    """The executor has this job, as of *version*. *used* is its own record (a mark), None if not told."""

    job: JobId
    version: int
    status: JobStatus
    used: bool | None = None


@dataclass(frozen=True, slots=True)
class JobGone:
    """The executor has removed this job, as of *version*."""

    job: JobId
    version: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything that an executor had: of all jobs, or of *only* one, each table up to its index."""

    jobs: tuple[JobSeen, ...]
    allocations: tuple[Allocation, ...]
    jobs_index: int
    allocations_index: int
    only: JobId | None = None
    jobs_only: bool = False
    """Allocations weren't listed: their absence means nothing (their index is 0)."""


Value = Allocation | JobSeen | JobGone


@dataclass(frozen=True, slots=True)
class Intent:
    """A start or stop that we want. Kept until done: *answered* is the executor's index, None while unanswered."""

    asked_at: float
    answered: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What we know of one job beside its allocations."""

    id: JobId
    environment: EnvironmentId
    generation: int = 0
    ours: bool = False
    adopted: bool = False
    """Ours, or looked up: only then may its lives become runners."""
    id_issued: bool = False
    """A runner has had the job's id."""
    version: int = 0
    """Newest JobSeen; 0: none."""
    status: JobStatus | None = None
    gone_version: int = 0
    """Newest JobGone, or the listing that lacked the job; 0: none."""
    mark: bool | None = None
    """The executor's used mark as far as known."""
    start: Intent | None = None
    stop: Intent | None = None
    stop_reason: Reason | None = None
    doubtful_since: float | None = None
    lifeless_since: float | None = None


@dataclass(frozen=True, slots=True)
class Runner:
    """One life of an allocation, handed to at most one client, ever."""

    id: RunnerId
    environment: EnvironmentId
    job: JobId
    allocation: AllocationId
    started: str
    node_id: str
    node_name: str
    phase: Phase
    ready_at: float
    startup: float | None = None
    """Seconds from the job's start to readiness; None for jobs that we didn't start."""
    reason: Reason | None = None
    timeout: int = 0
    """Inactivity timeout in seconds; 0: never."""
    claimed_at: float | None = None
    gone_at: float | None = None
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of history. *kind* is "runner", "allocation" or "job"; *before* is "" at the beginning."""

    at: float
    kind: str
    subject: str
    environment: EnvironmentId
    before: str
    after: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Position:
    """How far we have followed an executor. All opaque but to itself."""

    stream: int = 0
    jobs_index: int = 0
    allocations_index: int = 0
    epoch: int = 0
    """Rises when the cluster has gone back and all versions were forgotten."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What one or more steps of the core changed: to be saved in one transaction."""

    jobs: tuple[Job, ...] = ()
    ended: tuple[JobId, ...] = ()
    """Jobs that are over and proven so: no longer in memory."""
    allocations: tuple[Allocation, ...] = ()
    absent: tuple[AllocationId, ...] = ()
    """Allocations that the executor no longer has."""
    runners: tuple[Runner, ...] = ()
    transitions: tuple[Transition, ...] = ()
    position: Position | None = None

    def __bool__(self) -> bool:
        return bool(
            self.jobs
            or self.ended
            or self.allocations
            or self.absent
            or self.runners
            or self.transitions
            or self.position
        )


@dataclass(frozen=True, slots=True)
class Records:
    """What the store gives back at start: all jobs not proven ended, their allocations, and their runners."""

    jobs: tuple[Job, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    runners: tuple[Runner, ...] = ()
    """Every runner, gone or not, of those jobs."""
    position: Position = field(default_factory=Position)


def environment_of(job: JobId | str) -> EnvironmentId | None:
    """The environment in a job id of our form, `<decimal id>-<uuid>`; None for any other name.

    Ids fit into 63 bits, as in the API and the store.
    """
    digits, dash, rest = job.partition("-")
    if not dash or not digits.isascii() or not digits.isdigit() or (digits != "0" and digits[0] == "0"):
        return None
    try:
        canonical = str(UUID(rest))
    except ValueError:
        return None
    fits = len(digits) <= 19 and int(digits) < 2**63
    return EnvironmentId(int(digits)) if fits and canonical == rest.lower() else None

"""All that can happen to a fleet, and all that it can decide, on one page.

Beside these the fleet takes the values that an executor tells: Allocation, JobSeen, JobGone.
"""

from dataclasses import dataclass

from poseidon.core.model import (
    Allocation,
    EnvironmentId,
    JobGone,
    JobId,
    JobSeen,
    Listing,
    Reason,
    RunnerId,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """When a listing or look-up was asked for, and the highest versions applied by then (`Fleet.ask`)."""

    at: float
    jobs_version: int
    allocations_version: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A listing of everything has arrived."""

    listing: Listing
    asked: Asked


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A look-up of one job has arrived. An unadopted job is adopted by it."""

    job: JobId
    listing: Listing
    asked: Asked
    used: bool = False
    timeout: int = 0
    issued: bool = False
    """The job, or its id, has had a runner before, and was over: it must not come back (asked of the store)."""


@dataclass(frozen=True, slots=True)
class Start:
    """We want a new job. Recorded before the executor is asked."""

    job: JobId
    environment: EnvironmentId
    generation: int
    mark: bool | None = None
    """The used mark that the executor will have on record: False, or None if it keeps none."""


@dataclass(frozen=True, slots=True)
class Started:
    """The executor has answered a start: the job exists as of *index*."""

    job: JobId
    index: int


@dataclass(frozen=True, slots=True)
class Stop:
    """We want a job gone, whatever it is doing. Recorded before the executor is asked."""

    job: JobId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Stopped:
    """The executor has answered a stop: the job is to be gone as of *index*."""

    job: JobId
    index: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A client gets this idle runner. *timeout*: inactivity in seconds, 0 for never."""

    runner: RunnerId
    timeout: int = 0


@dataclass(frozen=True, slots=True)
class Marked:
    """The executor's record of use has been written."""

    job: JobId
    used: bool


@dataclass(frozen=True, slots=True)
class Overdue:
    """A job has had no running life for longer than a start may take."""

    job: JobId


Event = Allocation | JobSeen | JobGone | Listed | LookedUp | Start | Started | Stop | Stopped | Claim | Marked | Overdue


@dataclass(frozen=True, slots=True)
class EndExecutions:
    """A used runner is gone: end what runs in it. Once per runner."""

    runner: RunnerId
    reason: Reason


@dataclass(frozen=True, slots=True)
class StopJob:
    """Ask the executor to remove this job. Once per stop intent."""

    job: JobId


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the executor about this job, not before *at*, and hand in a LookedUp."""

    job: JobId
    at: float


@dataclass(frozen=True, slots=True)
class Mark:
    """Write the executor's record of use; by the time of writing, `Fleet.wanted_mark` counts."""

    job: JobId
    used: bool


@dataclass(frozen=True, slots=True)
class PoolChanged:
    """Idle or starting runners of this environment have changed."""

    environment: EnvironmentId


Decision = EndExecutions | StopJob | LookUp | Mark | PoolChanged

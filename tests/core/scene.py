"""Short words for plain tests of the fleet: one job, its allocations, what is decided."""

from collections.abc import Iterable
from itertools import count
from uuid import UUID

from poseidon.core.events import Claim, Decision, EndExecutions, Event, Listed, LookedUp, Mark, Start, Started, StopJob
from poseidon.core.fleet import Fleet
from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    EnvironmentId,
    JobGone,
    JobId,
    JobSeen,
    JobState,
    JobStatus,
    Listing,
    Phase,
    Records,
    Runner,
    RunnerId,
)
from tests.core.ledger import Ledger

TEN = EnvironmentId(10)
SETTLE = 3.0


def job_id(number: int = 1, environment: int = 10) -> JobId:
    return JobId(f"{environment}-{UUID(int=number)}")


J = job_id()


def allocation(
    id: str,
    version: int,
    *,
    job: JobId = J,
    created: int = 10,
    client: str = "running",
    desired: str = "run",
    started: str | None = "s1",
    slot: int = 0,
    migrate: bool = False,
    follow_up: str | None = None,
    next: str | None = None,
    oom_killed: bool = False,
    node: str = "node-1",
) -> Allocation:
    """An allocation as an event tells it, by default one that runs its first life."""
    return Allocation(
        AllocationId(id),
        job,
        version,
        created,
        ClientStatus(client),
        DesiredStatus(desired),
        slot=slot,
        started=started if client in ("running", "unknown") else None,
        node_name=node,
        migrate=migrate,
        oom_killed=oom_killed,
        follow_up=follow_up,
        previous=None,
        next=None if next is None else AllocationId(next),
    )


def seen(version: int, status: str = "running", *, job: JobId = J, used: bool | None = None) -> JobSeen:
    return JobSeen(job, version, JobStatus(status), used)


class Scene:
    """A fleet that knows environment 10, with a clock and a ledger."""

    def __init__(self, records: Records | None = None, *, mark: bool | None = False) -> None:
        self.now = 1000.0
        self.mark = mark
        self.ledger = Ledger()
        self._numbers = count(1)
        self.fleet = self._fleet(records)

    def _fleet(self, records: Records | None) -> Fleet:
        fleet = Fleet(
            settle=SETTLE,
            mint=lambda environment: RunnerId(f"{environment}-new-{next(self._numbers)}"),
            records=records,
        )
        fleet.know(TEN, 1)
        return fleet

    def hand_in(self, *events: Event) -> list[Decision]:
        decisions = [decision for event in events for decision in self.fleet.handle(event, self.now)]
        self.ledger.save(self.fleet.take_changes())
        return decisions

    def starts(self, job: JobId = J, *, index: int = 9) -> None:
        """One of our own jobs, its start answered."""
        self.hand_in(Start(job, TEN, generation=1, mark=self.mark), Started(job, index))

    def runs(self, id: str = "a1", version: int = 11, **how: object) -> Runner:
        """Our job runs for the first time."""
        self.starts()
        self.hand_in(seen(10), allocation(id, version, **how))  # type: ignore[arg-type]
        return self.only

    def claims(self, timeout: int = 30) -> Runner:
        runner = self.fleet.idle(TEN)
        assert runner is not None
        self.hand_in(Claim(runner.id, timeout))
        return runner

    def lists(
        self,
        *values: JobSeen | Allocation,
        index: int,
        after: float = 10 * SETTLE,
        jobs_index: int | None = None,
    ) -> list[Decision]:
        """A listing asked for *after* so many seconds, and answered at once."""
        self.now += after
        return self.hand_in(Listed(listing(*values, index=index, jobs_index=jobs_index), self.fleet.ask(self.now)))

    def looks_up(
        self,
        *values: JobSeen | Allocation,
        index: int,
        job: JobId = J,
        used: bool = False,
        issued: bool = False,
        after: float = 10 * SETTLE,
    ) -> list[Decision]:
        self.now += after
        found = listing(*values, index=index, only=job)
        return self.hand_in(LookedUp(job, found, self.fleet.ask(self.now), used, timeout=60, issued=issued))

    def restarts(self) -> list[Decision]:
        """The daemon, from what the ledger holds."""
        self.fleet = self._fleet(self.ledger.records())
        decisions = self.fleet.resume(self.now)
        self.ledger.save(self.fleet.take_changes())
        return decisions

    @property
    def only(self) -> Runner:
        """The one living runner."""
        (runner,) = self.fleet.runners()
        return runner

    def state(self, job: JobId = J) -> str:
        """idle, used, starting, doubtful, ended (a stop is under way), or gone."""
        for known, state, runner in self.fleet.jobs(TEN):
            if known.id == job:
                return str(runner.phase if runner is not None else state)
        return "gone"

    def knows(self, job: JobId = J) -> bool:
        return self.fleet.job(job) is not None


def listing(
    *values: JobSeen | Allocation, index: int, jobs_index: int | None = None, only: JobId | None = None
) -> Listing:
    jobs = tuple(value for value in values if isinstance(value, JobSeen))
    allocations = tuple(value for value in values if isinstance(value, Allocation))
    return Listing(jobs, allocations, index if jobs_index is None else jobs_index, index, only)


def ends(decisions: Iterable[Decision]) -> list[tuple[RunnerId, str]]:
    return [(one.runner, str(one.reason)) for one in decisions if isinstance(one, EndExecutions)]


def stops(decisions: Iterable[Decision]) -> list[JobId]:
    return [one.job for one in decisions if isinstance(one, StopJob)]


def marks(decisions: Iterable[Decision]) -> list[bool]:
    return [one.used for one in decisions if isinstance(one, Mark)]


__all__ = [
    "SETTLE",
    "TEN",
    "J",
    "JobGone",
    "JobState",
    "Phase",
    "Scene",
    "allocation",
    "ends",
    "job_id",
    "listing",
    "marks",
    "seen",
    "stops",
]

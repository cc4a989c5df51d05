"""All jobs of one executor with what belongs to them, and how they are found: what the fleet knows between two events.

Pure. Reading is for everybody; only the fleet changes anything here, and tells the journal of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from poseidon.core import rules
from poseidon.core.journal import Journal
from poseidon.core.model import (
    Allocation,
    AllocationId,
    Changes,
    EnvironmentId,
    Job,
    JobId,
    JobState,
    Listing,
    Phase,
    Position,
    Records,
    Runner,
    RunnerId,
)


@dataclass(slots=True)
class Entry:
    """One job with all that belongs to it."""

    job: Job
    allocations: dict[AllocationId, Allocation] = field(default_factory=dict)
    runner: Runner | None = None
    spent: set[AllocationId] = field(default_factory=set)
    """Allocations in which a runner was used: none of their later lives is handed out."""
    floor: int = 0
    """Allocations index of the newest look-up: older news of unknown allocations is ignored."""
    look_up_asked: bool = False
    """An unadopted job is looked up once; the shell repeats what fails."""
    mark_asked: bool | None = None
    """The mark last decided, so that the same input decides nothing twice."""


class Roster:
    """What is known of one executor's jobs, allocations and living runners."""

    def __init__(self) -> None:
        self._entries: dict[JobId, Entry] = {}
        self._by_environment: dict[EnvironmentId, dict[JobId, Entry]] = {}
        self._idle: dict[EnvironmentId, dict[RunnerId, JobId]] = {}
        self._live: dict[RunnerId, JobId] = {}
        self._journal = Journal()
        self._position = Position()
        self._highest_job = 0
        self._highest_allocation = 0

    def idle(self, environment: EnvironmentId, oldest_generation: int = 0) -> Runner | None:
        """The idle runner that has waited longest, of *oldest_generation* or newer."""
        for runner_id, job_id in self._idle.get(environment, {}).items():
            entry = self._entries[job_id]
            if entry.job.generation >= oldest_generation:
                assert entry.runner is not None
                assert entry.runner.id == runner_id
                return entry.runner
        return None

    def runner(self, runner: RunnerId) -> Runner | None:
        """The living runner with this id, idle or used."""
        job = self._live.get(runner)
        return None if job is None else self._entries[job].runner

    def living(self, job: JobId) -> Runner | None:
        """The living runner of a job."""
        entry = self._entries.get(job)
        return None if entry is None else entry.runner

    def runners(self) -> Iterator[Runner]:
        """All living runners."""
        for job in self._live.values():
            runner = self._entries[job].runner
            assert runner is not None
            yield runner

    def job(self, job: JobId) -> Job | None:
        """What is known of a job."""
        entry = self._entries.get(job)
        return None if entry is None else entry.job

    def trouble(self, job: JobId) -> str:
        """What the executor tells of a job's failure; empty if it tells nothing."""
        entry = self._entries.get(job)
        told = [known for known in entry.allocations.values() if known.trouble] if entry is not None else []
        return max(told, key=lambda known: known.created).trouble if told else ""

    def jobs(self, environment: EnvironmentId) -> Iterator[tuple[Job, JobState, Runner | None]]:
        """All jobs of *environment* that aren't over, with their states and living runners."""
        for entry in self._by_environment.get(environment, {}).values():
            yield entry.job, self._state(entry), entry.runner

    def environments(self) -> set[EnvironmentId]:
        """The environments that have jobs, known or not."""
        return {environment for environment, entries in self._by_environment.items() if entries}

    def allocation(self, runner: Runner) -> Allocation | None:
        """The allocation that *runner* lives in, while it lives."""
        entry = self._entries.get(runner.job)
        return None if entry is None else entry.allocations.get(runner.allocation)

    def unanswered_starts(self) -> list[JobId]:
        """Jobs whose start was recorded but not answered; none of them is to be stopped."""
        return [
            entry.job.id for entry in self._entries.values() if entry.job.stop is None and rules.awaits_start(entry.job)
        ]

    def needs_look_up(self, job: JobId) -> bool:
        """Whether a look-up decided earlier is still wanted."""
        entry = self._entries.get(job)
        return (
            entry is not None
            and entry.job.stop is None
            and (not entry.job.adopted or entry.job.doubtful_since is not None)
        )

    def wanted_mark(self, job: JobId) -> bool | None:
        """What the executor's record of use should say; None: leave it alone."""
        entry = self._entries.get(job)
        if entry is None or entry.runner is None or entry.job.stop is not None:
            return None
        return entry.runner.phase is Phase.USED

    def overdue(self, now: float, limit: float) -> list[JobId]:
        """Jobs that have been without a running life for more than *limit* seconds, whatever happened meanwhile."""
        return [
            entry.job.id
            for entry in self._entries.values()
            if entry.job.stop is None
            and entry.job.adopted
            and entry.job.lifeless_since is not None
            and now - entry.job.lifeless_since > limit
        ]

    def unproven_stops(self) -> int:
        """Stops that are answered but not yet proven by a listing."""
        return sum(1 for entry in self._entries.values() if entry.job.stop is not None)

    def expected(self, known: int | None = None) -> int:
        """How many jobs the executor must have, by all that it has told and was asked for, or by what it had up to
        the version *known*."""
        return sum(
            1
            for entry in self._entries.values()
            if rules.must_exist(entry.job) and (known is None or entry.job.version <= known)
        )

    def witness(self) -> JobId | None:
        """One of these jobs, if possible with a living runner."""
        expected = (entry for entry in self._entries.values() if rules.must_exist(entry.job))
        best = max(expected, key=lambda entry: entry.runner is not None, default=None)
        return None if best is None else best.job.id

    def recognises(self, listing: Listing, known: int) -> bool:
        """Whether a full listing is of the executor that we know: it has something of ours, or needn't have.

        Ids of jobs and allocations are unique; one of them is enough, be it of a job that is over. A cluster that was
        restored from a backup has some. *known*: the highest version of a job when the listing was asked for; jobs
        that came later needn't be in it."""
        return (
            any(seen.job in self._entries for seen in listing.jobs)
            or any(self._knows(allocation) for allocation in listing.allocations)
            or not self.expected(known)
        )

    def _knows(self, allocation: Allocation) -> bool:
        entry = self._entries.get(allocation.job)
        return entry is not None and allocation.id in entry.allocations

    def take_changes(self) -> Changes:
        """What has changed since the last call, to be saved in one transaction."""
        return self._journal.take()

    @property
    def position(self) -> Position:
        """How far the executor has been followed."""
        return self._position

    # What follows from one job's values

    def _current(self, entry: Entry) -> Allocation | None:
        return rules.current(entry.job, entry.allocations)

    def _listed_up_to(self, entry: Entry) -> int:
        """The index up to which the job's unknown allocations are known to be gone."""
        return max(self._position.allocations_index, entry.floor)

    def _state(self, entry: Entry) -> JobState:
        if entry.job.stop is not None:
            return JobState.ENDED
        if entry.runner is not None:
            return JobState.LIVE
        if not entry.job.adopted or self._current(entry) is not None:
            return JobState.STARTING
        if rules.will_return(entry.job, entry.allocations, self._listed_up_to(entry)):
            return JobState.STARTING
        return JobState.DOUBTFUL

    # Bookkeeping

    def _add(self, job: Job) -> Entry:
        entry = Entry(job)
        self._entries[job.id] = entry
        self._by_environment.setdefault(job.environment, {})[job.id] = entry
        self._journal.job(job)
        return entry

    def _update(self, entry: Entry, job: Job) -> None:
        entry.job = job
        self._journal.job(job)

    def _remove(self, entry: Entry) -> None:
        assert entry.runner is None
        del self._entries[entry.job.id]
        del self._by_environment[entry.job.environment][entry.job.id]
        for allocation in entry.allocations:
            self._journal.absent(allocation)  # should the job come back, these mustn't
        self._journal.end(entry.job.id)

    def _restore(self, records: Records) -> None:
        self._position = records.position
        for job in records.jobs:
            self._add(job)
            self._highest_job = max(self._highest_job, job.version)
        for allocation in records.allocations:
            if allocation.job in self._entries:
                self._entries[allocation.job].allocations[allocation.id] = allocation
                self._highest_allocation = max(self._highest_allocation, allocation.version)
        for runner in sorted(records.runners, key=lambda known: known.ready_at):
            entry = self._entries.get(runner.job)
            if entry is None:
                continue
            if runner.claimed_at is not None:
                entry.spent.add(runner.allocation)
            if runner.phase is not Phase.GONE:
                entry.runner = runner
                self._live[runner.id] = runner.job
                if runner.phase is Phase.IDLE:
                    self._idle.setdefault(runner.environment, {})[runner.id] = runner.job
        self._journal.take()

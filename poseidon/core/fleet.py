"""The state of all jobs, allocations and runners of one executor: events in, decisions out.

Pure: values are kept as they come (the newest of each object wins), everything else is derived from them after each
event, so that order, repeats and gaps don't matter. It must not perform anything, and cannot fail.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import assert_never

from poseidon.core import rules
from poseidon.core.events import (
    Asked,
    Claim,
    Decision,
    EndExecutions,
    Event,
    Listed,
    LookedUp,
    LookUp,
    Mark,
    Marked,
    Overdue,
    PoolChanged,
    Start,
    Started,
    Stop,
    StopJob,
    Stopped,
)
from poseidon.core.model import (
    Allocation,
    AllocationId,
    EnvironmentId,
    Intent,
    Job,
    JobGone,
    JobId,
    JobSeen,
    JobState,
    JobStatus,
    Listing,
    Phase,
    Position,
    Reason,
    Records,
    Runner,
    RunnerId,
    environment_of,
)
from poseidon.core.roster import Entry, Roster


class Fleet(Roster):
    """What we know of one executor's jobs, and what follows from it.

    *settle*: seconds that a doubt must last before a look-up may confirm it. *mint* makes ids never made before.
    """

    def __init__(
        self, *, settle: float, mint: Callable[[EnvironmentId], RunnerId], records: Records | None = None
    ) -> None:
        super().__init__()
        self._settle = settle
        self._mint = mint
        self._generations: dict[EnvironmentId, int] = {}
        self._went_back = 0
        if records is not None:
            self._restore(records)

    # What happens

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in *event* and return what is to be done about it. *now*: seconds since the epoch, never decreasing."""
        match event:
            case Allocation():
                touched = self._see_allocation(event, now)
            case JobSeen():
                touched = self._see_job(event, now)
            case JobGone():
                touched = self._see_gone(event)
            case Listed():
                return self._listed(event, now)
            case LookedUp():
                return self._looked_up(event, now)
            case Start():
                touched = self._start(event, now)
            case Started():
                touched = self._started(event)
            case Stop():
                return self._stop(self._entries.get(event.job), event.reason, now)
            case Stopped():
                return self._stopped(event)
            case Claim():
                return self._claim(event, now)
            case Marked():
                touched = self._marked(event)
            case Overdue():
                return self._overdue(event, now)
            case _:
                assert_never(event)
        return self._derive(touched, now) if touched else []

    def know(self, environment: EnvironmentId, generation: int) -> None:
        """From now on *environment* is known: strangers' jobs of it will be adopted, as of *generation*."""
        self._generations[environment] = generation

    def forget(self, environment: EnvironmentId) -> None:
        """*environment* is no longer known: new jobs of it are left alone."""
        self._generations.pop(environment, None)

    def ask(self, now: float) -> Asked:
        """To be called before a listing or look-up is asked for, and handed in with its result."""
        position = self._position
        return Asked(
            now,
            max(self._highest_job, position.jobs_index),
            max(self._highest_allocation, position.allocations_index),
        )

    def advance(self, stream: int) -> None:
        """The stream has been applied up to *stream*."""
        if stream != self._position.stream:
            self._position = replace(self._position, stream=stream)
            self._journal.position = self._position

    def resume(self, now: float) -> list[Decision]:
        """What is left to do after a restart: answers, look-ups and marks that were under way."""
        decisions: list[Decision] = []
        for entry in list(self._entries.values()):
            if entry.job.stop is not None and entry.job.stop.answered is None:
                decisions.append(StopJob(entry.job.id))
            elif self.needs_look_up(entry.job.id):
                entry.look_up_asked = True
                decisions.append(LookUp(entry.job.id, now))
            entry.mark_asked = None
            decisions += self._derive(entry, now)
        return decisions

    # Values: the newest of each object wins (rule 1)

    def _see_allocation(self, new: Allocation, now: float, as_of: int | None = None) -> Entry | None:
        """Take in *new*, from the stream or from a listing *as_of* an index."""
        if new.slot != 0:
            return None
        entry = self._entries.get(new.job)
        if entry is None:
            if _is_old_news(new.version, self._position.allocations_index, as_of) or not rules.lives(new):
                return None  # also the end of something that we never knew
            entry = self._adoptable(new.job, now)
            if entry is None:
                return None
        known = entry.allocations.get(new.id)
        if known is None:
            if _is_old_news(new.version, self._listed_up_to(entry), as_of):
                return None
        elif new.version <= known.version:
            return None
        self._keep(entry, new, known, now)
        return entry

    def _keep(self, entry: Entry, new: Allocation, known: Allocation | None, now: float) -> None:
        self._highest_allocation = max(self._highest_allocation, new.version)
        merged = rules.merge(new, known)
        entry.allocations[new.id] = merged
        self._journal.allocation(merged, known, entry.job.environment, now)

    def _see_job(self, new: JobSeen, now: float, as_of: int | None = None) -> Entry | None:
        """Take in *new*, from the stream or from a listing *as_of* an index."""
        entry = self._entries.get(new.job)
        if entry is None:
            if _is_old_news(new.version, self._position.jobs_index, as_of) or new.status is JobStatus.DEAD:
                return None
            entry = self._adoptable(new.job, now)
            if entry is None:
                return None
        job = entry.job
        if new.version < job.version or (new.version == job.version and not _is_livelier(new, job)):
            return None
        self._highest_job = max(self._highest_job, new.version)
        mark = job.mark if new.used is None else new.used
        self._update(entry, replace(job, version=new.version, status=new.status, mark=mark))
        return entry

    def _see_gone(self, gone: JobGone) -> Entry | None:
        entry = self._entries.get(gone.job)
        if entry is None or gone.version <= entry.job.gone_version:
            return None
        self._update(entry, replace(entry.job, gone_version=gone.version))  # not of the table: it may stay below
        return entry

    def _adoptable(self, job: JobId, now: float) -> Entry | None:
        """An entry for a job that somebody else has started, if it is one of our form and of a known environment."""
        environment = environment_of(job)
        if environment is None or environment not in self._generations:
            return None
        return self._add(
            Job(job, environment, generation=self._generations[environment], lifeless_since=now, doubtful_since=None)
        )

    # Listings: everything up to their index (rule 3)

    def _listed(self, event: Listed, now: float) -> list[Decision]:
        listing, asked = event.listing, event.asked
        decisions: list[Decision] = []
        if listing.jobs_only:
            pass  # only a full listing can replace what is known
        elif listing.jobs_index < asked.jobs_version or listing.allocations_index < asked.allocations_version:
            self._went_back += 1
            if self._went_back >= 2:
                decisions = self._forget_versions(listing, now)
        else:
            self._went_back = 0
        touched = self._apply(listing, now)
        position = replace(
            self._position,
            jobs_index=max(self._position.jobs_index, listing.jobs_index),
            allocations_index=max(self._position.allocations_index, listing.allocations_index),
        )
        if position != self._position:
            self._position = self._journal.position = position
        return [*decisions, *self._conclude(touched, listing, asked, now)]

    def _looked_up(self, event: LookedUp, now: float) -> list[Decision]:
        if event.job not in self._entries:
            return []
        touched = self._apply(event.listing, now)
        entry = self._entries[event.job]
        decisions: list[Decision] = []
        if not entry.job.adopted and any(seen.job == event.job for seen in event.listing.jobs):
            decisions += self._adopt(entry, event, now)
        entry.floor = max(entry.floor, event.listing.allocations_index)
        decisions += self._conclude(touched, event.listing, event.asked, now)
        if self.needs_look_up(event.job):
            decisions.append(LookUp(event.job, now + self._settle))
        return decisions

    def _apply(self, listing: Listing, now: float) -> list[Entry]:
        """Take in all of *listing*, deriving nothing yet; the entries that it speaks of, by presence or absence."""
        for seen in listing.jobs:
            self._see_job(seen, now, listing.jobs_index)
        for allocation in listing.allocations:
            if allocation.job in self._entries or allocation.created > listing.jobs_index:  # else its job is gone
                self._see_allocation(allocation, now, listing.allocations_index)
        if listing.only is None:
            entries = list(self._entries.values())
        else:
            entries = [entry for entry in [self._entries.get(listing.only)] if entry is not None]
        jobs = {seen.job for seen in listing.jobs}
        allocations = {allocation.id for allocation in listing.allocations}
        for entry in entries:
            self._note_absence(entry, listing, entry.job.id not in jobs, allocations)
        return entries

    def _note_absence(self, entry: Entry, listing: Listing, job_absent: bool, allocations: set[AllocationId]) -> None:
        job = entry.job
        if (
            job_absent
            and not rules.awaits_start(job)
            and job.version <= listing.jobs_index
            and job.gone_version < listing.jobs_index
        ):
            self._update(entry, replace(job, gone_version=listing.jobs_index))
        for allocation in list(entry.allocations.values()):
            if allocation.id not in allocations and allocation.version <= listing.allocations_index:
                del entry.allocations[allocation.id]
                self._journal.absent(allocation.id)

    def _conclude(self, entries: Iterable[Entry], listing: Listing, asked: Asked, now: float) -> list[Decision]:
        """Derive what follows from a listing that has been taken in, job by job."""
        jobs = {seen.job for seen in listing.jobs}
        decisions: list[Decision] = []
        for entry in entries:
            present = entry.job.id in jobs
            decisions += self._derive(entry, now)
            if entry.job.stop is not None:
                decisions += self._check_stop(entry, listing, present, now)
            elif not present and self._is_over(entry, listing):
                decisions += self._end(entry)
            elif self._confirms_doubt(entry, listing, asked):
                decisions += self._stop(entry, Reason.DEAD, now)
        return decisions

    def _check_stop(self, entry: Entry, listing: Listing, present: bool, now: float) -> list[Decision]:
        stop = entry.job.stop
        assert stop is not None
        if stop.answered is None or listing.jobs_index < stop.answered:
            return []
        if present:
            self._update(entry, replace(entry.job, stop=Intent(now)))
            return [StopJob(entry.job.id)]
        return self._end(entry)

    def _is_over(self, entry: Entry, listing: Listing) -> bool:
        """Whether a listing that lacks the job proves that it is over."""
        job = entry.job
        return not rules.awaits_start(job) and job.version <= listing.jobs_index and self._current(entry) is None

    def _confirms_doubt(self, entry: Entry, listing: Listing, asked: Asked) -> bool:
        job = entry.job
        return (
            job.adopted
            and not listing.jobs_only
            and job.doubtful_since is not None
            and asked.at >= job.doubtful_since + self._settle
            and listing.jobs_index >= max(job.version, job.gone_version)
            and all(known.version <= listing.allocations_index for known in entry.allocations.values())
        )

    def _forget_versions(self, listing: Listing, now: float) -> list[Decision]:
        """The cluster went back in time: keep lives and intents, but take *listing* as it is."""
        listed = {allocation.id for allocation in listing.allocations}
        decisions: list[Decision] = []
        for entry in self._entries.values():
            decisions += self._ask_again(entry, now)
            for allocation in list(entry.allocations.values()):
                if allocation.id in listed:
                    entry.allocations[allocation.id] = replace(allocation, version=0, created=0)
                else:
                    del entry.allocations[allocation.id]
                    self._journal.absent(allocation.id)
            entry.floor = 0
        self._highest_job = self._highest_allocation = self._went_back = 0
        self._position = self._journal.position = Position(epoch=self._position.epoch + 1)
        return decisions

    def _ask_again(self, entry: Entry, now: float) -> list[Decision]:
        """What the executor has answered may be undone: stops and marks are to be repeated."""
        job = entry.job
        used = entry.runner is not None and entry.runner.phase is Phase.USED
        mark = not used if job.mark is not None and entry.spent else job.mark
        answered = job.stop is not None and job.stop.answered is not None
        stop = Intent(now) if answered else job.stop
        entry.mark_asked = None
        self._update(entry, replace(job, version=0, gone_version=0, mark=mark, stop=stop))
        return [StopJob(job.id)] if answered else []

    def _adopt(self, entry: Entry, found: LookedUp, now: float) -> list[Decision]:
        """A stranger's job becomes ours; if it is in use, its runner has the job's id, as its client knows it."""
        self._update(entry, replace(entry.job, adopted=True, mark=found.used))
        if found.issued:  # it was over, and a client may have had its allocation
            return self._stop(entry, Reason.SPENT, now)
        if not found.used:
            return []
        current = self._current(entry)
        if current is None or not rules.runs(current):
            return self._stop(entry, Reason.SPENT, now)
        self._issue(entry, current, now, named_after_job=True)
        assert entry.runner is not None
        return self._use(entry, found.timeout, now)

    # What we want ourselves (rule 7)

    def _start(self, event: Start, now: float) -> Entry | None:
        if event.job in self._entries:
            return None
        return self._add(
            Job(
                event.job,
                event.environment,
                generation=event.generation,
                ours=True,
                adopted=True,
                mark=event.mark,
                start=Intent(now),
                lifeless_since=now,
            )
        )

    def _started(self, event: Started) -> Entry | None:
        entry = self._entries.get(event.job)
        if entry is None or entry.job.start is None or entry.job.start.answered is not None:
            return None
        job = replace(entry.job, start=replace(entry.job.start, answered=event.index))
        if event.index > job.version:
            job = replace(job, version=event.index, status=JobStatus.PENDING)
            self._highest_job = max(self._highest_job, event.index)
        self._update(entry, job)
        return entry

    def _stop(self, entry: Entry | None, reason: Reason, now: float) -> list[Decision]:
        """Record that the job is to go; its runner is hidden at once."""
        if entry is None or entry.job.stop is not None:
            return []
        self._update(entry, replace(entry.job, stop=Intent(now), stop_reason=reason, doubtful_since=None))
        decisions = self._lose(entry, reason, now)
        return [*decisions, StopJob(entry.job.id), PoolChanged(entry.job.environment)]

    def _stopped(self, event: Stopped) -> list[Decision]:
        entry = self._entries.get(event.job)
        if entry is not None and entry.job.stop is not None and entry.job.stop.answered is None:
            self._update(entry, replace(entry.job, stop=replace(entry.job.stop, answered=event.index)))
        return []

    def _claim(self, event: Claim, now: float) -> list[Decision]:
        runner = self.runner(event.runner)
        if runner is None or runner.phase is not Phase.IDLE:
            return []
        entry = self._entries[runner.job]
        return [*self._use(entry, event.timeout, now), *self._derive(entry, now)]

    def _marked(self, event: Marked) -> Entry | None:
        entry = self._entries.get(event.job)
        if entry is None:
            return None
        entry.mark_asked = None
        if entry.job.mark != event.used:
            self._update(entry, replace(entry.job, mark=event.used))
        return entry

    def _overdue(self, event: Overdue, now: float) -> list[Decision]:
        entry = self._entries.get(event.job)
        if entry is None or not entry.job.adopted or entry.job.lifeless_since is None:
            return []
        return self._stop(entry, Reason.OVERDUE, now)

    def _end(self, entry: Entry) -> list[Decision]:
        """The job is over, and proven so."""
        self._remove(entry)
        return [PoolChanged(entry.job.environment)]

    # What follows (rules 2, 4, 5, 6)

    def _derive(self, entry: Entry, now: float) -> list[Decision]:
        before = (self._state(entry), entry.runner)
        decisions: list[Decision] = []
        current = self._current(entry)
        runner = entry.runner
        if runner is not None and not rules.is_life(current, runner):
            decisions += self._lose(entry, rules.why_gone(entry.allocations.get(runner.allocation), current), now)
        if entry.job.stop is None and entry.job.adopted:
            if current is not None and current.id in entry.spent and entry.runner is None:
                return [*decisions, *self._stop(entry, Reason.SPENT, now)]
            if current is not None and rules.runs(current) and entry.runner is None:
                self._issue(entry, current, now, named_after_job=entry.job.ours)
        if not entry.job.adopted and not entry.look_up_asked:
            entry.look_up_asked = True
            decisions.append(LookUp(entry.job.id, now))
        decisions += self._note_time(entry, now)
        decisions += self._mark(entry)
        if (self._state(entry), entry.runner) != before:
            decisions.append(PoolChanged(entry.job.environment))
        return decisions

    def _issue(self, entry: Entry, allocation: Allocation, now: float, *, named_after_job: bool) -> None:
        """The life of *allocation* becomes an idle runner (rule 5 tells which ones have the job's id)."""
        job = entry.job
        assert allocation.started is not None
        first = named_after_job and not job.id_issued
        runner_id = RunnerId(job.id) if first else self._mint(job.environment)
        runner = Runner(
            runner_id,
            job.environment,
            job.id,
            allocation.id,
            allocation.started,
            allocation.node_id,
            allocation.node_name,
            Phase.IDLE,
            ready_at=now,
            startup=now - job.start.asked_at if first and job.start is not None else None,
            ports=allocation.ports,
        )
        if first:
            self._update(entry, replace(job, id_issued=True))
        self._set_runner(entry, runner, now)
        self._live[runner_id] = job.id
        self._idle.setdefault(job.environment, {})[runner_id] = job.id

    def _use(self, entry: Entry, timeout: int, now: float) -> list[Decision]:
        runner = entry.runner
        assert runner is not None
        entry.spent.add(runner.allocation)
        self._idle[runner.environment].pop(runner.id, None)
        self._set_runner(entry, replace(runner, phase=Phase.USED, timeout=timeout, claimed_at=now), now)
        return [PoolChanged(runner.environment)]

    def _lose(self, entry: Entry, reason: Reason, now: float) -> list[Decision]:
        runner = entry.runner
        if runner is None:
            return []
        self._live.pop(runner.id)
        self._idle.get(runner.environment, {}).pop(runner.id, None)
        gone = replace(runner, phase=Phase.GONE, reason=reason, gone_at=now)
        self._set_runner(entry, gone, now)
        entry.runner = None
        return [EndExecutions(runner.id, reason)] if runner.phase is Phase.USED else []

    def _set_runner(self, entry: Entry, runner: Runner, now: float) -> None:
        self._journal.runner(runner, entry.runner, now)
        entry.runner = runner

    def _note_time(self, entry: Entry, now: float) -> list[Decision]:
        """Since when the job has been without a running life, and in doubt."""
        job = entry.job
        if job.stop is not None:
            return []
        current = self._current(entry)
        lifeless = not rules.runs(current)
        lifeless_since = (job.lifeless_since if job.lifeless_since is not None else now) if lifeless else None
        doubtful = self._state(entry) is JobState.DOUBTFUL
        doubtful_since = (job.doubtful_since if job.doubtful_since is not None else now) if doubtful else None
        decisions: list[Decision] = []
        if doubtful and job.doubtful_since is None:
            decisions.append(LookUp(job.id, now + self._settle))
        if (lifeless_since, doubtful_since) != (job.lifeless_since, job.doubtful_since):
            self._update(entry, replace(job, lifeless_since=lifeless_since, doubtful_since=doubtful_since))
        return decisions

    def _mark(self, entry: Entry) -> list[Decision]:
        wanted = self.wanted_mark(entry.job.id)
        asked = entry.mark_asked
        if asked is not None and wanted != asked and (asked or wanted):  # it may have been written, though not answered
            self._update(entry, replace(entry.job, mark=asked))
        if wanted is None or entry.job.mark is None or wanted == entry.job.mark:
            entry.mark_asked = None
            return []
        if entry.mark_asked == wanted:
            return []
        entry.mark_asked = wanted
        return [Mark(entry.job.id, wanted)]


def _is_livelier(new: JobSeen, job: Job) -> bool:
    """Whether *new*, of the version that we know, tells more: a job is recorded dead and alive at one version, and
    that it is pending as of our start's answer is but a guess."""
    if job.status is JobStatus.DEAD:
        return new.status is not JobStatus.DEAD
    guessed = job.start is not None and job.start.answered == job.version
    return guessed and job.status is JobStatus.PENDING and new.status is JobStatus.RUNNING


def _is_old_news(version: int, floor: int, as_of: int | None) -> bool:
    """Whether something unknown was known to be gone, by a listing up to *floor*, after it had *version*."""
    return version <= floor and (as_of is None or as_of < floor)

"""A daemon as the core sees it: it carries decisions out late, twice or never, and crashes at any time.

It keeps its own expectations; nothing is read back from the fleet to judge the fleet.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

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
from poseidon.core.fleet import Fleet
from poseidon.core.model import (
    Allocation,
    AllocationId,
    Changes,
    ClientStatus,
    DesiredStatus,
    EnvironmentId,
    JobGone,
    JobId,
    JobSeen,
    Listing,
    Phase,
    Reason,
    Runner,
    RunnerId,
)
from tests.core.cluster import Cluster, Life
from tests.core.ledger import Ledger

SETTLE = 3.0
KNOWN = EnvironmentId(10)
UNKNOWN = EnvironmentId(1)


@dataclass(slots=True)
class Told:
    """The newest that the fleet has been told of each object."""

    allocations: dict[AllocationId, Allocation] = field(default_factory=dict)
    gone: dict[JobId, int] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        match event:
            case Allocation():
                known = self.allocations.get(event.id)
                if known is None or known.version < event.version:
                    self.allocations[event.id] = event
            case JobGone(job, version):
                self.gone[job] = max(self.gone.get(job, 0), version)
            case Listed(listing) | LookedUp(_, listing):
                self._take_listing(listing)

    def _take_listing(self, listing: Listing) -> None:
        for allocation in listing.allocations:
            self.take(allocation)
        listed = {allocation.id for allocation in listing.allocations}
        self.allocations = {
            known.id: known
            for known in self.allocations.values()
            if known.id in listed or known.version > listing.allocations_index or listing.only not in (None, known.job)
        }

    def contradicts(self, runner: Runner) -> bool:
        """Whether what was told says that *runner*'s life is over."""
        known = self.allocations.get(runner.allocation)
        if known is None or known.slot != 0 or known.started != runner.started or known.migrate:
            return True
        if known.client is not ClientStatus.RUNNING or known.desired is not DesiredStatus.RUN:
            return True
        newest = max(one.created for one in self.allocations.values() if one.job == runner.job and one.slot == 0)
        return known.version < newest or known.created <= self.gone.get(runner.job, 0)


@dataclass(slots=True)
class Flight:
    """A listing or look-up under way. *doomed*: jobs that had no future while it was made."""

    asked: Asked
    only: JobId | None
    jobs: tuple[tuple[JobSeen, ...], int]
    allocations: tuple[tuple[Allocation, ...], int]
    doomed: set[JobId]
    used: bool = False

    @property
    def listing(self) -> Listing:
        return Listing(self.jobs[0], self.allocations[0], self.jobs[1], self.allocations[1], self.only)


@dataclass(slots=True)
class Shell:
    """One daemon, with all that it has promised to anybody. *lost*: the cluster has gone back, not known yet."""

    cluster: Cluster
    now: float = 1000.0
    ledger: Ledger = field(default_factory=Ledger)
    known: set[EnvironmentId] = field(default_factory=lambda: {KNOWN})
    fleet: Fleet = field(init=False)
    told: Told = field(default_factory=Told)
    saved_told: Told = field(default_factory=Told)
    unsaved: list[tuple[Changes, Told]] = field(default_factory=list)
    lost: bool = False
    # What clients hold
    handed: dict[RunnerId, tuple[JobId, Life]] = field(default_factory=dict)
    holding: dict[JobId, RunnerId] = field(default_factory=dict)
    """The runner in use of each job, as far as this daemon can know."""
    interrupted: set[Life] = field(default_factory=set)
    ended: Counter[RunnerId] = field(default_factory=Counter)
    # What is to be carried out
    starting: set[JobId] = field(default_factory=set)
    sent: set[JobId] = field(default_factory=set)
    """Starts that the executor may have got, and carry out as late as it likes."""
    stopping: dict[JobId, int | None] = field(default_factory=dict)
    """Jobs to be gone, with the executor's answer, None until it comes in; until a newer listing lacks them."""
    look_ups: dict[JobId, float] = field(default_factory=dict)
    marks: set[JobId] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    answers: list[Event] = field(default_factory=list)
    ours: set[JobId] = field(default_factory=set)
    marked: set[JobId] = field(default_factory=set)
    """Jobs of which the executor may have a used mark on record."""
    _doomed: set[JobId] | None = None

    def __post_init__(self) -> None:
        self.fleet = self._fleet()

    def _fleet(self) -> Fleet:
        fleet = Fleet(settle=SETTLE, mint=self._mint, records=self.ledger.records())
        for environment in self.known:
            fleet.know(environment, 1)
        return fleet

    def _mint(self, environment: EnvironmentId) -> RunnerId:
        return RunnerId(f"{environment}-minted-{self.cluster.number()}")

    # Events in, decisions noted

    def hand_in(self, event: Event, doomed: set[JobId] | None = None) -> list[Decision]:
        self.told.take(event)
        self._note_marks(event)
        self._doomed = doomed
        decisions = self.fleet.handle(event, self.now)
        for decision in decisions:
            self._note(decision, event)
        self._note_adopted()
        return decisions

    def _note(self, decision: Decision, event: Event | None) -> None:
        match decision:
            case EndExecutions(runner):
                self._note_end(runner)
            case StopJob(job):
                assert self.stopping.get(job, 0) is not None, "a stop is decided once"
                self._check_stop(job, event)
                self.stopping[job] = None
                self.holding.pop(job, None)
                self.marks.discard(job)
            case LookUp(job, at):
                self.look_ups[job] = at
            case Mark(job, used):
                assert job not in self.stopping, "nothing is written to a job that is to go"
                assert used == (job in self.holding), "a mark says what is"
                assert used or job in self.marked or self.lost, "no needless mark"
                if used:
                    self.marked.add(job)
                self.marks.add(job)
            case PoolChanged(environment):
                assert environment in self.known

    def _note_end(self, runner: RunnerId) -> None:
        self.ended[runner] += 1
        assert self.ended[runner] == 1, "executions are ended once"
        assert runner in self.handed, "only a used runner has executions"
        job, _ = self.handed[runner]
        if self.holding.get(job) == runner:
            del self.holding[job]

    def _check_stop(self, job: JobId, event: Event | None) -> None:
        """A job is stopped because somebody wants it, a spent allocation lives on, or it provably has no future."""
        if self.lost or event is None or isinstance(event, Stop | Overdue) or job in self.stopping:
            return
        held = [life for one, life in self.handed.values() if one == job]
        for life in held:
            assert life in self.interrupted or self.cluster.life(job) != life, "a client keeps a runner that lives"
        meant_to_run = {one.id for one in self.told.allocations.values() if one.job == job}
        spent = any(allocation in meant_to_run for allocation, _ in held)
        back_again = isinstance(event, LookedUp) and (event.used or event.issued)
        assert spent or back_again or job in (self._doomed or ()), "a job is stopped by proof only"

    def _note_marks(self, event: Event) -> None:
        match event:
            case JobSeen(job, used=True) | Marked(job, used=True) | LookedUp(job, used=True):
                self.marked.add(job)

    def _note_adopted(self) -> None:
        """A runner that was found in use belongs to a client of somebody else, who knows it by its job's id."""
        for runner in self.fleet.runners():
            if runner.phase is Phase.USED and runner.id not in self.handed:
                assert runner.id == RunnerId(runner.job), "a runner found in use has the job's id"
                assert not self.ledger.issued(runner.job), "an id is handed out once"
                self._remember(runner)

    def _hand_out(self, runner: Runner) -> None:
        assert runner.id not in self.handed, "an id is handed out once"
        taken = {life[0] for _, life in self.handed.values()}
        assert runner.allocation not in taken, "an allocation has one client, ever"
        self._remember(runner)

    def _remember(self, runner: Runner) -> None:
        life = (runner.allocation, runner.started)
        self.handed[runner.id] = (runner.job, life)
        self.holding[runner.job] = runner.id
        self.note_interruptions()

    def note_interruptions(self) -> None:
        """To be called after each thing that happens: a life that has ended once needn't be kept."""
        self.interrupted |= {life for job, life in self.handed.values() if self.cluster.life(job) != life}

    # What it does by itself

    def start(self, job: JobId) -> None:
        self.ours.add(job)
        self.hand_in(Start(job, KNOWN, generation=1, mark=False))
        self.starting.add(job)

    def claim(self, *, answered: bool = True) -> bool:
        """A client gets the oldest idle runner. Without an answer, the caller lets the daemon crash."""
        runner = self.fleet.idle(KNOWN)
        if runner is None:
            return False
        self.check_idle(runner)
        self.holding[runner.job] = runner.id
        claim = Claim(runner.id, 30)
        decisions = self.fleet.handle(claim, self.now)
        for decision in decisions:
            self._note(decision, claim)
        assert PoolChanged(KNOWN) in decisions
        if answered:
            self.save_all()
            self._hand_out(runner)
        return True

    def check_idle(self, runner: Runner) -> None:
        assert runner.phase is Phase.IDLE
        assert runner.job not in self.stopping, "a stopped job's runner is hidden"
        assert self.lost or not self.told.contradicts(runner), "a life that is over isn't handed out"

    def stop(self, job: JobId, reason: Reason) -> None:
        self.hand_in(Stop(job, reason))

    # The executor is asked, and answers

    def send_start(self, job: JobId, *, carried_out: bool, answered: bool) -> None:
        self.save_all()
        self.sent.add(job)
        if carried_out:
            index = self.cluster.register(job)
            if answered:
                self.starting.discard(job)
                self.answers.append(Started(job, index))

    def send_stop(self, job: JobId, *, carried_out: bool, answered: bool) -> None:
        self.save_all()
        self.starting.discard(job)
        if carried_out:
            index = self.cluster.remove(job)
            if answered:
                self.answers.append(Stopped(job, index))

    def write_mark(self, job: JobId, *, answered: bool) -> None:
        wanted = self.fleet.wanted_mark(job)
        if wanted is None or job not in self.cluster.jobs:
            self.marks.discard(job)
            return
        assert job not in self.stopping
        self.cluster.mark(job, used=wanted)
        if wanted:
            self.marked.add(job)
        if answered:
            self.marks.discard(job)
            self.answers.append(Marked(job, wanted))

    def deliver_answer(self, answer: Event) -> None:
        match answer:
            case Stopped(job, index):
                if job in self.stopping and self.stopping[job] is None:
                    self.stopping[job] = index
            case Started(job):
                self.starting.discard(job)
        self.hand_in(answer)

    def ask(self, only: JobId | None = None) -> Flight:
        """The jobs are read at once, the allocations may be read later (`Flight.allocations`)."""
        flight = Flight(
            self.fleet.ask(self.now),
            only,
            self.cluster.list_jobs(only),
            self.cluster.list_allocations(only),
            self.doomed(),
            used=only is not None and only in self.cluster.jobs and bool(self.cluster.jobs[only].used),
        )
        self.flights.append(flight)
        return flight

    def doomed(self) -> set[JobId]:
        jobs = {known.job for known in self.cluster.allocations.values()} | set(self.cluster.jobs) | self.ours
        return {job for job in jobs if not self.cluster.has_future(job)}

    def land(self, flight: Flight) -> list[Decision]:
        decisions = self._land(flight)
        listed = {seen.job for seen in flight.listing.jobs}
        for job, index in list(self.stopping.items()):
            covered = flight.only in (None, job)
            if covered and index is not None and index <= flight.listing.jobs_index and job not in listed:
                del self.stopping[job]
        return decisions

    def _land(self, flight: Flight) -> list[Decision]:
        doomed = flight.doomed | self.doomed()
        if flight.only is None:
            return self.hand_in(Listed(flight.listing, flight.asked), doomed)
        self.save_all()
        issued = self.ledger.issued(flight.only)
        self.look_ups.pop(flight.only, None)
        return self.hand_in(
            LookedUp(flight.only, flight.listing, flight.asked, flight.used, timeout=60, issued=issued), doomed
        )

    def loses_connections(self) -> None:
        """Nothing that is under way arrives; what isn't answered is still to be done."""
        self.flights.clear()
        self.starting |= {answer.job for answer in self.answers if isinstance(answer, Started)}
        self.marks |= {answer.job for answer in self.answers if isinstance(answer, Marked)}
        self.answers.clear()

    # Crashes

    def note_changes(self) -> None:
        changes = self.fleet.take_changes()
        if changes:
            self.unsaved.append((changes, deepcopy(self.told)))

    def save(self, some: int) -> None:
        """The first *some* of what has changed are in the ledger."""
        for changes, told in self.unsaved[:some]:
            self.ledger.save(changes)
            self.saved_told = told
        del self.unsaved[:some]

    def save_all(self) -> None:
        self.note_changes()
        self.save(len(self.unsaved))

    def crash(self, saved: int) -> None:
        """All that isn't in the ledger is forgotten; what was asked of the executor may still be carried out."""
        self.save(saved)
        self.unsaved.clear()
        self.told = deepcopy(self.saved_told)
        self.flights.clear()
        self.answers.clear()
        self.look_ups.clear()
        self.marks.clear()
        self.stopping = {job.id: job.stop.answered for job in self.ledger.jobs.values() if job.stop is not None}
        used = [runner for runner in self.ledger.runners.values() if runner.phase is Phase.USED]
        self.holding = {runner.job: runner.id for runner in used}
        known = set(self.ledger.tombstones) | set(self.ledger.runners)
        self.handed = {id: held for id, held in self.handed.items() if id in known}
        self.ended = Counter(set(self.handed) - set(self.holding.values()))
        self.fleet = self._fleet()
        self.starting = set(self.fleet.unanswered_starts())
        self._resume()

    def _resume(self) -> None:
        asked = {job for job, answer in self.stopping.items() if answer is None}
        for job in asked:
            del self.stopping[job]
        for runner in self.fleet.runners():
            if runner.phase is Phase.USED and runner.id not in self.handed:
                self._hand_out(runner)  # the claim was saved, though not answered
        for decision in self.fleet.resume(self.now):
            self._note(decision, None)
        assert asked <= set(self.stopping), "a stop that wasn't answered is asked again"

"""Plays recorded lines to a fleet as the shell would, and notes what it sees come out."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from poseidon.core.events import Asked, Claim, Decision, EndExecutions, Event, Listed, LookedUp, LookUp, Mark, Marked
from poseidon.core.events import StopJob as StopJobDecision
from poseidon.core.fleet import Fleet
from poseidon.core.model import EnvironmentId, JobId, JobState, Listing, Phase, Runner, RunnerId
from tests.core.nomad_values import Line, Truth

ENVIRONMENT = EnvironmentId(10)
SETTLE = 3.0

Life = tuple[str, str]
Noted = tuple[str, str, JobId]
"""Where a decision was made (a stream index, or "final listing"), its name, its job."""


@dataclass(slots=True)
class Replay:
    """*truth* answers look-ups; *claim*: the life of each job to claim as soon as it is idle."""

    truth: Truth
    claim: dict[JobId, Life] = field(default_factory=dict)
    now: float = 1000.0
    place: str = ""
    decisions: list[Noted] = field(default_factory=list)
    lives: dict[JobId, dict[Life, Runner]] = field(default_factory=dict)
    """Every runner ever seen, by job and life, in order of appearance, as last seen."""
    ended: Counter[RunnerId] = field(default_factory=Counter)
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        numbers = count(1)
        self.fleet = Fleet(settle=SETTLE, mint=lambda environment: RunnerId(f"{environment}-minted-{next(numbers)}"))
        self.fleet.know(ENVIRONMENT, 1)

    def play(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.place = str(line.index)
            for step in line.steps:
                self.hand_in(step)
            self.now += 0.01

    def list_everything(self, listing: Listing, asked: Asked | None = None) -> None:
        """A listing so late that every doubt has lasted long enough, unless it was *asked* before."""
        self.now += 10 * SETTLE
        self.place = "final listing"
        self.hand_in(Listed(listing, self.fleet.ask(self.now) if asked is None else asked))

    def hand_in(self, event: Event) -> list[Decision]:
        decisions = self.fleet.handle(event, self.now)
        self.note_runners()
        for decision in decisions:
            self.note(decision)
        self.claim_what_is_wanted()
        return decisions

    def note_runners(self) -> None:
        for runner in self.fleet.take_changes().runners:
            self.lives.setdefault(runner.job, {})[runner.allocation, runner.started] = runner

    def note(self, decision: Decision) -> None:
        match decision:
            case EndExecutions(runner):
                self.ended[runner] += 1
                self.decisions.append((self.place, "EndExecutions", self.job_of(runner)))
            case StopJobDecision(job):
                self.decisions.append((self.place, "StopJob", job))
            case Mark(job, used):
                if not used:
                    self.decisions.append((self.place, "MarkUnused", job))
                self.hand_in(Marked(job, used))
            case LookUp(job):
                known = self.fleet.job(job)
                if known is not None and not known.adopted:
                    issued = job in self.lives
                    self.hand_in(LookedUp(job, self.truth.listing(job), self.fleet.ask(self.now), issued=issued))

    def claim_what_is_wanted(self) -> None:
        for runner in list(self.fleet.runners()):
            if runner.phase is Phase.IDLE and self.claim.get(runner.job) == (runner.allocation, runner.started):
                self.hand_in(Claim(runner.id))

    def job_of(self, runner_id: RunnerId) -> JobId:
        return next(job for job, runners in self.lives.items() for r in runners.values() if r.id == runner_id)

    def state(self, job: JobId) -> str:
        """idle, used, starting or ended: where a job stands now."""
        for known, state, runner in self.fleet.jobs(ENVIRONMENT):
            if known.id == job:
                if runner is not None:
                    return str(runner.phase)
                return "ended" if state is JobState.ENDED else "starting"
        return "ended"

    def living(self, job: JobId) -> Runner | None:
        return next((runner for runner in self.fleet.runners() if runner.job == job), None)

    def counts(self) -> tuple[int, int]:
        """Idle runners and starting jobs."""
        jobs = list(self.fleet.jobs(ENVIRONMENT))
        idle = sum(1 for _, _, runner in jobs if runner is not None and runner.phase is Phase.IDLE)
        starting = sum(1 for _, state, _ in jobs if state in (JobState.STARTING, JobState.DOUBTFUL))
        return idle, starting

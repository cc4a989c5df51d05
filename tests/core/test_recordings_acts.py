"""Every recording again, with what daemon and network add: our own acts, restarts, listings from before and after.

Each test is one rule that the plain recordings can't show, as nothing in them is ours but the starts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from poseidon.core.events import (
    Claim,
    Decision,
    Listed,
    LookedUp,
    LookUp,
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
    ClientStatus,
    JobGone,
    JobId,
    JobSeen,
    JobState,
    JobStatus,
    Listing,
    Phase,
    Reason,
    RunnerId,
)
from tests.core.ledger import Ledger
from tests.core.nomad_values import Line, Step, Truth, truth_of
from tests.core.replay import ENVIRONMENT, SETTLE, Replay
from tests.core.test_recordings import (
    check_decisions,
    check_final,
    check_lives,
    claims,
    first_lives,
    lines_of,
    recordings,
    replay_of,
)

MOST_PLACES = 12
"""Of a recording, where something is tried that has to be played anew each time."""

Standing = dict[JobId, tuple[str, RunnerId | None]]


@dataclass(slots=True)
class Kept(Replay):
    """With a store, from which a daemon that was killed starts again."""

    ledger: Ledger = field(default_factory=Ledger)

    def note_runners(self) -> None:
        changes = self.fleet.take_changes()
        self.ledger.save(changes)
        for runner in changes.runners:
            self.lives.setdefault(runner.job, {})[runner.allocation, runner.started] = runner

    def restart(self) -> None:
        mint = self.fleet._mint  # its ids go on
        self.fleet = Fleet(settle=SETTLE, mint=mint, records=self.ledger.records())
        self.fleet.know(ENVIRONMENT, 1)
        unanswered = {job.id for job, state, _ in self.fleet.jobs(ENVIRONMENT) if state is JobState.ENDED}
        decisions = self.fleet.resume(self.now)
        assert {decision.job for decision in decisions if isinstance(decision, StopJob)} == unanswered
        for decision in decisions:
            if not isinstance(decision, StopJob):  # noted before
                self.note(decision)
        self.note_runners()


@dataclass(slots=True)
class Unanswered(Replay):
    """Look-ups are noted, and not answered."""

    asked: list[JobId] = field(default_factory=list)

    def note(self, decision: Decision) -> None:
        if isinstance(decision, LookUp):
            self.asked.append(decision.job)
        else:
            Replay.note(self, decision)


def standing(fleet: Fleet) -> Standing:
    """Where each job stands, and who lives in it."""
    jobs = fleet.jobs(ENVIRONMENT)
    return {job.id: (str(state), None if runner is None else runner.id) for job, state, runner in jobs}


def whereabouts(fleet: Fleet) -> dict[JobId, tuple[str, tuple[str, str] | None]]:
    """The same for fleets that have issued other ids."""
    jobs = fleet.jobs(ENVIRONMENT)
    return {
        job.id: (str(state), None if runner is None else (runner.allocation, runner.started))
        for job, state, runner in jobs
    }


def places(lines: list[Line]) -> Iterator[int]:
    step = max(1, len(lines) // MOST_PLACES)
    yield from range(0, len(lines) + 1, step)


def started_jobs(lines: Iterable[Line]) -> set[JobId]:
    return {step.job for line in lines for step in line.steps if isinstance(step, Start)}


# Rule 1: newest wins


@recordings
def test_a_line_that_comes_again_leaves_nothing_to_be_saved(name: str) -> None:
    replay = replay_of(name, "unclaimed")
    for line in lines_of(name):
        replay.play([line])
        for step in line.steps:
            replay.fleet.handle(step, replay.now)
        changes = replay.fleet.take_changes()
        assert not (changes.jobs or changes.allocations or changes.runners or changes.ended or changes.absent), line


@recordings
def test_an_allocation_that_was_replaced_doesnt_come_back_when_its_successors_fail(name: str) -> None:
    """Of the first allocation of each job nothing is heard any more as soon as it runs."""
    replay, mute, later = replay_of(name, "unclaimed"), set(), set()
    firsts = first_allocations(lines_of(name))
    for line in lines_of(name):
        told = [step for step in line.steps if not (isinstance(step, Allocation) and step.id in mute)]
        replay.play([Line(line.index, tuple(told))])
        mute |= {step.id for step in line.steps if isinstance(step, Allocation) and step.started and step.id in firsts}
        later |= {step.job for step in line.steps if isinstance(step, Allocation) and not step.slot} - {
            step.job for step in line.steps if isinstance(step, Allocation) and step.id in firsts
        }
        for runner in replay.fleet.runners():
            assert runner.allocation not in firsts or runner.job not in later, line


def first_allocations(lines: list[Line]) -> set[str]:
    """Of each job, by their creation."""
    found: dict[JobId, Allocation] = {}
    for line in lines:
        for step in line.steps:
            if isinstance(step, Allocation) and step.slot == 0:
                first = found.setdefault(step.job, step)
                found[step.job] = min(first, step, key=lambda each: each.created)
    return {allocation.id for allocation in found.values()}


# Rule 3: listings


@recordings
@claims
def test_a_listing_from_before_each_line_changes_nothing_after_it(name: str, claim: str) -> None:
    """But that a job of which its end was told is over."""
    replay = replay_of(name, claim)
    replay.truth = truth_of([])
    older, asked = replay.truth.listing(), replay.fleet.ask(replay.now)
    for line in lines_of(name):
        replay.truth.take(line)
        replay.play([line])
        before, gone = standing(replay.fleet), replay.truth.gone
        decisions = replay.hand_in(Listed(older, asked))
        assert [each for each in decisions if not isinstance(each, PoolChanged)] == [], line
        after = standing(replay.fleet)
        assert {job: where for job, where in before.items() if job not in gone or job in after} == after, line
        if replay.fleet.ask(0).jobs_version <= replay.truth.index:  # else an answer is ahead of the stream
            older, asked = replay.truth.listing(), replay.fleet.ask(replay.now)


@recordings
def test_a_listing_after_a_gap_is_taken_as_a_whole(name: str) -> None:
    """In between nobody is doubted, and nobody gets more than one runner."""
    lines = lines_of(name)
    for place in places(lines):
        replay = replay_of(name, "unclaimed")
        acts = [line for line in lines[place:] if isinstance(next(iter(line.steps), None), Start | Started)]
        replay.play([*lines[:place], *acts])
        replay.lives.clear()
        decisions = replay.hand_in(Listed(replay.truth.listing(), replay.fleet.ask(replay.now)))
        states = {job.id: state for job, state, _ in replay.fleet.jobs(ENVIRONMENT)}
        doubted = {decision.job for decision in decisions if isinstance(decision, LookUp)}
        assert {job for job in doubted if states.get(job) not in (JobState.DOUBTFUL, None)} <= strangers(replay), place
        for job, lives in replay.lives.items():
            assert sum(runner.phase is not Phase.GONE for runner in lives.values()) <= 1, job
            assert all(runner.phase is not Phase.GONE or runner.ready_at < replay.now for runner in lives.values())


def strangers(replay: Replay) -> set[JobId]:
    return {job.id for job, _, _ in replay.fleet.jobs(ENVIRONMENT) if not job.ours}


@recordings
def test_an_allocation_that_a_newer_listing_lacks_is_gone(name: str) -> None:
    replay = replay_of(name, "first_life_claimed")
    replay.play(lines_of(name))
    living = {runner.allocation for runner in replay.fleet.runners()}
    full = replay.truth.listing()
    kept = tuple(allocation for allocation in full.allocations if allocation.id not in living)
    lacking = replace(full, allocations=kept, jobs_index=full.jobs_index + 1, allocations_index=full.jobs_index + 1)
    used = {runner.id for runner in replay.fleet.runners() if runner.phase is Phase.USED}
    replay.hand_in(Listed(lacking, replay.fleet.ask(replay.now)))
    assert list(replay.fleet.runners()) == []
    assert {runner for runner, times in replay.ended.items() if times == 1} >= used


@recordings
def test_news_from_before_a_listing_tell_nothing_of_what_it_lacks(name: str) -> None:
    """All that is over has been forgotten by the cluster, and is told once more."""
    replay = replay_of(name, "unclaimed")
    replay.play(line for line in lines_of(name) if line.steps and isinstance(line.steps[0], ACTS))
    full = replay.truth.listing()
    over = {allocation.id for allocation in full.allocations if allocation.client in OVER}
    left = replace(full, allocations=tuple(each for each in full.allocations if each.id not in over))
    replay.hand_in(Listed(left, replay.fleet.ask(replay.now)))
    before, decided = whereabouts(replay.fleet), len(replay.decisions)
    for line in lines_of(name):
        replay.play([Line(line.index, tuple(step for step in line.steps if not isinstance(step, Start | Started)))])
        assert whereabouts(replay.fleet) == before, line
    assert len(replay.decisions) == decided


OVER = (ClientStatus.COMPLETE, ClientStatus.FAILED, ClientStatus.LOST)


@recordings
def test_a_cluster_that_went_back_is_believed_at_the_second_listing(name: str) -> None:
    lines = lines_of(name)
    for place in places(lines):
        back = truth_of(lines[:place]).listing()
        if not back.jobs_index:
            continue
        replay, alone = replay_of(name, "unclaimed"), Replay(truth_of(lines[:place]))
        replay.play(lines)
        replay.truth = alone.truth
        for _ in range(4):  # the first is an older listing, the second is believed; two more for doubts
            replay.list_everything(back)
            alone.list_everything(back)
        assert living(replay.fleet) == living(alone.fleet), place


@recordings
def test_stops_are_asked_for_again_of_a_cluster_that_went_back(name: str) -> None:
    replay = replay_of(name, "unclaimed")
    replay.play(lines_of(name))
    there = replay.truth.listing()
    stopped = {runner.job for runner in replay.fleet.runners()}
    for job in stopped:
        replay.hand_in(Stop(job, Reason.RELEASED))
        replay.hand_in(Stopped(job, there.jobs_index + 1))
    back = replace(there, jobs_index=there.jobs_index - 1, allocations_index=there.allocations_index - 1)
    now = replay.fleet.ask(replay.now)
    ahead = replace(now, jobs_version=there.jobs_index + 1)
    replay.hand_in(Listed(back, ahead))
    again = replay.hand_in(Listed(back, ahead))
    assert {decision.job for decision in again if isinstance(decision, StopJob)} == stopped


def living(fleet: Fleet) -> set[tuple[str, str]]:
    return {(runner.allocation, runner.started) for runner in fleet.runners()}


# Rules 4 and 5: one owner, once


@recordings
def test_a_runner_that_was_claimed_is_never_claimed_again(name: str) -> None:
    replay = replay_of(name, "first_life_claimed")
    for line in lines_of(name):
        replay.play([line])
        for runner in list(replay.fleet.runners()):
            if runner.phase is Phase.USED:
                assert replay.hand_in(Claim(runner.id, 12345)) == []
                assert replay.fleet.runner(runner.id) == runner


@recordings
def test_nobody_who_comes_under_the_name_of_a_job_that_was_over_is_handed_out(name: str) -> None:
    """All is gone, and forgotten but for the ids; then the cluster tells the very same again, as of later."""
    replay = replay_of(name, "first_life_claimed")
    replay.play(lines_of(name))
    end = replay.truth.index + 1
    replay.truth = Truth(end)
    replay.list_everything(replay.truth.listing())
    replay.list_everything(replay.truth.listing())
    for job, _, _ in list(replay.fleet.jobs(ENVIRONMENT)):  # spent ones are being stopped
        replay.hand_in(Stopped(job.id, end))
    replay.list_everything(replay.truth.listing())
    assert not list(replay.fleet.jobs(ENVIRONMENT))
    known = {job for job, lives in replay.lives.items() if lives}
    replay.lives = {job: {} for job in known}
    for line in lines_of(name):
        again = Line(line.index + end, tuple(later(step, end) for step in line.steps if not isinstance(step, ACTS)))
        replay.truth.take(again)
        replay.play([again])
    assert {job for job in known if replay.lives[job]} == set()


ACTS = Start | Started


def later(step: Step, by: int) -> Step:
    match step:
        case Allocation():
            return replace(step, version=step.version + by, created=step.created + by)
        case JobSeen() | JobGone():
            return replace(step, version=step.version + by)
    return step


# Rule 6: jobs only by proof


@recordings
def test_what_never_runs_is_without_life_since_it_was_first_seen(name: str) -> None:
    """Whatever is placed, moved and placed again meanwhile."""
    replay, since = replay_of(name, "unclaimed"), dict[JobId, float]()
    for line in lines_of(name):
        told = [step for step in line.steps if not (isinstance(step, Allocation) and step.started)]
        replay.play([Line(line.index, tuple(told))])
        for job, _, _ in replay.fleet.jobs(ENVIRONMENT):
            if job.id in since or job.lifeless_since is not None:  # else it was running when it was adopted
                assert job.lifeless_since == since.setdefault(job.id, job.lifeless_since or 0.0), line


@recordings
@claims
def test_a_job_that_is_told_to_be_pending_isnt_doubted(name: str, claim: str) -> None:
    replay = replay_of(name, claim)
    replay.truth = truth_of([])
    for line in lines_of(name):
        replay.truth.take(line)
        replay.play([line])
        doubted = {job.id for job, state, _ in replay.fleet.jobs(ENVIRONMENT) if state is JobState.DOUBTFUL}
        assert not doubted & pending(replay.truth), line


def pending(truth: Truth) -> set[JobId]:
    gone = truth.gone
    return {
        job for job, seen in truth.jobs.items() if seen.status is JobStatus.PENDING and seen.version > gone.get(job, 0)
    }


# Rule 7: intent before action


@recordings
def test_a_start_without_an_answer_is_missed_in_no_listing(name: str) -> None:
    replay = Replay(Truth(5))
    for job in sorted(started_jobs(lines_of(name))):
        replay.hand_in(Start(job, ENVIRONMENT, generation=1, mark=False))
        replay.list_everything(replay.truth.listing())
        replay.list_everything(replay.truth.listing())
        assert replay.state(job) == "starting"


@recordings
def test_a_stop_is_kept_until_a_listing_newer_than_its_answer_lacks_the_job(name: str) -> None:
    replay, stopped = replay_of(name, "first_life_claimed"), set[JobId]()
    for line in lines_of(name):
        replay.play([line])
        for runner in list(replay.fleet.runners()):
            assert runner.job not in stopped, "a job that is to stop has no runner any more"
            stopped.add(runner.job)
            assert StopJob(runner.job) in replay.hand_in(Stop(runner.job, Reason.RELEASED))
    end = replay.truth.index
    for job in stopped:
        lacks(replay, job, end + 1)
        assert replay.fleet.job(job) is not None, "not even answered"
        replay.hand_in(Stopped(job, end + 2))
        lacks(replay, job, end + 1)
        assert replay.fleet.job(job) is not None, "older than the answer"
        there = Listing((JobSeen(job, end + 3, JobStatus.RUNNING),), (), end + 3, end + 3, job)
        assert replay.hand_in(LookedUp(job, there, replay.fleet.ask(replay.now))) == [StopJob(job)]
        replay.hand_in(Stopped(job, end + 4))
        lacks(replay, job, end + 4)
        assert replay.fleet.job(job) is None


def lacks(replay: Replay, job: JobId, index: int) -> None:
    """A look-up as of *index* doesn't find it."""
    replay.hand_in(LookedUp(job, Listing((), (), index, index, job), replay.fleet.ask(replay.now)))


# Rule 8, across restarts of the daemon, and when nobody answers


@recordings
@claims
def test_a_daemon_that_is_killed_at_any_place_goes_on_as_if_it_hadnt_been(name: str, claim: str) -> None:
    replay = Kept(truth_of([]), first_lives(name) if claim == "first_life_claimed" else {})
    for line in lines_of(name):
        replay.truth.take(line)
        replay.play([line])
        before = standing(replay.fleet)
        replay.restart()
        assert standing(replay.fleet) == before, line
    replay.list_everything(replay.truth.listing())
    check_lives(replay, name, claim)
    check_decisions(replay, name, claim)
    check_final(replay, name, claim, ordered=True)


@recordings
def test_a_strangers_job_is_looked_up_once_and_hands_out_nobody_before_the_answer(name: str) -> None:
    replay = Unanswered(truth_of(lines_of(name)))
    ours = started_jobs(lines_of(name))
    replay.play(lines_of(name))
    assert {runner.job for runner in replay.fleet.runners()} <= ours
    assert {job for job, lives in replay.lives.items() if lives} <= ours
    assert len(set(replay.asked) - ours) == len([job for job in replay.asked if job not in ours])

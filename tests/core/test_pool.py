"""How many runners a pool starts and stops."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.core.model import (
    AllocationId,
    Environment,
    EnvironmentId,
    Job,
    JobId,
    JobState,
    Phase,
    Reason,
    Runner,
    RunnerId,
)
from poseidon.core.pool import BackOff, Plan, Pool, plan, survey

TEN = EnvironmentId(10)
Known = tuple[Job, JobState, Runner | None]


def environment(size: int, *, generation: int = 1, compatible_since: int = 1) -> Environment:
    return Environment(TEN, "image", size, generation=generation, compatible_since=compatible_since)


def job(name: str, state: JobState, phase: Phase | None = None, *, generation: int = 1, adopted: bool = True) -> Known:
    """*name* ends in the number of seconds after which its runner was ready."""
    known = Job(JobId(name), TEN, generation=generation, ours=adopted, adopted=adopted)
    if phase is None:
        return known, state, None
    ready_at = float("".join(letter for letter in name if letter.isdigit()) or 0)
    ids = RunnerId(name), TEN, known.id, AllocationId(name), "s", "", ""
    return known, state, Runner(*ids, phase, ready_at=ready_at)


def idle(name: str, generation: int = 1) -> Known:
    return job(name, JobState.LIVE, Phase.IDLE, generation=generation)


def used(name: str, generation: int = 1) -> Known:
    return job(name, JobState.LIVE, Phase.USED, generation=generation)


def starting(name: str, generation: int = 1) -> Known:
    return job(name, JobState.STARTING, generation=generation)


def doubtful(name: str) -> Known:
    return job(name, JobState.DOUBTFUL)


def ended(name: str) -> Known:
    return job(name, JobState.ENDED)


def planned(size: int, *jobs: Known, waiting: int = 0, crowded: bool = False, **how: int) -> Plan:
    wanted = environment(size, **how)
    return plan(wanted, survey(wanted, jobs), waiting, crowded=crowded)


@pytest.mark.parametrize(
    ("jobs", "missing"),
    [
        ([], 3),
        ([idle("a1")], 2),
        ([starting("a1"), doubtful("a2")], 1),
        ([used("a1"), used("a2"), ended("a3")], 3),
        ([idle("a1"), starting("a2"), doubtful("a3")], 0),
    ],
)
def test_what_is_missing_is_wanted_less_idle_and_starting(jobs: list[Known], missing: int) -> None:
    assert planned(3, *jobs) == Plan(missing)


def test_ten_claims_at_once_start_exactly_ten() -> None:
    """D2, D33: what is already starting counts."""
    jobs = [used(f"a{number}") for number in range(10)]
    first = planned(10, *jobs)
    assert first.start == 10
    assert planned(10, *jobs, *(starting(f"b{number}") for number in range(first.start))) == Plan()


def test_a_pool_of_size_zero_starts_for_those_who_wait() -> None:
    """D19"""
    assert planned(0) == Plan()
    assert planned(0, waiting=2) == Plan(2)
    assert planned(0, starting("a1"), waiting=2) == Plan(1)


def test_surplus_is_stopped_youngest_first_starting_ones_before_idle_ones() -> None:
    """D7"""
    found = planned(1, idle("a1"), idle("a3"), idle("a2"), starting("b1"), used("c1"))
    assert found == Plan(0, tuple((JobId(name), Reason.SURPLUS) for name in ("b1", "a3", "a2")))


def test_used_runners_are_never_stopped() -> None:
    assert planned(0, used("a1"), used("a2", generation=0)) == Plan()


def refreshed(*jobs: Known) -> Plan:
    """Two are wanted, of the second generation; the first is still compatible."""
    return planned(2, *jobs, generation=2, compatible_since=1)


def test_a_refresh_replaces_each_idle_runner_when_a_new_one_is_there() -> None:
    """D20"""
    old = idle("a1"), idle("a2")
    assert refreshed(*old) == Plan(2)
    assert refreshed(*old, starting("b1", 2), starting("b2", 2)) == Plan()
    assert refreshed(*old, idle("b1", 2), starting("b2", 2)) == Plan(0, ((JobId("a2"), Reason.REPLACED),))
    both = refreshed(*old, idle("b1", 2), idle("b2", 2))
    assert both == Plan(0, ((JobId("a1"), Reason.REPLACED), (JobId("a2"), Reason.REPLACED)))


def test_without_room_for_both_the_old_runners_go_first() -> None:
    found = planned(1, idle("a1"), crowded=True, generation=2, compatible_since=1)
    assert found == Plan(1, ((JobId("a1"), Reason.REPLACED),))


def test_a_change_of_image_replaces_idle_and_starting_runners_at_once() -> None:
    found = planned(2, idle("a1"), starting("a2"), used("a3"), generation=2, compatible_since=2)
    assert found == Plan(2, ((JobId("a1"), Reason.REPLACED), (JobId("a2"), Reason.REPLACED)))


def test_a_strangers_job_counts_as_starting_until_it_is_looked_up() -> None:
    stranger = job("a1", JobState.STARTING, generation=0, adopted=False)
    assert planned(1, stranger, generation=2, compatible_since=2) == Plan()


def test_a_strangers_job_is_never_stopped_before_it_is_looked_up_for_it_may_be_in_use() -> None:
    strangers = [job(f"a{number}", JobState.STARTING, generation=0, adopted=False) for number in range(3)]
    assert planned(1, *strangers) == Plan()
    assert planned(1, idle("b"), *strangers) == Plan()
    assert planned(0, idle("b"), *strangers).stop == ((JobId("b"), Reason.SURPLUS),)


@st.composite
def pools(draw: st.DrawFn) -> list[Known]:
    kinds = st.sampled_from([idle, used, starting])
    generations = draw(st.lists(st.tuples(kinds, st.integers(1, 3)), max_size=12))
    return [kind(f"a{number}", generation) for number, (kind, generation) in enumerate(generations)]


@given(jobs=pools(), size=st.integers(0, 6), waiting=st.integers(0, 3), since=st.integers(1, 3), crowded=st.booleans())
def test_a_plan_carried_out_leaves_nothing_to_do(
    jobs: list[Known], size: int, waiting: int, since: int, crowded: bool
) -> None:
    wanted = environment(size, generation=3, compatible_since=since)
    settled = jobs
    for _ in range(3):
        todo = plan(wanted, survey(wanted, settled), waiting, crowded=crowded)
        assert not {name for name, _ in todo.stop} & {one.id for one, _, runner in settled if is_used(runner)}
        settled = list(carry_out(todo, settled))
    assert plan(wanted, survey(wanted, settled), waiting, crowded=crowded) == Plan()
    pool = survey(wanted, settled)
    assert (len(pool.idle), pool.starting, pool.old_idle, pool.outdated) == (size + waiting, (), (), ())


def is_used(runner: Runner | None) -> bool:
    return runner is not None and runner.phase is Phase.USED


def carry_out(todo: Plan, jobs: list[Known]) -> Iterator[Known]:
    """All that starts becomes ready."""
    stopped = {name for name, _ in todo.stop}
    for known in jobs:
        if known[0].id in stopped:
            continue
        yield known if known[2] is not None else idle(known[0].id, known[0].generation)
    taken = {known[0].id for known in jobs}
    fresh = [f"b{number}" for number in range(len(taken) + todo.start) if f"b{number}" not in taken]
    yield from (idle(name, 3) for name in fresh[: todo.start])


def test_each_failure_waits_longer_up_to_a_minute() -> None:
    """D9"""
    waits, back_off = [], BackOff()
    for _ in range(9):
        back_off = back_off.failed(now=100.0, jitter=0.0)
        waits.append(back_off.until - 100.0)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == 60.0
    assert back_off.succeeded() == BackOff()


def test_jitter_stretches_a_wait_by_up_to_a_half() -> None:
    assert BackOff().failed(0.0, jitter=1.0).until == 1.5


def test_very_many_failures_still_wait_a_minute() -> None:
    assert replace(BackOff(), failures=5000).failed(0.0, jitter=0.0).until == 60.0


def test_survey_sorts_oldest_first() -> None:
    wanted = environment(2, generation=2, compatible_since=1)
    found = survey(wanted, [idle("a2", 2), idle("a1", 2), idle("b4"), idle("b3"), used("c1"), ended("d1")])
    names = tuple(map(JobId, ("a1", "a2"))), tuple(map(JobId, ("b3", "b4")))
    assert found == Pool(idle=names[0], old_idle=names[1], used=1)

"""What is saved comes back; what must not be is refused by the database itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from poseidon.core.model import (
    UNTOLD,
    Allocation,
    AllocationId,
    Changes,
    ClientStatus,
    DesiredStatus,
    EnvironmentId,
    Intent,
    Job,
    JobId,
    JobStatus,
    Phase,
    Port,
    Position,
    Reason,
    Records,
    Runner,
    RunnerId,
)
from poseidon.store.records import load_deadlines, load_records, save_changes, save_deadline
from poseidon.store.times import from_text, to_text
from tests.store.values import NOW, allocation, job, life, runner

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
versions = st.integers(0, 2**63 - 1)
milliseconds = st.integers(0, 4_000_000_000_000).map(lambda number: number / 1000)
ports = st.lists(st.builds(Port, st.integers(0, 65535), texts), max_size=2).map(tuple)
told = st.one_of(st.just(UNTOLD), st.none(), texts)
intents = st.none() | st.builds(Intent, milliseconds, st.none() | versions)


def jobs(identity: str) -> st.SearchStrategy[Job]:
    return st.builds(
        Job,
        id=st.just(JobId(identity)),
        environment=st.integers(0, 5).map(EnvironmentId),
        generation=versions,
        ours=st.booleans(),
        adopted=st.booleans(),
        id_issued=st.booleans(),
        version=versions,
        status=st.none() | st.sampled_from(JobStatus),
        gone_version=versions,
        mark=st.none() | st.booleans(),
        start=intents,
        stop=intents,
        stop_reason=st.none() | st.sampled_from(Reason),
        doubtful_since=st.none() | milliseconds,
        lifeless_since=st.none() | milliseconds,
    )


def allocations(identity: str, of: str) -> st.SearchStrategy[Allocation]:
    return st.builds(
        Allocation,
        id=st.just(AllocationId(identity)),
        job=st.just(JobId(of)),
        version=versions,
        created=versions,
        client=st.sampled_from(ClientStatus),
        desired=st.sampled_from(DesiredStatus),
        slot=st.integers(0, 3),
        started=st.none() | texts,
        node_id=texts,
        node_name=texts,
        restarts=st.integers(0, 9),
        migrate=st.booleans(),
        oom_killed=st.booleans(),
        follow_up=told,
        previous=told,
        next=told,
        ports=ports,
    )


@st.composite
def runners(draw: st.DrawFn, identity: str, job: Job, allocation: Allocation) -> Runner:
    phase = draw(st.sampled_from(Phase))
    claimed = phase is Phase.USED or (phase is Phase.GONE and draw(st.booleans()))
    return Runner(
        id=RunnerId(identity),
        environment=job.environment,
        job=job.id,
        allocation=allocation.id,
        started=draw(texts),
        node_id=draw(texts),
        node_name=draw(texts),
        phase=phase,
        ready_at=draw(milliseconds),
        startup=draw(st.none() | st.integers(0, 10**6).map(lambda number: number / 1000)),
        reason=draw(st.sampled_from(Reason)) if phase is Phase.GONE else None,
        timeout=draw(st.integers(0, 10**6)),
        claimed_at=draw(milliseconds) if claimed else None,
        gone_at=draw(milliseconds) if phase is Phase.GONE else None,
        ports=draw(ports),
    )


@st.composite
def records(draw: st.DrawFn) -> Records:
    all_jobs = [draw(jobs(f"job {number}")) for number in range(draw(st.integers(0, 3)))]
    pairs = [(job, draw(allocations(f"allocation of {job.id}", job.id))) for job in all_jobs]
    return Records(
        jobs=tuple(all_jobs),
        allocations=tuple(allocation for _, allocation in pairs),
        runners=tuple(draw(runners(f"runner of {job.id}", job, allocation)) for job, allocation in pairs),
        position=draw(st.builds(Position, versions, versions, versions, versions)),
    )


def by_id(records: Records) -> tuple[object, ...]:
    return (
        {job.id: job for job in records.jobs},
        {allocation.id: allocation for allocation in records.allocations},
        {runner.id: runner for runner in records.runners},
        records.position,
    )


@contextmanager
def undone(connection: Connection) -> Iterator[None]:
    """Forget what is done inside."""
    savepoint = connection.begin_nested()
    try:
        yield
    finally:
        savepoint.rollback()


save = partial(save_changes, executor="local", at=NOW)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(records())
def test_what_was_saved_is_loaded_as_it_was(connection: Connection, saved: Records) -> None:
    with undone(connection):
        save(connection, changes=Changes(saved.jobs, (), saved.allocations, (), saved.runners, (), saved.position))
        assert by_id(load_records(connection, "local")) == by_id(saved)
        assert load_records(connection, "nomad") == Records()


def test_what_was_not_told_stays_apart_from_what_is_none_and_from_any_text(connection: Connection) -> None:
    one = replace(allocation(job()), follow_up=UNTOLD, previous=None, next=AllocationId("b"))
    save(connection, changes=Changes(jobs=(job(),), allocations=(one,)))
    (found,) = load_records(connection, "local").allocations
    assert found.follow_up is UNTOLD  # a text would be equal to it
    assert found.previous is None
    assert found.next == "b"
    assert connection.exec_driver_sql("SELECT follow_up, previous, next FROM allocations").one() == (None, "", "b")


@given(milliseconds)
def test_times_come_back_to_the_millisecond_and_sort_as_text(moment: float) -> None:
    assert from_text(to_text(moment)) == moment
    assert to_text(moment) < to_text(moment + 0.001)


def test_times_read_like_a_date() -> None:
    assert to_text(NOW) == "2026-11-30T08:48:41.123Z"


def test_the_newest_of_several_values_of_one_thing_counts(connection: Connection) -> None:
    first = life()
    gone = runner(first.allocation, Phase.GONE)
    save(connection, changes=Changes(jobs=(first.job,), allocations=(first.allocation,), runners=(first.runner, gone)))
    assert load_records(connection, "local").runners == (gone,)


def test_an_ended_job_is_not_loaded_nor_what_it_had(connection: Connection) -> None:
    over = life(phase=Phase.GONE)
    save(connection, changes=over.changes)
    save(connection, changes=Changes(ended=(over.job.id,)))
    assert load_records(connection, "local") == Records()


def test_a_job_that_comes_back_has_its_runners_but_not_its_old_allocations(connection: Connection) -> None:
    over = life(phase=Phase.GONE)
    save(connection, changes=over.changes)
    save(connection, changes=Changes(ended=(over.job.id,)))
    save(connection, changes=Changes(jobs=(over.job,)))
    assert load_records(connection, "local") == Records(jobs=(over.job,), runners=(over.runner,))


def test_an_absent_allocation_is_not_loaded_until_it_is_seen_again(connection: Connection) -> None:
    one = life()
    save(connection, changes=one.changes)
    save(connection, changes=Changes(absent=(one.allocation.id,)))
    assert load_records(connection, "local").allocations == ()
    save(connection, changes=Changes(allocations=(one.allocation,)))
    assert load_records(connection, "local").allocations == (one.allocation,)


def test_an_intent_that_is_done_is_forgotten(connection: Connection) -> None:
    asked = replace(job(), start=Intent(NOW), stop=Intent(NOW, answered=7))
    save(connection, changes=Changes(jobs=(asked,)))
    assert load_records(connection, "local").jobs == (asked,)
    done = replace(asked, start=None, stop=None)
    save(connection, changes=Changes(jobs=(done,)))
    assert load_records(connection, "local").jobs == (done,)


def test_a_job_of_an_unknown_environment_can_be_saved(connection: Connection) -> None:
    stranger = replace(job(), environment=EnvironmentId(77))
    save(connection, changes=Changes(jobs=(stranger,)))
    assert load_records(connection, "local").jobs == (stranger,)


def test_a_runner_may_replace_another_of_its_job_in_one_step(connection: Connection) -> None:
    one = life()
    save(connection, changes=one.changes)
    following = runner(one.allocation, identity="second")
    gone = runner(one.allocation, Phase.GONE)
    save(connection, changes=Changes(runners=(following, gone)))
    assert set(load_records(connection, "local").runners) == {following, gone}


def _claimed_twice(connection: Connection) -> None:
    one = life(phase=Phase.GONE, claimed_at=NOW)
    again = runner(one.allocation, Phase.USED, "second")
    save(connection, changes=one.changes)
    save(connection, changes=Changes(runners=(again,)))


def _two_living_runners_of_a_job(connection: Connection) -> None:
    one = life()
    save(connection, changes=one.changes)
    elsewhere = allocation(one.job, "b")
    save(connection, changes=Changes(allocations=(elsewhere,), runners=(runner(elsewhere, Phase.USED, "second"),)))


def _gone_and_back(connection: Connection) -> None:
    one = life(phase=Phase.GONE)
    save(connection, changes=one.changes)
    save(connection, changes=Changes(runners=(runner(one.allocation, Phase.USED),)))


def _used_and_idle_again(connection: Connection) -> None:
    one = life(phase=Phase.USED)
    save(connection, changes=one.changes)
    save(connection, changes=Changes(runners=(runner(one.allocation),)))


def _an_id_with_a_tombstone(connection: Connection) -> None:
    one = life()
    connection.exec_driver_sql("INSERT INTO tombstones VALUES (?, 'stopped', ?)", (one.runner.id, to_text(NOW)))
    save(connection, changes=one.changes)


def _a_phase_of_no_name(connection: Connection) -> None:
    save(connection, changes=life().changes)
    connection.exec_driver_sql("UPDATE runners SET phase = 'lost'")


def _used_without_a_claim(connection: Connection) -> None:
    save(connection, changes=life().changes)
    connection.exec_driver_sql("UPDATE runners SET phase = 'used'")


def _a_runner_without_its_allocation(connection: Connection) -> None:
    one = life()
    save(connection, changes=Changes(jobs=(one.job,), runners=(one.runner,)))


@pytest.mark.parametrize(
    "break_the_rule",
    [
        _claimed_twice,
        _two_living_runners_of_a_job,
        _gone_and_back,
        _used_and_idle_again,
        _an_id_with_a_tombstone,
        _a_phase_of_no_name,
        _used_without_a_claim,
        _a_runner_without_its_allocation,
    ],
)
def test_the_database_itself_refuses(connection: Connection, break_the_rule: Callable[[Connection], None]) -> None:
    with undone(connection), pytest.raises(IntegrityError):
        break_the_rule(connection)


def test_another_allocation_of_a_spent_job_may_be_claimed(connection: Connection) -> None:
    one = life(phase=Phase.GONE, claimed_at=NOW)
    save(connection, changes=one.changes)
    elsewhere = allocation(one.job, "b")
    save(connection, changes=Changes(allocations=(elsewhere,), runners=(runner(elsewhere, Phase.USED, "second"),)))
    assert len(load_records(connection, "local").runners) == 2


def test_a_claim_sets_the_deadline_and_later_rows_leave_it_alone(connection: Connection) -> None:
    one = life()
    used = runner(one.allocation, Phase.USED)
    save(connection, changes=one.changes)
    assert load_deadlines(connection) == {}
    save(connection, changes=Changes(runners=(used,)))
    assert load_deadlines(connection) == {used.id: NOW + 1 + 180}
    save_deadline(connection, used.id, NOW + 500)
    save(connection, changes=Changes(runners=(replace(used, ports=(Port(80, "n1:1"),)),)))
    assert load_deadlines(connection) == {used.id: NOW + 500}
    save_deadline(connection, used.id, None)
    assert load_deadlines(connection) == {}


def test_a_timeout_of_zero_is_no_deadline(connection: Connection) -> None:
    save(connection, changes=life(phase=Phase.USED, timeout=0).changes)
    assert load_deadlines(connection) == {}


def test_runners_come_oldest_first(connection: Connection) -> None:
    for number, ready in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(connection, changes=life(number, ready_at=ready).changes)
    assert [runner.ready_at for runner in load_records(connection, "local").runners] == [1.0, 2.0, 3.0]

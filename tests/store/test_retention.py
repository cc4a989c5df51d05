"""What is long over goes; what may still count stays, whatever its age."""

from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from poseidon.core.command import Command
from poseidon.core.model import Changes, EnvironmentId, ExecutionId, Intent, Phase, Reason
from poseidon.store.queries import (
    ExecutionEnd,
    WaitingExecution,
    end_execution,
    gone_runner,
    id_was_issued,
    load_records,
    remove_environment,
    save_changes,
    save_environment,
    save_waiting_execution,
)
from poseidon.store.retention import STEPS, Ages, prune, prune_step
from poseidon.store.store import Store
from tests.store.values import ENVIRONMENT, NOW, Life, allocation, environment, life, runner, transition

DAY = 86400.0
save = partial(save_changes, executor="local", at=NOW)


def prune_all(connection: Connection, now: float = NOW + 10 * DAY) -> None:
    for step in range(len(STEPS)):
        prune_step(connection, step, Ages(runners=DAY, executions=DAY, transitions=DAY), now, batch=100)


def count(connection: Connection, table: str) -> int:
    return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())


def over(number: int = 1) -> tuple[Life, Changes]:
    """A claimed runner that is gone, with its job."""
    one = life(number, Phase.GONE, claimed_at=NOW, reason=Reason.RELEASED)
    return one, replace(one.changes, ended=(one.job.id,), transitions=(transition(one.runner.id),))


def test_what_is_over_leaves_only_its_tombstone(connection: Connection) -> None:
    one, changes = over()
    save(connection, changes=changes)
    save_waiting_execution(connection, WaitingExecution(ExecutionId("e"), one.runner.id, Command("true"), 0, NOW))
    prune_all(connection)
    for table in ("runners", "allocations", "jobs", "executions", "transitions"):
        assert count(connection, table) == 0
    found = gone_runner(connection, one.runner.id)
    assert found is not None
    assert (found.phase, found.reason, found.gone_at) == (Phase.GONE, Reason.RELEASED, NOW + 2)


def test_an_id_stays_issued_when_its_runner_is_pruned(connection: Connection) -> None:
    one, changes = over()
    save(connection, changes=changes)
    prune_all(connection)
    assert id_was_issued(connection, one.runner.id)


def test_what_is_young_stays(connection: Connection) -> None:
    one, changes = over()
    save(connection, changes=changes)
    save_waiting_execution(connection, WaitingExecution(ExecutionId("e"), one.runner.id, Command("true"), 0, NOW))
    end_execution(connection, ExecutionId("e"), ExecutionEnd("exit", 0), NOW)
    prune_all(connection, NOW + DAY - 1)
    for table in ("runners", "allocations", "jobs", "executions", "transitions"):
        assert count(connection, table) == 1


def test_living_and_claimed_runners_stay(connection: Connection) -> None:
    save(connection, changes=life(1, Phase.USED).changes)
    save(connection, changes=life(2, Phase.IDLE).changes)
    before = load_records(connection, "local")
    prune_all(connection, NOW + 1000 * DAY)
    assert load_records(connection, "local") == before


def test_a_claimed_runner_stays_while_its_job_may_come_back(connection: Connection) -> None:
    one, changes = over()
    save(connection, changes=replace(changes, ended=()))
    prune_all(connection)
    assert load_records(connection, "local").runners == (one.runner,)


def test_a_claimed_runner_stays_though_its_job_has_a_newer_one(connection: Connection) -> None:
    one, changes = over()
    elsewhere = allocation(one.job, "b")
    newer = runner(elsewhere, identity="newer", ready_at=NOW + 1)
    save(connection, changes=replace(changes, ended=()))
    save(connection, changes=Changes(allocations=(elsewhere,), runners=(newer,)))
    prune_all(connection)
    assert set(load_records(connection, "local").runners) == {one.runner, newer}


def test_unclaimed_lives_of_a_living_job_go_but_for_the_newest(connection: Connection) -> None:
    one = life(1, Phase.GONE)
    newer = runner(one.allocation, Phase.GONE, "newer", ready_at=NOW + 1)
    save(connection, changes=replace(one.changes, runners=(one.runner, newer)))
    prune_all(connection)
    assert load_records(connection, "local").runners == (newer,)
    assert id_was_issued(connection, one.runner.id)


def test_a_stop_stays_until_it_is_proven(connection: Connection) -> None:
    asked = replace(life().job, stop=Intent(NOW, answered=5))
    save(connection, changes=Changes(jobs=(asked,)))
    prune_all(connection)
    assert load_records(connection, "local").jobs == (asked,)


def test_a_removed_environment_goes_when_nothing_refers_to_it(connection: Connection) -> None:
    save(connection, changes=over()[1])
    remove_environment(connection, ENVIRONMENT, NOW)
    assert count(connection, "environments") == 1
    prune_all(connection)
    assert count(connection, "environments") == 0


def test_an_environment_in_use_stays(connection: Connection) -> None:
    save_environment(connection, environment(7), NOW)
    prune_all(connection)
    found = connection.exec_driver_sql("SELECT id FROM environments ORDER BY id").scalars()
    assert list(found) == [EnvironmentId(7), ENVIRONMENT]


async def test_pruning_goes_by_small_steps_until_nothing_is_left(store: Store) -> None:
    await store.write(partial(save_environment, environment=environment(), at=NOW))
    for number in range(25):
        store.submit(partial(save, changes=over(number)[1]))
    ages = Ages(runners=DAY, executions=DAY, transitions=DAY)
    assert await prune(store, ages, NOW, batch=10) == 0
    assert await prune(store, ages, NOW + 10 * DAY, batch=10) == 4 * 25
    assert await store.read(partial(count, table="tombstones")) == 25
    assert await store.read(partial(count, table="runners")) == 0

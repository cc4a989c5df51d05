"""The questions that an operator asks, answered by the views."""

from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from poseidon.core.command import Command
from poseidon.core.model import Changes, ExecutionId, Intent, Phase
from poseidon.store.queries import WaitingExecution, remove_environment, save_changes, save_waiting_execution
from tests.store.values import ENVIRONMENT, NOW, allocation, job, life, runner, transition

save = partial(save_changes, executor="local", at=NOW)


def ask(connection: Connection, query: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in connection.exec_driver_sql(query)]


def test_runner_overview_tells_what_a_runner_is(connection: Connection) -> None:
    used = life(phase=Phase.USED)
    save(connection, changes=used.changes)
    save_waiting_execution(connection, WaitingExecution(ExecutionId("e"), used.runner.id, Command("true"), 0, NOW))
    (found,) = ask(
        connection, "SELECT runner, image, phase, node, executor, claimed_at, executions FROM runner_overview"
    )
    assert found == (used.runner.id, "python", "used", "n1", "local", "2026-11-30T08:48:42.123Z", 1)


def test_pool_overview_compares_what_is_with_what_is_wanted(connection: Connection) -> None:
    for number, phase in enumerate((Phase.IDLE, Phase.IDLE, Phase.USED, Phase.GONE)):
        save(connection, changes=life(number, phase).changes)
    stopping = replace(job(10), start=Intent(NOW), stop=Intent(NOW))
    strangers = replace(job(11), ours=False, adopted=False)
    over = job(12)
    save(connection, changes=Changes(jobs=(stopping, strangers, over), ended=(over.id,)))
    columns = "environment, wanted, idle, used, starting, stopping"
    assert ask(connection, f"SELECT {columns} FROM pool_overview") == [(ENVIRONMENT, 3, 2, 1, 1, 1)]


def test_a_removed_environment_wants_nothing(connection: Connection) -> None:
    save(connection, changes=life().changes)
    remove_environment(connection, ENVIRONMENT, NOW)
    assert ask(connection, "SELECT wanted, idle FROM pool_overview") == [(0, 1)]


def test_node_overview_counts_by_node(connection: Connection) -> None:
    save(connection, changes=life(1).changes)
    save(connection, changes=life(2, Phase.USED).changes)
    elsewhere = replace(allocation(job(3)), node_name="n2", node_id="2")
    save(connection, changes=Changes(jobs=(job(3),), allocations=(elsewhere,)))
    left = life(4)
    save(connection, changes=replace(left.changes, absent=(left.allocation.id,)))
    columns = "node, allocations, running, idle, used, environments"
    assert ask(connection, f"SELECT {columns} FROM node_overview ORDER BY node") == [
        ("n1", 2, 2, 1, 1, 1),
        ("n2", 1, 1, 0, 0, 0),
    ]


def test_allocation_history_tells_a_runner_its_allocation_and_node_with_each_line(connection: Connection) -> None:
    one = life()
    lines = (
        transition(one.job.id, "", "starting", NOW, "job"),
        transition(one.allocation.id, "", "running", NOW + 1, "allocation"),
        transition("of its own", "", "idle", NOW + 2),
    )
    its_runner = runner(one.allocation, identity="of its own")
    save(connection, changes=replace(one.changes, runners=(its_runner,), transitions=lines))
    assert ask(connection, "SELECT kind, runner, allocation, job, node FROM allocation_history ORDER BY at") == [
        ("job", None, None, one.job.id, None),
        ("allocation", None, one.allocation.id, one.job.id, "n1"),
        ("runner", "of its own", one.allocation.id, one.job.id, "n1"),
    ]

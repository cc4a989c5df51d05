"""Environments, executions and what is told of runners."""

from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import Connection

from poseidon.core.command import Command
from poseidon.core.model import Changes, EnvironmentId, ExecutionId, JobId, Phase, Reason, RunnerId
from poseidon.store.queries import (
    ExecutionEnd,
    WaitingExecution,
    begin_execution,
    end_execution,
    end_executions_of,
    expire_executions,
    fail_running_executions,
    gone_runner,
    id_was_issued,
    job_had_runner,
    last_generation,
    load_environments,
    load_statistics,
    load_transitions,
    load_waiting_executions,
    remove_environment,
    save_changes,
    save_environment,
    save_waiting_execution,
)
from poseidon.store.times import to_text
from tests.store.values import ENVIRONMENT, NOW, environment, life, transition

save = partial(save_changes, executor="local", at=NOW)


def test_environments_come_back_as_they_were(connection: Connection) -> None:
    first = environment(29, cpu_limit=20, memory_limit=256, network_access=True, exposed_ports=(80, 8080), generation=3)
    second = environment(7, executor="nomad", compatible_since=2)
    save_environment(connection, first, NOW)
    save_environment(connection, second, NOW)
    assert load_environments(connection) == (second, first)


def test_a_removed_environment_is_not_loaded_but_back_when_put_again(connection: Connection) -> None:
    save(connection, changes=life().changes)
    remove_environment(connection, ENVIRONMENT, NOW)
    assert load_environments(connection) == ()
    assert last_generation(connection, ENVIRONMENT) == 1
    save_environment(connection, environment(generation=2), NOW)
    assert load_environments(connection) == (environment(generation=2),)


def test_a_removed_environment_that_nothing_refers_to_leaves_no_row(connection: Connection) -> None:
    remove_environment(connection, ENVIRONMENT, NOW)
    assert last_generation(connection, ENVIRONMENT) == 0
    assert connection.exec_driver_sql("SELECT count(*) FROM environments").scalar() == 0


def test_an_environment_known_only_by_its_jobs_is_not_loaded(connection: Connection) -> None:
    one = life()
    save(connection, changes=Changes(jobs=(replace(one.job, environment=EnvironmentId(77)),)))
    assert load_environments(connection) == (environment(),)


EXECUTION = WaitingExecution(
    ExecutionId("e1"),
    life().runner.id,
    Command("cat 'ä'\n", ("a", "b c"), {"KEY": "välue\n"}, privileged=True, tty=False, rows=24, columns=80, cwd="/x"),
    time_limit=10,
    created_at=NOW,
)


@pytest.fixture
def used(connection: Connection) -> Connection:
    """A used runner, for which one execution waits."""
    save(connection, changes=life(phase=Phase.USED).changes)
    save_waiting_execution(connection, EXECUTION)
    return connection


def row(connection: Connection, columns: str) -> tuple[object, ...]:
    """Of the one execution."""
    return tuple(connection.exec_driver_sql(f"SELECT {columns} FROM executions").one())


def test_a_waiting_execution_survives_a_restart(used: Connection) -> None:
    assert load_waiting_executions(used) == (EXECUTION,)


def test_what_to_run_is_forgotten_when_it_runs(used: Connection) -> None:
    begin_execution(used, EXECUTION.id, NOW + 1)
    assert load_waiting_executions(used) == ()
    assert row(used, "state, command, arguments, variables, cwd") == ("running", None, None, None, None)


def test_what_to_run_is_forgotten_when_it_never_ran(used: Connection) -> None:
    end_execution(used, EXECUTION.id, ExecutionEnd("client_gone"), NOW + 1)
    assert load_waiting_executions(used) == ()
    assert row(used, "state, command, arguments, variables, cwd") == ("ended", None, None, None, None)


def test_the_first_end_of_an_execution_counts(used: Connection) -> None:
    begin_execution(used, EXECUTION.id, NOW + 1)
    end_execution(used, EXECUTION.id, ExecutionEnd("exit", 3, "", 1, 2, 3), NOW + 2)
    end_execution(used, EXECUTION.id, ExecutionEnd("timeout"), NOW + 3)
    ended = ("exit", 3, 1, 2, 3, to_text(NOW + 2))
    assert row(used, "outcome, exit_code, stdin_bytes, stdout_bytes, stderr_bytes, ended_at") == ended
    assert load_statistics(used, NOW).outcomes == {"exit": 1}
    assert load_statistics(used, NOW + 3).outcomes == {}


def test_an_execution_that_has_ended_does_not_begin(used: Connection) -> None:
    end_execution(used, EXECUTION.id, ExecutionEnd("client_gone"), NOW + 1)
    begin_execution(used, EXECUTION.id, NOW + 2)
    assert row(used, "state, started_at") == ("ended", None)


def test_executions_end_with_their_runner(used: Connection) -> None:
    end_executions_of(used, EXECUTION.runner, ExecutionEnd("runner_gone", detail="released"), NOW + 1)
    assert row(used, "outcome, detail") == ("runner_gone", "released")


def test_an_execution_of_a_gone_runner_waits_no_longer(used: Connection) -> None:
    save(used, changes=Changes(runners=(life(phase=Phase.GONE, claimed_at=NOW).runner,)))
    assert load_waiting_executions(used) == ()


def test_an_execution_that_nobody_comes_for_expires(used: Connection) -> None:
    assert expire_executions(used, NOW, NOW + 60) == ()
    assert expire_executions(used, NOW + 0.001, NOW + 60) == (EXECUTION.id,)
    assert row(used, "outcome, detail") == ("client_gone", "nobody connected")


def test_an_execution_that_ran_when_the_daemon_died_has_failed(used: Connection) -> None:
    assert fail_running_executions(used, NOW + 1) == 0
    begin_execution(used, EXECUTION.id, NOW + 1)
    assert fail_running_executions(used, NOW + 2) == 1
    assert row(used, "outcome, detail") == ("failed", "the daemon was restarted")


def test_a_runner_tells_where_it_is_and_how_it_ended(used: Connection) -> None:
    found = gone_runner(used, EXECUTION.runner)
    assert found is not None
    assert (found.phase, found.node_name, found.reason, found.expires_at) == (Phase.USED, "n1", None, NOW + 181)
    save(used, changes=Changes(runners=(life(phase=Phase.GONE, claimed_at=NOW, reason=Reason.INACTIVE).runner,)))
    found = gone_runner(used, EXECUTION.runner)
    assert found is not None
    assert (found.phase, found.reason, found.gone_at) == (Phase.GONE, Reason.INACTIVE, NOW + 2)


def test_of_a_pruned_runner_its_end_is_still_told(connection: Connection) -> None:
    connection.exec_driver_sql("INSERT INTO tombstones VALUES ('29-x', 'inactive', ?)", (to_text(NOW),))
    found = gone_runner(connection, RunnerId("29-x"))
    assert found is not None
    assert (found.phase, found.reason, found.gone_at, found.environment) == (Phase.GONE, Reason.INACTIVE, NOW, None)
    assert id_was_issued(connection, RunnerId("29-x"))


def test_an_id_that_was_never_issued_is_unknown(used: Connection) -> None:
    assert gone_runner(used, RunnerId("29-y")) is None
    assert not id_was_issued(used, RunnerId("29-y"))
    assert id_was_issued(used, EXECUTION.runner)


def test_a_job_whose_runner_had_an_id_of_its_own_is_known_to_have_had_one(connection: Connection) -> None:
    one = life(phase=Phase.USED)
    fresh = replace(one.runner, id=RunnerId("29-fresh"))
    save(connection, changes=replace(one.changes, runners=(fresh,)))
    assert not id_was_issued(connection, RunnerId(one.job.id))
    assert job_had_runner(connection, one.job.id)
    assert not job_had_runner(connection, JobId("29-another"))


def test_the_history_of_a_runner_has_its_allocation_and_its_job(connection: Connection) -> None:
    one = life()
    lines = (
        transition(one.allocation.id, "", "running", NOW, "allocation"),
        transition(one.runner.id, "idle", "used", NOW + 1),
        transition("another"),
    )
    save(connection, changes=replace(one.changes, transitions=lines))
    assert load_transitions(connection, one.runner.id) == lines[:2]


def test_statistics_count_by_environment_phase_and_node(connection: Connection) -> None:
    for number, phase in enumerate((Phase.IDLE, Phase.IDLE, Phase.USED, Phase.GONE)):
        save(connection, changes=life(number, phase).changes)
    counted = load_statistics(connection, NOW)
    assert counted.runners == {ENVIRONMENT: {Phase.IDLE: 2, Phase.USED: 1, Phase.GONE: 1}}
    assert counted.nodes == {"n1": 3}

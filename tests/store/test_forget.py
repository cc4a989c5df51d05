"""All that was known of a cluster can be given up, and nothing else is."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from poseidon.core.command import Command
from poseidon.core.model import ExecutionId, Phase, Reason
from poseidon.errors import StoreError, StoreLocked
from poseidon.store.backup import check
from poseidon.store.connect import writing_connection
from poseidon.store.environments import load_environments, save_environment
from poseidon.store.executions import WaitingExecution, load_waiting_executions, save_waiting_execution
from poseidon.store.forget import forget
from poseidon.store.history import gone_runner
from poseidon.store.lock import take_lock
from poseidon.store.records import load_records, save_changes
from poseidon.store.store import open_store
from tests.store.values import NOW, environment, life


def fill(path: Path) -> None:
    """An idle and a used runner of the cluster's, with an execution, and one of another executor's."""
    with closing(writing_connection(path, "NORMAL")) as connection, connection.begin():
        save_environment(connection, environment(), NOW)
        for number, phase, executor in [(1, Phase.IDLE, "nomad"), (2, Phase.USED, "nomad"), (3, Phase.USED, "local")]:
            save_changes(connection, executor, life(number, phase).changes, NOW)
        command = Command(line="true")
        waiting = WaitingExecution(ExecutionId("e"), life(2).runner.id, command, time_limit=0, created_at=NOW)
        save_waiting_execution(connection, waiting)


async def test_its_runners_are_lost_and_those_of_others_are_not(path: Path) -> None:
    fill(path)
    found = forget(path, "nomad")
    assert (found.jobs, found.runners) == (2, 2)
    assert check(path).problems == ()
    async with open_store(path) as store:
        assert (await store.read(partial(load_records, executor="nomad"))).jobs == ()
        kept = await store.read(partial(load_records, executor="local"))
        assert [runner.phase for runner in kept.runners] == [Phase.USED]
        lost = await store.read(partial(gone_runner, runner=life(2).runner.id))
        assert lost is not None
        assert (lost.phase, lost.reason) == (Phase.GONE, Reason.LOST)
        assert await store.read(load_waiting_executions) == ()
        assert len(await store.read(load_environments)) == 1
    again = forget(path, "nomad")
    assert (again.jobs, again.runners) == (0, 0)


def test_nothing_is_forgotten_under_a_running_daemon(path: Path) -> None:
    fill(path)
    lock = take_lock(path)
    try:
        with pytest.raises(StoreLocked):
            forget(path, "nomad")
    finally:
        os.close(lock)
    assert forget(path, "nomad").jobs == 2


def test_no_database_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no database"):
        forget(tmp_path / "none.db", "nomad")
    assert list(tmp_path.iterdir()) == []

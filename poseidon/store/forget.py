"""Gives up what the database knows of a cluster that has lost everything. Blocking; meant for the command line."""

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from poseidon.core.forgetting import forgotten, living
from poseidon.errors import StoreError
from poseidon.store.connect import writing_connection
from poseidon.store.executions import ExecutionEnd, end_executions_of
from poseidon.store.faults import store_errors
from poseidon.store.lock import take_lock
from poseidon.store.records import load_records, save_changes
from poseidon.store.upgrade import upgrade


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How much it was."""

    jobs: int
    runners: int


def forget(path: Path, executor: str) -> Forgotten:
    """End all jobs and runners of *executor*, as lost; ids of used runners stay taken, environments stay as they are.

    Raises StoreLocked while a daemon runs, StoreError.
    """
    if not path.exists():
        raise StoreError(f"there is no database {path}")
    with store_errors(path):
        lock = take_lock(path)
        try:
            upgrade(path)
            return _forget(path, executor, time.time())
        finally:
            os.close(lock)


def _forget(path: Path, executor: str, now: float) -> Forgotten:
    with closing(writing_connection(path, "FULL")) as connection, connection.begin():
        records = load_records(connection, executor)
        lost = living(records)
        save_changes(connection, executor, forgotten(records, now), now)
        for runner in lost:
            end_executions_of(connection, runner.id, ExecutionEnd("runner_gone", detail="lost"), now)
        return Forgotten(len(records.jobs), len(lost))

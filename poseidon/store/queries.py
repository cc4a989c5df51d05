"""All that is asked of the database and written to it: plain functions of a SQLAlchemy Connection.

For `Store.read` and `Store.write` by `functools.partial`; they know nothing of threads and transactions.
"""

from poseidon.store.environments import last_generation, load_environments, remove_environment, save_environment
from poseidon.store.executions import (
    ExecutionEnd,
    WaitingExecution,
    begin_execution,
    count_executions,
    end_execution,
    end_executions_of,
    expire_executions,
    fail_running_executions,
    load_waiting_executions,
    save_waiting_execution,
)
from poseidon.store.history import (
    RunnerHistory,
    Statistics,
    gone_runner,
    id_was_issued,
    job_had_runner,
    load_statistics,
    load_transitions,
)
from poseidon.store.records import load_deadlines, load_records, save_changes, save_deadline

__all__ = [
    "ExecutionEnd",
    "RunnerHistory",
    "Statistics",
    "WaitingExecution",
    "begin_execution",
    "count_executions",
    "end_execution",
    "end_executions_of",
    "expire_executions",
    "fail_running_executions",
    "gone_runner",
    "id_was_issued",
    "job_had_runner",
    "last_generation",
    "load_deadlines",
    "load_environments",
    "load_records",
    "load_statistics",
    "load_transitions",
    "load_waiting_executions",
    "remove_environment",
    "save_changes",
    "save_deadline",
    "save_environment",
    "save_waiting_execution",
]

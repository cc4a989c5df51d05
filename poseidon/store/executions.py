"""Executions. What to run is kept only until it runs, for it may hold secrets; how it went is kept longer."""
# ruff: noqa: S608 – the statements are put together from constants

import json
from dataclasses import dataclass

from sqlalchemy import Connection

from poseidon.core.command import Command
from poseidon.core.model import ExecutionId, RunnerId
from poseidon.store.statements import Row, run, select
from poseidon.store.times import from_text, to_text


@dataclass(frozen=True, slots=True)
class WaitingExecution:
    """Asked for, and waiting for its WebSocket."""

    id: ExecutionId
    runner: RunnerId
    command: Command
    time_limit: int
    """Seconds; 0: none."""
    created_at: float


@dataclass(frozen=True, slots=True)
class ExecutionEnd:
    """How an execution went. *outcome* as in the design's vocabulary; *detail* is its reason or cause."""

    outcome: str
    exit_code: int | None = None
    detail: str = ""
    stdin_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0


ADD = (
    "INSERT INTO executions (id, runner, state, command, arguments, variables, cwd, privileged, tty, rows, columns, "
    "time_limit, created_at, detail, stdin_bytes, stdout_bytes, stderr_bytes) "
    "VALUES (:id, :runner, 'waiting', :command, :arguments, :variables, :cwd, :privileged, :tty, :rows, :columns, "
    ":time_limit, :created_at, '', 0, 0, 0)"
)
FORGET_COMMAND = "command = NULL, arguments = NULL, variables = NULL, cwd = NULL"
BEGIN = (
    f"UPDATE executions SET state = 'running', started_at = :at, {FORGET_COMMAND} WHERE id = :id AND state = 'waiting'"
)
END = (
    f"UPDATE executions SET state = 'ended', ended_at = :at, {FORGET_COMMAND}, outcome = :outcome, "
    "exit_code = :exit_code, detail = :detail, stdin_bytes = :stdin_bytes, stdout_bytes = :stdout_bytes, "
    "stderr_bytes = :stderr_bytes WHERE state <> 'ended' AND "
)


def save_waiting_execution(connection: Connection, execution: WaitingExecution) -> None:
    """Keep *execution*, so that a restart doesn't lose it."""
    command = execution.command
    row = {
        "id": execution.id,
        "runner": execution.runner,
        "command": command.line,
        "arguments": json.dumps(command.argv),
        "variables": json.dumps(dict(command.environment)),
        "cwd": command.cwd,
        "privileged": command.privileged,
        "tty": command.tty,
        "rows": command.rows,
        "columns": command.columns,
        "time_limit": execution.time_limit,
        "created_at": to_text(execution.created_at),
    }
    run(connection, ADD, [row])


def begin_execution(connection: Connection, execution: ExecutionId, at: float) -> None:
    """Its WebSocket has come."""
    run(connection, BEGIN, [{"id": execution, "at": to_text(at)}])


def end_execution(connection: Connection, execution: ExecutionId, end: ExecutionEnd, at: float) -> None:
    """Running or still waiting: it is over. The first end counts."""
    run(connection, f"{END} id = :id", [{"id": execution, **_end_row(end, at)}])


def end_executions_of(connection: Connection, runner: RunnerId, end: ExecutionEnd, at: float) -> None:
    """All that still wait or run in *runner* are over."""
    run(connection, f"{END} runner = :runner", [{"runner": runner, **_end_row(end, at)}])


def expire_executions(connection: Connection, created_before: float, at: float) -> tuple[ExecutionId, ...]:
    """Give up those that have waited for too long; the answer tells which."""
    before = {"before": to_text(created_before)}
    condition = "state = 'waiting' AND created_at < :before"
    rows = select(connection, f"SELECT id FROM executions WHERE {condition}", before)
    end = ExecutionEnd("client_gone", detail="nobody connected")
    run(connection, f"{END} {condition}", [before | _end_row(end, at)])
    return tuple(ExecutionId(row["id"]) for row in rows)


def fail_running_executions(connection: Connection, at: float, detail: str = "the daemon was restarted") -> int:
    """At start: none of those that ran can be taken up again. The answer tells how many they were."""
    rows = select(connection, "SELECT id FROM executions WHERE state = 'running'")
    run(connection, f"{END} state = 'running'", [_end_row(ExecutionEnd("failed", detail=detail), at)])
    return len(rows)


def load_waiting_executions(connection: Connection) -> tuple[WaitingExecution, ...]:
    """Of runners in use, oldest first."""
    rows = select(
        connection,
        "SELECT e.* FROM executions e JOIN runners r ON r.id = e.runner "
        "WHERE e.state = 'waiting' AND r.phase = 'used' ORDER BY e.created_at, e.id",
    )
    return tuple(_waiting_of(row) for row in rows)


def count_executions(connection: Connection, runner: RunnerId) -> tuple[int, str | None]:
    """How many *runner* has had, and the outcome of the one that ended last."""
    rows = select(
        connection,
        "SELECT (SELECT count(*) FROM executions WHERE runner = :runner) AS n, (SELECT outcome FROM executions "
        "WHERE runner = :runner AND ended_at IS NOT NULL ORDER BY ended_at DESC, rowid DESC LIMIT 1) AS outcome",
        {"runner": runner},
    )
    return rows[0]["n"], rows[0]["outcome"]


def _end_row(end: ExecutionEnd, at: float) -> dict[str, object]:
    return {
        "at": to_text(at),
        "outcome": end.outcome,
        "exit_code": end.exit_code,
        "detail": end.detail,
        "stdin_bytes": end.stdin_bytes,
        "stdout_bytes": end.stdout_bytes,
        "stderr_bytes": end.stderr_bytes,
    }


def _waiting_of(row: Row) -> WaitingExecution:
    command = Command(
        line=row["command"],
        argv=tuple(json.loads(row["arguments"])),
        environment=json.loads(row["variables"]),
        privileged=bool(row["privileged"]),
        tty=bool(row["tty"]),
        rows=row["rows"],
        columns=row["columns"],
        cwd=row["cwd"],
    )
    return WaitingExecution(
        id=ExecutionId(row["id"]),
        runner=RunnerId(row["runner"]),
        command=command,
        time_limit=row["time_limit"],
        created_at=from_text(row["created_at"]),
    )

"""What the core changes and gets back at start: jobs, allocations, runners, how far each executor was followed."""
# ruff: noqa: S608 – the statements are put together from constants

from sqlalchemy import Connection

from poseidon.core.model import Changes, JobId, Phase, Position, Records, RunnerId
from poseidon.store import schema
from poseidon.store.rows import (
    allocation_of,
    allocation_row,
    intent_of,
    intent_rows,
    job_of,
    job_row,
    runner_of,
    runner_row,
    transition_row,
)
from poseidon.store.statements import Row, newest, run, select, upsert
from poseidon.store.times import from_text, to_text

SAVE_JOB = upsert(schema.jobs, once=("first_seen_at",))
FORGET_INTENTS = "DELETE FROM intents WHERE job = :job"
SAVE_INTENT = upsert(schema.intents)
SAVE_ALLOCATION = upsert(schema.allocations, once=("first_seen_at",))
# once used, the deadline is `save_deadline`'s
SAVE_RUNNER = upsert(
    schema.runners,
    special={
        "expires_at": "CASE WHEN excluded.phase = 'used' AND runners.phase = 'used' "
        "THEN runners.expires_at ELSE excluded.expires_at END"
    },
)
SAVE_POSITION = upsert(schema.stream_position)
ADD_TRANSITION = (
    "INSERT INTO transitions (at, kind, subject, environment, before, after, reason) "
    "VALUES (:at, :kind, :subject, :environment, :before, :after, :reason)"
)
END_JOB = "UPDATE jobs SET ended_at = :at WHERE id = :job"
END_ALLOCATIONS = "UPDATE allocations SET absent_at = :at WHERE job = :job AND absent_at IS NULL"
MARK_ABSENT = "UPDATE allocations SET absent_at = :at WHERE id = :id AND absent_at IS NULL"
# jobs may be seen whose environment was never put here: what is known of it is its id
KNOW_ENVIRONMENT = (
    "INSERT OR IGNORE INTO environments VALUES (:id, '', 0, 0, 0, 0, '[]', :executor, 0, 0, :at, :at, :at)"
)


def save_changes(connection: Connection, executor: str, changes: Changes, at: float) -> None:
    """Save all that one or more steps of the core have changed, in an order that the rules of the schema accept."""
    now = to_text(at)
    _save_jobs(connection, executor, changes, now)
    allocations = newest(changes.allocations, key=lambda allocation: allocation.id)
    run(connection, SAVE_ALLOCATION, [allocation_row(allocation, now) for allocation in allocations])
    run(connection, MARK_ABSENT, [{"id": allocation, "at": now} for allocation in changes.absent])
    runners = newest(changes.runners, key=lambda runner: runner.id)
    runners.sort(key=lambda runner: runner.phase is not Phase.GONE)  # a job's old runner ends before its next begins
    run(connection, SAVE_RUNNER, [runner_row(runner) for runner in runners])
    run(connection, ADD_TRANSITION, [transition_row(transition) for transition in changes.transitions])
    _end_jobs(connection, changes.ended, now)
    if changes.position is not None:
        run(connection, SAVE_POSITION, [_position_row(executor, changes.position, now)])


def _save_jobs(connection: Connection, executor: str, changes: Changes, now: str) -> None:
    jobs = newest(changes.jobs, key=lambda job: job.id)
    environments = {job.environment for job in jobs}
    run(connection, KNOW_ENVIRONMENT, [{"id": id_, "executor": executor, "at": now} for id_ in environments])
    run(connection, SAVE_JOB, [job_row(job, executor, now) for job in jobs])
    run(connection, FORGET_INTENTS, [{"job": job.id} for job in jobs])
    run(connection, SAVE_INTENT, [row for job in jobs for row in intent_rows(job)])


def _end_jobs(connection: Connection, jobs: tuple[JobId, ...], now: str) -> None:
    """They are kept for a while, as history. Should one come back, nothing of its old life may count."""
    rows: list[Row] = [{"job": job, "at": now} for job in jobs]
    run(connection, END_JOB, rows)
    run(connection, END_ALLOCATIONS, rows)
    run(connection, FORGET_INTENTS, [{"job": job} for job in jobs])


def _position_row(executor: str, position: Position, now: str) -> Row:
    return {
        "executor": executor,
        "stream": position.stream,
        "jobs_index": position.jobs_index,
        "allocations_index": position.allocations_index,
        "epoch": position.epoch,
        "at": now,
    }


LIVING = "SELECT id FROM jobs WHERE executor = :executor AND ended_at IS NULL"


def load_records(connection: Connection, executor: str) -> Records:
    """What the core needs to go on where it was: all jobs of *executor* that aren't over, and what belongs to them."""
    of = {"executor": executor}
    intents = {
        (row["job"], row["kind"]): intent_of(row)
        for row in select(connection, f"SELECT * FROM intents WHERE job IN ({LIVING})", of)
    }
    jobs = select(connection, "SELECT * FROM jobs WHERE executor = :executor AND ended_at IS NULL ORDER BY rowid", of)
    allocations = select(
        connection,
        f"SELECT * FROM allocations WHERE job IN ({LIVING}) AND absent_at IS NULL ORDER BY created, id",
        of,
    )
    runners = select(connection, f"SELECT * FROM runners WHERE job IN ({LIVING}) ORDER BY ready_at, id", of)
    return Records(
        jobs=tuple(job_of(row, intents.get((row["id"], "start")), intents.get((row["id"], "stop"))) for row in jobs),
        allocations=tuple(allocation_of(row) for row in allocations),
        runners=tuple(runner_of(row) for row in runners),
        position=_load_position(connection, executor),
    )


def _load_position(connection: Connection, executor: str) -> Position:
    rows = select(connection, "SELECT * FROM stream_position WHERE executor = :executor", {"executor": executor})
    if not rows:
        return Position()
    (row,) = rows
    return Position(row["stream"], row["jobs_index"], row["allocations_index"], row["epoch"])


def save_deadline(connection: Connection, runner: RunnerId, at: float | None) -> None:
    """When a used runner's inactivity ends it; None: nothing ends it at present."""
    run(
        connection,
        "UPDATE runners SET expires_at = :at WHERE id = :id AND phase = 'used'",
        [{"id": runner, "at": to_text(at)}],
    )


def load_deadlines(connection: Connection) -> dict[RunnerId, float]:
    """Of all used runners that have one."""
    rows = select(connection, "SELECT id, expires_at FROM runners WHERE phase = 'used' AND expires_at IS NOT NULL")
    return {RunnerId(row["id"]): from_text(row["expires_at"]) for row in rows}

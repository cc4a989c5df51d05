"""What is known of runners, those long gone included, and what happened to them."""

from dataclasses import dataclass

from sqlalchemy import Connection

from poseidon.core.model import AllocationId, EnvironmentId, JobId, Phase, Reason, RunnerId, Transition
from poseidon.store.rows import transition_of
from poseidon.store.statements import Row, select
from poseidon.store.times import from_text, to_text


@dataclass(frozen=True, slots=True)
class RunnerHistory:
    """One runner, for a client that asks. Of one that is long gone only id, reason and end are left."""

    id: RunnerId
    phase: Phase
    reason: Reason | None
    environment: EnvironmentId | None = None
    node_name: str = ""
    job: JobId | None = None
    allocation: AllocationId | None = None
    ready_at: float | None = None
    claimed_at: float | None = None
    expires_at: float | None = None
    gone_at: float | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts for the status page."""

    runners: dict[EnvironmentId, dict[Phase, int]]
    """By environment and phase; gone ones as far as they are kept."""
    nodes: dict[str, int]
    """Runners idle or used, by the node's name."""
    outcomes: dict[str, int]
    """Executions that ended since the given time, by outcome."""


def gone_runner(connection: Connection, runner: RunnerId) -> RunnerHistory | None:
    """What is known of *runner*, gone or not; None if the id was never issued."""
    by = {"id": runner}
    if rows := select(connection, "SELECT * FROM runners WHERE id = :id", by):
        return _history_of(rows[0])
    if rows := select(connection, "SELECT * FROM tombstones WHERE runner = :id", by):
        row = rows[0]
        return RunnerHistory(runner, Phase.GONE, _reason(row), gone_at=from_text(row["at"]))
    return None


def id_was_issued(connection: Connection, runner: RunnerId) -> bool:
    """Such an id must never be given to another runner."""
    return gone_runner(connection, runner) is not None


def job_had_runner(connection: Connection, job: JobId) -> bool:
    """Whether the job, or its id, has had a runner: should it come back, a client may have had its allocation."""
    rows = select(connection, "SELECT 1 AS one FROM runners WHERE job = :job LIMIT 1", {"job": job})
    return bool(rows) or id_was_issued(connection, RunnerId(job))


def load_transitions(connection: Connection, runner: RunnerId) -> tuple[Transition, ...]:
    """What happened to *runner*, its allocation and its job, in order."""
    rows = select(
        connection,
        "SELECT * FROM transitions WHERE subject IN (SELECT :id UNION SELECT allocation FROM runners WHERE id = :id "
        "UNION SELECT job FROM runners WHERE id = :id) ORDER BY at, id",
        {"id": runner},
    )
    return tuple(transition_of(row) for row in rows)


def load_statistics(connection: Connection, since: float) -> Statistics:
    """Count; *since* is for the executions."""
    runners: dict[EnvironmentId, dict[Phase, int]] = {}
    for row in select(connection, "SELECT environment, phase, count(*) AS n FROM runners GROUP BY environment, phase"):
        runners.setdefault(EnvironmentId(row["environment"]), {})[Phase(row["phase"])] = row["n"]
    nodes = select(
        connection, "SELECT node_name, count(*) AS n FROM runners WHERE phase IN ('idle', 'used') GROUP BY node_name"
    )
    outcomes = select(
        connection,
        "SELECT outcome, count(*) AS n FROM executions WHERE ended_at >= :since GROUP BY outcome",
        {"since": to_text(since)},
    )
    return Statistics(
        runners=runners,
        nodes={row["node_name"]: row["n"] for row in nodes},
        outcomes={row["outcome"]: row["n"] for row in outcomes},
    )


def _history_of(row: Row) -> RunnerHistory:
    return RunnerHistory(
        id=RunnerId(row["id"]),
        phase=Phase(row["phase"]),
        reason=_reason(row),
        environment=EnvironmentId(row["environment"]),
        node_name=row["node_name"],
        job=JobId(row["job"]),
        allocation=AllocationId(row["allocation"]),
        ready_at=from_text(row["ready_at"]),
        claimed_at=from_text(row["claimed_at"]),
        expires_at=from_text(row["expires_at"]),
        gone_at=from_text(row["gone_at"]),
    )


def _reason(row: Row) -> Reason | None:
    return None if row["reason"] is None else Reason(row["reason"])

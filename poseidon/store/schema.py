"""The tables and views of the database, as the code uses them; `docs/sql.md` tells what each column means.

The database itself is made by `migrations/` alone; a test holds both to be the same.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)

REVISION = "0002"
"""The newest migration: known here so that a start that changes nothing needn't import Alembic."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _refers(name: str, target: str) -> Column[str]:
    return Column(name, Text, ForeignKey(target), nullable=False)


def _environment() -> Column[int]:
    return Column("environment", Integer, ForeignKey("environments.id"), nullable=False)


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _number(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


def _maybe(name: str) -> Column[str]:
    return Column(name, Text)


environments = Table(
    "environments",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    _text("image"),
    _number("pool_size"),
    _number("cpu_limit"),
    _number("memory_limit"),
    _flag("network_access"),
    _text("exposed_ports"),
    _text("executor"),
    _number("generation"),
    _number("compatible_since"),
    _text("created_at"),
    _text("changed_at"),
    _maybe("removed_at"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    _environment(),
    _text("executor"),
    _number("generation"),
    _flag("ours"),
    _flag("adopted"),
    _flag("id_issued"),
    _number("version"),
    _maybe("status"),
    _number("gone_version"),
    Column("mark", Boolean),
    _maybe("stop_reason"),
    _maybe("doubtful_since"),
    _maybe("lifeless_since"),
    _text("first_seen_at"),
    _text("changed_at"),
    _maybe("ended_at"),
    Index("ix_jobs_living", "executor", sqlite_where=text("ended_at IS NULL")),
    Index("ix_jobs_environment", "environment"),
    Index("ix_jobs_ended_at", "ended_at", sqlite_where=text("ended_at IS NOT NULL")),
)

allocations = Table(
    "allocations",
    metadata,
    Column("id", Text, primary_key=True),
    _refers("job", "jobs.id"),
    _number("version"),
    _number("created"),
    _text("client"),
    _text("desired"),
    _number("slot"),
    _maybe("started"),
    _text("node_id"),
    _text("node_name"),
    _number("restarts"),
    _flag("migrate"),
    _flag("oom_killed"),
    _maybe("follow_up"),
    _maybe("previous"),
    _maybe("next"),
    _text("ports"),
    _text("first_seen_at"),
    _text("changed_at"),
    _maybe("absent_at"),
    Index("ix_allocations_job", "job"),
    Index("ix_allocations_absent_at", "absent_at", sqlite_where=text("absent_at IS NOT NULL")),
)

runners = Table(
    "runners",
    metadata,
    Column("id", Text, primary_key=True),
    _environment(),
    _refers("job", "jobs.id"),
    _refers("allocation", "allocations.id"),
    _text("started"),
    _text("node_id"),
    _text("node_name"),
    _text("phase"),
    _maybe("reason"),
    _number("timeout"),
    _text("ready_at"),
    _maybe("claimed_at"),
    _maybe("expires_at"),
    _maybe("gone_at"),
    Column("startup_ms", Integer),
    _text("ports"),
    CheckConstraint("phase IN ('idle', 'used', 'gone')", name="phase"),
    CheckConstraint("phase <> 'idle' OR claimed_at IS NULL", name="idle_is_unclaimed"),
    CheckConstraint("phase <> 'used' OR claimed_at IS NOT NULL", name="used_is_claimed"),
    CheckConstraint("(phase = 'gone') = (gone_at IS NOT NULL)", name="gone_has_a_time"),
    Index("uq_runners_claimed_allocation", "allocation", unique=True, sqlite_where=text("claimed_at IS NOT NULL")),
    Index("uq_runners_living_job", "job", unique=True, sqlite_where=text("phase IN ('idle', 'used')")),
    Index("ix_runners_job", "job"),
    Index("ix_runners_allocation", "allocation"),
    Index("ix_runners_environment_phase", "environment", "phase"),
    Index("ix_runners_gone_at", "gone_at", sqlite_where=text("gone_at IS NOT NULL")),
)

executions = Table(
    "executions",
    metadata,
    Column("id", Text, primary_key=True),
    _refers("runner", "runners.id"),
    _text("state"),
    _maybe("command"),
    _maybe("arguments"),
    _maybe("variables"),
    _maybe("cwd"),
    _flag("privileged"),
    _flag("tty"),
    _number("rows"),
    _number("columns"),
    _number("time_limit"),
    _text("created_at"),
    _maybe("started_at"),
    _maybe("ended_at"),
    _maybe("outcome"),
    Column("exit_code", Integer),
    _text("detail"),
    _number("stdin_bytes"),
    _number("stdout_bytes"),
    _number("stderr_bytes"),
    CheckConstraint("state IN ('waiting', 'running', 'ended')", name="state"),
    CheckConstraint("(state = 'ended') = (outcome IS NOT NULL)", name="ended_has_an_outcome"),
    Index("ix_executions_runner", "runner"),
    Index("ix_executions_waiting", "created_at", sqlite_where=text("state = 'waiting'")),
    Index("ix_executions_ended_at", "ended_at", sqlite_where=text("ended_at IS NOT NULL")),
)

transitions = Table(
    "transitions",
    metadata,
    Column("id", Integer, primary_key=True),
    _text("at"),
    _text("kind"),
    _text("subject"),
    _number("environment"),
    _text("before"),
    _text("after"),
    _text("reason"),
    Index("ix_transitions_subject", "subject"),
    Index("ix_transitions_at", "at"),
)

stream_position = Table(
    "stream_position",
    metadata,
    Column("executor", Text, primary_key=True),
    _number("stream"),
    _number("jobs_index"),
    _number("allocations_index"),
    _number("epoch"),
    _text("at"),
)

intents = Table(
    "intents",
    metadata,
    Column("job", Text, ForeignKey("jobs.id"), primary_key=True),
    Column("kind", Text, primary_key=True),
    _text("asked_at"),
    Column("answered", Integer),
    CheckConstraint("kind IN ('start', 'stop')", name="kind"),
    sqlite_with_rowid=False,
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("runner", Text, primary_key=True),
    _maybe("reason"),
    _text("at"),
    sqlite_with_rowid=False,
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("allocation", Text, primary_key=True),
    _text("job"),
    _number("environment"),
    _number("generation"),
    _number("slot"),
    _number("pid"),
    _text("started"),
    _text("folder"),
    _number("memory_mb"),
    _number("created"),
    _number("version"),
    _text("state"),
    _text("reason"),
    _text("created_at"),
    _maybe("ended_at"),
    Column("ports", Text, nullable=False, server_default=""),
    CheckConstraint("state IN ('asked', 'running', 'ended', 'stopped')", name="state"),
)

meta = Table("meta", metadata, Column("key", Text, primary_key=True), _text("value"), sqlite_with_rowid=False)

VIEWS = {
    "runner_overview": """
SELECT r.id AS runner, r.environment, e.image, r.phase, r.reason, r.node_name AS node, r.allocation, r.job, j.executor,
       r.timeout, r.ready_at, r.claimed_at, r.expires_at, r.gone_at, r.startup_ms,
       (SELECT count(*) FROM executions x WHERE x.runner = r.id) AS executions,
       (SELECT max(x.created_at) FROM executions x WHERE x.runner = r.id) AS last_execution_at
FROM runners r
JOIN jobs j ON j.id = r.job
JOIN environments e ON e.id = r.environment""",
    "pool_overview": """
SELECT e.id AS environment, e.image, e.executor, iif(e.removed_at IS NULL, e.pool_size, 0) AS wanted,
       (SELECT count(*) FROM runners r WHERE r.environment = e.id AND r.phase = 'idle') AS idle,
       (SELECT count(*) FROM runners r WHERE r.environment = e.id AND r.phase = 'used') AS used,
       (SELECT count(*) FROM jobs j
        WHERE j.environment = e.id AND j.ended_at IS NULL AND (j.ours OR j.adopted)
          AND NOT EXISTS (SELECT 1 FROM intents i WHERE i.job = j.id AND i.kind = 'stop')
          AND NOT EXISTS (SELECT 1 FROM runners r WHERE r.job = j.id AND r.phase IN ('idle', 'used'))) AS starting,
       (SELECT count(*) FROM jobs j JOIN intents i ON i.job = j.id AND i.kind = 'stop'
        WHERE j.environment = e.id AND j.ended_at IS NULL) AS stopping,
       e.generation, e.removed_at
FROM environments e""",
    "node_overview": """
SELECT a.node_name AS node, a.node_id, count(*) AS allocations,
       count(iif(a.client = 'running', 1, NULL)) AS running,
       count(iif(r.phase = 'idle', 1, NULL)) AS idle,
       count(iif(r.phase = 'used', 1, NULL)) AS used,
       count(DISTINCT r.environment) AS environments,
       max(r.claimed_at) AS last_claim_at
FROM allocations a
LEFT JOIN runners r ON r.allocation = a.id AND r.phase IN ('idle', 'used')
WHERE a.absent_at IS NULL AND a.client IN ('pending', 'running', 'unknown')
GROUP BY a.node_id, a.node_name""",
    "allocation_history": """
SELECT t.id, t.at, t.kind, t.subject, t.environment, t.before, t.after, t.reason,
       r.id AS runner, a.id AS allocation, coalesce(a.job, iif(t.kind = 'job', t.subject, NULL)) AS job,
       a.node_name AS node
FROM transitions t
LEFT JOIN runners r ON t.kind = 'runner' AND r.id = t.subject
LEFT JOIN allocations a ON a.id = iif(t.kind = 'allocation', t.subject, r.allocation)""",
}
"""For operators; the daemon itself doesn't read them."""

TRIGGERS = {
    "runners_phase_never_goes_back": """
BEFORE UPDATE OF phase ON runners
WHEN OLD.phase <> NEW.phase AND (OLD.phase = 'gone' OR NEW.phase = 'idle')
BEGIN SELECT raise(ABORT, 'a runner''s phase never goes back'); END""",
    "runners_id_never_issued_again": """
BEFORE INSERT ON runners
WHEN EXISTS (SELECT 1 FROM tombstones WHERE runner = NEW.id)
BEGIN SELECT raise(ABORT, 'a runner''s id is never issued again'); END""",
}
"""Rules that constraints can't say."""

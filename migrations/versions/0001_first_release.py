"""Tables, views and rules of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

VIEWS = (
    """CREATE VIEW runner_overview AS
SELECT r.id AS runner, r.environment, e.image, r.phase, r.reason, r.node_name AS node, r.allocation, r.job, j.executor,
       r.timeout, r.ready_at, r.claimed_at, r.expires_at, r.gone_at, r.startup_ms,
       (SELECT count(*) FROM executions x WHERE x.runner = r.id) AS executions,
       (SELECT max(x.created_at) FROM executions x WHERE x.runner = r.id) AS last_execution_at
FROM runners r
JOIN jobs j ON j.id = r.job
JOIN environments e ON e.id = r.environment""",
    """CREATE VIEW pool_overview AS
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
    """CREATE VIEW node_overview AS
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
    """CREATE VIEW allocation_history AS
SELECT t.id, t.at, t.kind, t.subject, t.environment, t.before, t.after, t.reason,
       r.id AS runner, a.id AS allocation, coalesce(a.job, iif(t.kind = 'job', t.subject, NULL)) AS job,
       a.node_name AS node
FROM transitions t
LEFT JOIN runners r ON t.kind = 'runner' AND r.id = t.subject
LEFT JOIN allocations a ON a.id = iif(t.kind = 'allocation', t.subject, r.allocation)""",
)

TRIGGERS = (
    """CREATE TRIGGER runners_phase_never_goes_back
BEFORE UPDATE OF phase ON runners
WHEN OLD.phase <> NEW.phase AND (OLD.phase = 'gone' OR NEW.phase = 'idle')
BEGIN SELECT raise(ABORT, 'a runner''s phase never goes back'); END""",
    """CREATE TRIGGER runners_id_never_issued_again
BEFORE INSERT ON runners
WHEN EXISTS (SELECT 1 FROM tombstones WHERE runner = NEW.id)
BEGIN SELECT raise(ABORT, 'a runner''s id is never issued again'); END""",
)


def upgrade() -> None:
    op.create_table(
        "environments",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("image", sa.Text(), nullable=False),
        sa.Column("pool_size", sa.Integer(), nullable=False),
        sa.Column("cpu_limit", sa.Integer(), nullable=False),
        sa.Column("memory_limit", sa.Integer(), nullable=False),
        sa.Column("network_access", sa.Boolean(), nullable=False),
        sa.Column("exposed_ports", sa.Text(), nullable=False),
        sa.Column("executor", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("compatible_since", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Text(), nullable=False),
        sa.Column("removed_at", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environments")),
    )
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_meta")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "sandboxes",
        sa.Column("allocation", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("environment", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started", sa.Text(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.Text(), nullable=True),
        sa.CheckConstraint("state IN ('asked', 'running', 'ended', 'stopped')", name=op.f("ck_sandboxes_state")),
        sa.PrimaryKeyConstraint("allocation", name=op.f("pk_sandboxes")),
    )
    op.create_table(
        "stream_position",
        sa.Column("executor", sa.Text(), nullable=False),
        sa.Column("stream", sa.Integer(), nullable=False),
        sa.Column("jobs_index", sa.Integer(), nullable=False),
        sa.Column("allocations_index", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("executor", name=op.f("pk_stream_position")),
    )
    op.create_table(
        "tombstones",
        sa.Column("runner", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("runner", name=op.f("pk_tombstones")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "transitions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("environment", sa.Integer(), nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transitions")),
    )
    op.create_index("ix_transitions_at", "transitions", ["at"])
    op.create_index("ix_transitions_subject", "transitions", ["subject"])

    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("environment", sa.Integer(), nullable=False),
        sa.Column("executor", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("ours", sa.Boolean(), nullable=False),
        sa.Column("adopted", sa.Boolean(), nullable=False),
        sa.Column("id_issued", sa.Boolean(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=True),
        sa.Column("gone_version", sa.Integer(), nullable=False),
        sa.Column("mark", sa.Boolean(), nullable=True),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("doubtful_since", sa.Text(), nullable=True),
        sa.Column("lifeless_since", sa.Text(), nullable=True),
        sa.Column("first_seen_at", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["environment"], ["environments.id"], name=op.f("fk_jobs_environment")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_ended_at", "jobs", ["ended_at"], sqlite_where=sa.text("ended_at IS NOT NULL"))
    op.create_index("ix_jobs_environment", "jobs", ["environment"])
    op.create_index("ix_jobs_living", "jobs", ["executor"], sqlite_where=sa.text("ended_at IS NULL"))

    op.create_table(
        "allocations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("client", sa.Text(), nullable=False),
        sa.Column("desired", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("started", sa.Text(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("node_name", sa.Text(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("migrate", sa.Boolean(), nullable=False),
        sa.Column("oom_killed", sa.Boolean(), nullable=False),
        sa.Column("follow_up", sa.Text(), nullable=True),
        sa.Column("previous", sa.Text(), nullable=True),
        sa.Column("next", sa.Text(), nullable=True),
        sa.Column("ports", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Text(), nullable=False),
        sa.Column("absent_at", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_allocations_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_allocations")),
    )
    op.create_index(
        "ix_allocations_absent_at", "allocations", ["absent_at"], sqlite_where=sa.text("absent_at IS NOT NULL")
    )
    op.create_index("ix_allocations_job", "allocations", ["job"])

    op.create_table(
        "intents",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.Text(), nullable=False),
        sa.Column("answered", sa.Integer(), nullable=True),
        sa.CheckConstraint("kind IN ('start', 'stop')", name=op.f("ck_intents_kind")),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_intents_job")),
        sa.PrimaryKeyConstraint("job", "kind", name=op.f("pk_intents")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "runners",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("environment", sa.Integer(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("allocation", sa.Text(), nullable=False),
        sa.Column("started", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("node_name", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("timeout", sa.Integer(), nullable=False),
        sa.Column("ready_at", sa.Text(), nullable=False),
        sa.Column("claimed_at", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.Text(), nullable=True),
        sa.Column("gone_at", sa.Text(), nullable=True),
        sa.Column("startup_ms", sa.Integer(), nullable=True),
        sa.Column("ports", sa.Text(), nullable=False),
        sa.CheckConstraint("(phase = 'gone') = (gone_at IS NOT NULL)", name=op.f("ck_runners_gone_has_a_time")),
        sa.CheckConstraint("phase <> 'idle' OR claimed_at IS NULL", name=op.f("ck_runners_idle_is_unclaimed")),
        sa.CheckConstraint("phase <> 'used' OR claimed_at IS NOT NULL", name=op.f("ck_runners_used_is_claimed")),
        sa.CheckConstraint("phase IN ('idle', 'used', 'gone')", name=op.f("ck_runners_phase")),
        sa.ForeignKeyConstraint(["allocation"], ["allocations.id"], name=op.f("fk_runners_allocation")),
        sa.ForeignKeyConstraint(["environment"], ["environments.id"], name=op.f("fk_runners_environment")),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_runners_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runners")),
    )
    op.create_index("ix_runners_allocation", "runners", ["allocation"])
    op.create_index("ix_runners_environment_phase", "runners", ["environment", "phase"])
    op.create_index("ix_runners_gone_at", "runners", ["gone_at"], sqlite_where=sa.text("gone_at IS NOT NULL"))
    op.create_index("ix_runners_job", "runners", ["job"])
    op.create_index(
        "uq_runners_claimed_allocation",
        "runners",
        ["allocation"],
        unique=True,
        sqlite_where=sa.text("claimed_at IS NOT NULL"),
    )
    op.create_index(
        "uq_runners_living_job", "runners", ["job"], unique=True, sqlite_where=sa.text("phase IN ('idle', 'used')")
    )

    op.create_table(
        "executions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("runner", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=True),
        sa.Column("arguments", sa.Text(), nullable=True),
        sa.Column("variables", sa.Text(), nullable=True),
        sa.Column("cwd", sa.Text(), nullable=True),
        sa.Column("privileged", sa.Boolean(), nullable=False),
        sa.Column("tty", sa.Boolean(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("columns", sa.Integer(), nullable=False),
        sa.Column("time_limit", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("stdin_bytes", sa.Integer(), nullable=False),
        sa.Column("stdout_bytes", sa.Integer(), nullable=False),
        sa.Column("stderr_bytes", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "(state = 'ended') = (outcome IS NOT NULL)", name=op.f("ck_executions_ended_has_an_outcome")
        ),
        sa.CheckConstraint("state IN ('waiting', 'running', 'ended')", name=op.f("ck_executions_state")),
        sa.ForeignKeyConstraint(["runner"], ["runners.id"], name=op.f("fk_executions_runner")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_executions")),
    )
    op.create_index("ix_executions_ended_at", "executions", ["ended_at"], sqlite_where=sa.text("ended_at IS NOT NULL"))
    op.create_index("ix_executions_runner", "executions", ["runner"])
    op.create_index("ix_executions_waiting", "executions", ["created_at"], sqlite_where=sa.text("state = 'waiting'"))
    for statement in VIEWS + TRIGGERS:
        op.execute(statement)

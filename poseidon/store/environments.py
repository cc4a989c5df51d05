"""Environments as clients have put them. A removed one stays as long as anything refers to it."""
# ruff: noqa: S608 – the statements are put together from constants

from sqlalchemy import Connection

from poseidon.core.model import Environment, EnvironmentId
from poseidon.store import schema
from poseidon.store.rows import environment_of, environment_row
from poseidon.store.statements import run, select, upsert
from poseidon.store.times import to_text

SAVE = upsert(schema.environments, once=("created_at",))
UNUSED = (
    "removed_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.environment = environments.id) "
    "AND NOT EXISTS (SELECT 1 FROM runners WHERE runners.environment = environments.id)"
)


def save_environment(connection: Connection, environment: Environment, at: float) -> None:
    """Create or replace; one that was removed is back."""
    run(connection, SAVE, [environment_row(environment, at)])


def remove_environment(connection: Connection, environment: EnvironmentId, at: float) -> None:
    """From now on it isn't among those loaded."""
    run(
        connection,
        "UPDATE environments SET removed_at = :at WHERE id = :id AND removed_at IS NULL",
        [{"id": environment, "at": to_text(at)}],
    )
    run(connection, f"DELETE FROM environments WHERE id = :id AND {UNUSED}", [{"id": environment}])


def load_environments(connection: Connection) -> tuple[Environment, ...]:
    """All that are not removed, by id."""
    rows = select(connection, "SELECT * FROM environments WHERE removed_at IS NULL ORDER BY id")
    return tuple(environment_of(row) for row in rows)


def last_generation(connection: Connection, environment: EnvironmentId) -> int:
    """The newest that this id has had, removed or not: jobs of it may still live. 0: none."""
    rows = select(connection, "SELECT generation FROM environments WHERE id = :id", {"id": environment})
    return int(rows[0]["generation"]) if rows else 0

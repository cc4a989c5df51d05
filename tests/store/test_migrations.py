"""The migrations alone make the database, it is the one that the code expects, and an upgrade can't lose anything."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from poseidon.errors import StoreError
from poseidon.store import migrate, schema, upgrade
from poseidon.store.store import open_store

NEXT = f"""
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{schema.REVISION}"

def upgrade():
    op.add_column("jobs", sa.Column("colour", sa.Text()))
    {{then}}
"""


def objects(path: Path) -> dict[str, str]:
    """The SQL of all tables, indices, views and triggers, without regard to blanks."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'alembic_version'"
        ).fetchall()
    return {name: re.sub(r"\s+", " ", sql).strip() for name, sql in rows}


def expected(path: Path) -> dict[str, str]:
    """The same by `schema.py`."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        schema.metadata.create_all(connection)
        for name, view in schema.VIEWS.items():
            connection.execute(text(f"CREATE VIEW {name} AS {view}"))
        for name, trigger in schema.TRIGGERS.items():
            connection.execute(text(f"CREATE TRIGGER {name} {trigger}"))
    engine.dispose()
    return objects(path)


def test_the_migrations_make_what_the_code_expects(path: Path, tmp_path: Path) -> None:
    made, wanted = objects(path), expected(tmp_path / "expected.db")
    assert made.keys() == wanted.keys()
    for name in wanted:
        assert _parts(made[name]) == _parts(wanted[name])


def _parts(sql: str) -> list[str]:
    """Constraints may come in any order."""
    return sorted(part.strip(" ()") for part in sql.split(","))


def test_alembic_finds_no_difference(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_the_newest_migration_is_the_one_that_the_code_names() -> None:
    assert ScriptDirectory.from_config(migrate.alembic_config()).get_heads() == [schema.REVISION]


def test_every_view_can_be_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for view in schema.VIEWS:
            assert connection.execute(f"SELECT * FROM {view}").fetchall() == []


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to write one more migration into, as a later Poseidon would have it."""
    folder = tmp_path / "migrations 100%"
    (folder / "versions").mkdir(parents=True)
    ours = migrate.migrations_folder()
    for file in (ours / "env.py", *(ours / "versions").glob("*.py")):
        (folder / file.relative_to(ours)).write_text(file.read_text())
    monkeypatch.setattr(migrate, "migrations_folder", lambda: folder)
    monkeypatch.setattr(upgrade, "REVISION", "next")
    return folder / "versions" / "next.py"


def copies(path: Path) -> list[Path]:
    return list(path.parent.glob("*.backup"))


async def test_an_upgrade_keeps_the_data_and_a_copy_of_the_old_file(path: Path, following: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO meta VALUES ('mine', '1')")
    following.write_text(NEXT.format(then=""))
    async with open_store(path) as store:
        assert await store.read(lambda c: c.exec_driver_sql("SELECT colour FROM jobs").all()) == []
        assert (
            await store.read(lambda c: c.exec_driver_sql("SELECT value FROM meta WHERE key = 'mine'").scalar()) == "1"
        )
    (copy,) = copies(path)
    assert re.fullmatch(rf"poseidon\.db\.{schema.REVISION}\.\d{{8}}T\d{{6}}Z\.backup", copy.name)
    assert copy.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(copy)) as old:
        assert upgrade.read_revision(old, copy) == schema.REVISION
        assert old.execute("SELECT value FROM meta WHERE key = 'mine'").fetchone() == ("1",)
    async with open_store(path):
        assert copies(path) == [copy]


async def test_an_upgrade_that_fails_changes_nothing(path: Path, following: Path) -> None:
    before = objects(path)
    following.write_text(NEXT.format(then="raise RuntimeError('half way')"))
    with pytest.raises(RuntimeError, match="half way"):
        async with open_store(path):
            pass
    assert objects(path) == before
    following.write_text(NEXT.format(then=""))
    async with open_store(path):
        pass


async def test_an_upgrade_that_would_break_references_is_refused(path: Path, following: Path) -> None:
    orphan = "op.execute(\"INSERT INTO intents VALUES ('nobody', 'stop', 'now', NULL)\")"
    following.write_text(NEXT.format(then=orphan))
    with pytest.raises(StoreError, match="1 rows"):
        async with open_store(path):
            pass
    with closing(sqlite3.connect(path)) as connection:
        assert upgrade.read_revision(connection, path) == schema.REVISION


async def test_a_new_database_needs_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "poseidon.db"
    async with open_store(path):
        assert copies(path) == []


def test_missing_migrations_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "PACKAGE", tmp_path / "poseidon")
    with pytest.raises(StoreError, match="migrations are missing"):
        migrate.migrations_folder()

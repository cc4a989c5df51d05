"""The migrations, run by Alembic. Imported only when a schema has to change, for it is slow."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine
from sqlalchemy.pool import NullPool

from poseidon.errors import StoreCorrupt, StoreError
from poseidon.store.connect import begin_with, raw_connection

PACKAGE = Path(__file__).parent.parent


def migrate(path: Path) -> None:
    """Take *path* to the newest schema, in one transaction: it is the old one or the new one, never between."""
    engine = create_engine("sqlite://", creator=lambda: raw_connection(path), poolclass=NullPool)
    begin_with(engine, "BEGIN IMMEDIATE")
    with engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
        if broken := connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall():
            raise StoreCorrupt(f"the migration of {path} would leave {len(broken)} rows without what they refer to")


def known_revisions() -> set[str]:
    """Of all migrations that this program has."""
    scripts = ScriptDirectory.from_config(alembic_config())
    return {script.revision for script in scripts.walk_revisions()}


def alembic_config(connection: Connection | None = None) -> Config:
    """What an alembic.ini would say."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def migrations_folder() -> Path:
    """Inside the installed package, or beside it in a checkout."""
    for folder in (PACKAGE / "migrations", PACKAGE.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise StoreError(f"the migrations are missing: neither in {PACKAGE} nor beside it")

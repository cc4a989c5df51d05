"""Brings a database file to the schema of this program: looks at its revision, migrates it, refuses what isn't ours.

Everything here blocks, and supposes that the caller holds the database's lock.
"""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from poseidon.errors import StoreCorrupt, StoreTooNew
from poseidon.store.connect import create_private, raw_connection
from poseidon.store.faults import store_errors
from poseidon.store.schema import REVISION

HEADER = 100
"""Bytes of SQLite's file header."""
QUICK = 64 * 1024 * 1024
"""Bytes that are checked in a moment; a larger file isn't worth the wait after each crash."""


def upgrade(path: Path) -> Path | None:
    """Make *path* a database of this program's schema. Returns the copy that was kept, if one was needed."""
    with store_errors(path):
        create_private(path)
        found = current_revision(path)
        if found == REVISION:
            return None
        from poseidon.store import migrate  # costs more than all the rest of a start

        if found is not None and found not in migrate.known_revisions():
            raise StoreTooNew(
                f"the database {path} was made by a newer Poseidon: "
                f"it has the schema {found!r}, this one knows up to {REVISION!r}"
            )
        copy = _keep_copy(path, found) if found is not None else None
        migrate.migrate(path)
        return copy


def current_revision(path: Path) -> str | None:
    """The schema's revision, None for an empty database. Raises StoreCorrupt for what isn't a sound one of ours."""
    suspicious = _is_suspicious(path)
    with closing(raw_connection(path)) as connection:
        if suspicious:
            _check_quickly(connection, path)
        return read_revision(connection, path)


def read_revision(connection: sqlite3.Connection, path: Path) -> str | None:
    """As `current_revision`, without a check of the pages."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if "alembic_version" not in tables:
        raise StoreCorrupt(f"{path} is a database, but not one of Poseidon's")
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if row is None:
        raise StoreCorrupt(f"the database {path} doesn't tell its schema's revision")
    return str(row[0])


def _is_suspicious(path: Path) -> bool:
    """Not closed properly and small, or of another size than its header says: worth a check that reads all of it."""
    size = path.stat().st_size
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        return size <= QUICK
    with path.open("rb") as file:
        header = file.read(HEADER)
    page_size = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    return pages * (65536 if page_size == 1 else page_size) != size


def _check_quickly(connection: sqlite3.Connection, path: Path) -> None:
    (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if answer != "ok":
        raise StoreCorrupt(f"the database {path} is damaged: {' '.join(str(answer).split())}")


def _keep_copy(path: Path, revision: str) -> Path:
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    copy = path.with_name(f"{path.name}.{revision}.{moment}.backup")
    create_private(copy)
    with closing(raw_connection(path, read_only=True)) as source, closing(raw_connection(copy)) as target:
        source.backup(target)
    return copy

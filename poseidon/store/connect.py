"""Connections to the database file: one that writes, some that only read."""

import os
import sqlite3
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool, QueuePool

Synchronous = Literal["FULL", "NORMAL"]

BUSY_TIMEOUT_MS = 1000
"""SQLite waits so long for others' locks by itself; the writer then asks again, so that it can be stopped."""
JOURNAL_LIMIT = 64 * 1024 * 1024
"""A long reader lets the write-ahead log grow; it is cut back to this afterwards."""
READERS = 4


def create_private(path: Path) -> None:
    """Make an empty file that only its owner reads (SQLite gives -wal and -shm the same mode)."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def raw_connection(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A driver's connection without its own ideas of transactions."""
    mode = "ro" if read_only else "rw"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def writing_connection(path: Path, synchronous: Synchronous) -> Connection:
    """The connection for the writer; each of its transactions takes the write lock at the beginning."""

    def connect() -> sqlite3.Connection:
        connection = raw_connection(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT}")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    begin_with(engine, "BEGIN IMMEDIATE")
    return engine.connect()


def reading_engine(path: Path) -> Engine:
    """Connections that see one consistent state a transaction, and can't write."""
    engine = create_engine(
        "sqlite://",
        creator=lambda: raw_connection(path, read_only=True),
        poolclass=QueuePool,
        pool_size=READERS,
        max_overflow=0,
    )
    begin_with(engine, "BEGIN")
    return engine


def begin_with(engine: Engine, statement: str) -> None:
    """Begin transactions by *statement*; the driver itself would begin too late."""

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> Any:
        connection.exec_driver_sql(statement)

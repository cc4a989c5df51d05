"""Copies and checks of a database, whether a daemon works on it or not. Blocking; meant for the command line."""

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import StoreError
from poseidon.store.connect import create_private, raw_connection
from poseidon.store.faults import store_errors
from poseidon.store.upgrade import read_revision

MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Check:
    """What a check found."""

    revision: str | None
    """Of the schema; None: an empty database."""
    problems: tuple[str, ...]


def backup(path: Path, target: Path) -> None:
    """Copy the database as it is at this moment to *target*, which must not exist; it appears when it is complete."""
    _must_exist(path)
    if target.exists():
        raise StoreError(f"{target} exists already")
    unfinished = target.with_name(f"{target.name}.unfinished")
    with store_errors(target):
        unfinished.unlink(missing_ok=True)
        create_private(unfinished)
        try:
            _copy(path, unfinished)
            os.link(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)


def _copy(path: Path, target: Path) -> None:
    with closing(raw_connection(path, read_only=True)) as source, closing(raw_connection(target)) as copy:
        source.backup(copy)  # at once: it blocks nobody, while one in portions begins again with each foreign commit
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without -wal and -shm
    with target.open("rb") as file:
        os.fsync(file.fileno())


def check(path: Path) -> Check:
    """Read everything and look for damage. Raises StoreCorrupt if it can't even be read, or isn't ours."""
    _must_exist(path)
    with store_errors(path), closing(raw_connection(path, read_only=True)) as connection:
        revision = read_revision(connection, path)
        return Check(revision, (*_damage(connection), *_orphans(connection)))


def _damage(connection: sqlite3.Connection) -> list[str]:
    answers = connection.execute(f"PRAGMA integrity_check({MOST_PROBLEMS})").fetchall()
    return [" ".join(str(answer).split()) for (answer,) in answers if answer != "ok"]


def _orphans(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("PRAGMA foreign_key_check").fetchmany(MOST_PROBLEMS)
    return [f"row {row} of {table} refers to {parent}, where it isn't" for table, row, parent, _ in rows]


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise StoreError(f"there is no database {path}")

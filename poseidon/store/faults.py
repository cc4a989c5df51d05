"""SQLite's errors as ours, told apart by whose fault they are: the machine's, or our own."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from poseidon.errors import StoreCorrupt, StoreError

DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
UNAVAILABLE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
}


def result_code(error: BaseException) -> int | None:
    """SQLite's primary result code, None if *error* didn't come from it."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(origin, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def is_busy(error: BaseException) -> bool:
    """Another connection holds the lock."""
    return result_code(error) == sqlite3.SQLITE_BUSY


def translate(error: BaseException, path: Path) -> StoreError | None:
    """The StoreError that *error* means, None if it is no fault of disk or file, but a bug or a rule broken."""
    if isinstance(error, StoreError):
        return error
    code = result_code(error)
    said = error.orig if isinstance(error, DBAPIError) else error
    if code in DAMAGED:
        return StoreCorrupt(f"the database {path} is damaged: {said}")
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(f"the database {path} is locked by another program")
    if code in UNAVAILABLE:
        return StoreError(f"the database {path} can't be used: {said}")
    if isinstance(error, OSError):
        return StoreError(f"{error.filename or path}: {error.strerror or error}")
    return None


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Translate what SQLite and the file system say about *path*."""
    try:
        yield
    except (DBAPIError, sqlite3.Error, OSError) as error:
        if (translated := translate(error, path)) is None:
            raise
        raise translated from error

"""SQL that is compiled once and then run at the driver's level."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Table, literal_column
from sqlalchemy.dialects import sqlite

Row = Mapping[str, Any]
E = TypeVar("E")


def upsert(table: Table, *, once: Collection[str] = (), special: Mapping[str, str] | None = None) -> str:
    """SQL that inserts a row or makes the old one equal to it.

    Columns named in *once* keep their first value; *special* has expressions for those that aren't simply taken over.
    The text is made at import: the statements are on the path of every claim, and SQLAlchemy would take longer to find
    the compiled form again than SQLite to carry it out.
    """
    insert = sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    updates: dict[str, ColumnElement[Any]] = {
        column.name: insert.excluded[column.name]
        for column in table.columns
        if column.name not in keys and column.name not in once
    }
    updates |= {name: literal_column(expression) for name, expression in (special or {}).items()}
    statement = insert.on_conflict_do_update(index_elements=keys, set_=updates)
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="named")))


def run(connection: Connection, statement: str, rows: Sequence[Row]) -> None:
    """Run *statement* for each of *rows*."""
    if rows:
        connection.exec_driver_sql(statement, [dict(row) for row in rows])


def select(connection: Connection, statement: str, parameters: Row | None = None) -> list[Row]:
    """All rows of a query."""
    return [*connection.exec_driver_sql(statement, dict(parameters or {})).mappings()]


def newest(values: Iterable[E], key: Callable[[E], object]) -> list[E]:
    """Of several values of the same thing the last, for they come in order."""
    return list({key(value): value for value in values}.values())

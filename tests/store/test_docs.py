"""docs/sql.md tells of every table, view and column, and its queries work."""

import re
from pathlib import Path

import pytest
from sqlalchemy import Connection

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
QUERIES = [
    query.strip()
    for block in re.findall(r"```sql\n(.*?)```", PAGE, re.S)
    for query in block.split(";")
    if query.strip()
]


def told() -> dict[str, list[str]]:
    """The columns of each table and view, by the page."""
    sections = re.split(r"^### (\w+)\n", PAGE, flags=re.M)[1:]
    return {
        name: [column for column in re.findall(r"^\| (\w+) \|", text, re.M) if column != "column"]
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


def test_the_page_tells_of_every_column(connection: Connection) -> None:
    names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").scalars().all()
    there = {
        name: list(connection.exec_driver_sql(f"SELECT name FROM pragma_table_info('{name}')").scalars())
        for name in names
        if name != "alembic_version"
    }
    assert told() == there


@pytest.mark.parametrize("query", QUERIES)
def test_the_queries_of_the_page_work(connection: Connection, query: str) -> None:
    connection.exec_driver_sql(query).fetchall()


def test_there_are_queries() -> None:
    assert len(QUERIES) > 8

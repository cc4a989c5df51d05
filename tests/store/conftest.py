"""A store on a real file, and a connection on one for what needs no thread."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
from sqlalchemy import Connection
from structlog.testing import capture_logs
from structlog.types import EventDict

from poseidon.store.connect import writing_connection
from poseidon.store.environments import save_environment
from poseidon.store.store import Store, open_store
from poseidon.store.upgrade import upgrade
from tests.store.values import NOW, environment


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An empty database, by the real migrations."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    upgrade(path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, template: bytes) -> Path:
    """Where a fresh database is."""
    path = tmp_path / "state" / "poseidon.db"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(template)
    return path


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    """An open one that must be closed within seconds."""
    with trio.fail_after(60):
        async with open_store(path) as store:
            yield store
    assert not store.failed.is_set()


@pytest.fixture
def connection(path: Path) -> Iterator[Connection]:
    """A transaction on a database that knows environment 29."""
    connection = writing_connection(path, "NORMAL")
    with connection.begin():
        save_environment(connection, environment(), NOW)
    with connection, connection.begin():
        yield connection


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[EventDict]]:
    """What was logged; printing tracebacks for people would take most of the time."""
    with capture_logs() as entries:
        yield entries

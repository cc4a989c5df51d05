"""A copy can be taken at any time, and a check finds what is broken."""

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import trio

from poseidon.core.model import EnvironmentId
from poseidon.errors import StoreCorrupt, StoreError
from poseidon.store.backup import backup, check
from poseidon.store.environments import load_environments, save_environment
from poseidon.store.schema import REVISION
from poseidon.store.store import Store, open_store
from tests.store.values import NOW, environment


async def test_a_copy_of_a_busy_database_is_a_whole_one(store: Store, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"

    async def write() -> None:
        for number in range(100_000):
            await store.write(partial(save_environment, environment=environment(number), at=NOW))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while not await store.read(load_environments):
            await trio.sleep(0.01)
        await trio.to_thread.run_sync(backup, path, target)
        nursery.cancel_scope.cancel()
    assert [file.name for file in tmp_path.glob("copy*")] == ["copy.db"]
    assert target.stat().st_mode & 0o777 == 0o600
    assert check(target).problems == ()
    async with open_store(target) as copy:
        assert (await copy.read(load_environments))[0].id == EnvironmentId(0)
        assert copy.instance == store.instance


def test_a_copy_overwrites_nothing(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    target.write_text("precious")
    with pytest.raises(StoreError, match="exists already"):
        backup(path, target)
    assert target.read_text() == "precious"


def test_a_copy_to_nowhere_is_told(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        backup(path, tmp_path / "nowhere" / "copy.db")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    for ask in (check, lambda path: backup(path, tmp_path / "copy.db")):
        with pytest.raises(StoreError, match="there is no database"):
            ask(tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_a_sound_database_has_no_problems(path: Path) -> None:
    found = check(path)
    assert (found.revision, found.problems) == (REVISION, ())


def test_a_check_finds_rows_whose_relations_are_missing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("INSERT INTO intents VALUES ('nobody', 'stop', 'now', NULL)")
    (problem,) = check(path).problems
    assert "intents" in problem
    assert "jobs" in problem


def test_a_check_finds_damaged_pages(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        (page,) = other.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_jobs_living'").fetchone()
    pages = bytearray(path.read_bytes())
    pages[(page - 1) * 4096 + 50 : page * 4096] = b"\x01" * (4096 - 50)
    pages[(page - 1) * 4096 + 3 : (page - 1) * 4096 + 5] = b"\x00\x05"
    path.write_bytes(pages)
    assert check(path).problems


def test_a_check_of_no_database_is_told(path: Path) -> None:
    path.write_text("once upon a time " * 1000)
    with pytest.raises(StoreCorrupt, match="not a database"):
        check(path)

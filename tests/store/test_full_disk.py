"""No room: whoever waits is told, nothing acknowledged or made in memory is lost, and it goes on when there is room."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from sqlalchemy import Connection
from structlog.types import EventDict

from poseidon.core.model import Changes, RunnerId
from poseidon.errors import StoreError
from poseidon.store import writer
from poseidon.store.backup import check
from poseidon.store.queries import save_changes
from poseidon.store.retention import Ages, keep_house
from poseidon.store.store import Store, open_store
from tests.store.values import NOW, transition

PAGE = 4096
BIG = "x" * 20 * PAGE


def put(connection: Connection, key: str, value: str = "") -> None:
    connection.exec_driver_sql("INSERT INTO meta VALUES (?, ?)", (key, value))


def keys(connection: Connection) -> list[str]:
    return list(connection.exec_driver_sql("SELECT key FROM meta WHERE key <> 'instance'").scalars())


def limit(connection: Connection, pages: int) -> None:
    connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")


@pytest.fixture
async def full(path: Path) -> AsyncIterator[Store]:
    """A store that may not grow."""
    with trio.fail_after(30):
        async with open_store(path) as store:
            await store.write(partial(limit, pages=1))
            yield store


def make_room(store: Store) -> None:
    """As somebody would from outside, beside the writer: its queue is stuck."""
    store._writer._connection.connection.execute("PRAGMA max_page_count = 1000000")


async def test_a_write_that_finds_no_room_is_refused_and_forgotten(full: Store) -> None:
    with pytest.raises(StoreError, match="full"):
        await full.write(partial(put, key="big", value=BIG))
    await full.write(partial(put, key="small"))
    assert await full.read(keys) == ["small"]
    assert full.status().queue_depth == 0


async def test_a_change_that_finds_no_room_is_refused_but_kept(full: Store) -> None:
    first = full.submit(partial(put, key="big", value=BIG))
    with pytest.raises(StoreError, match="full"):
        await first.wait()
    with pytest.raises(StoreError, match="full"):
        await first.wait()
    status = full.status()
    assert status.queue_depth == 1
    assert status.problem is not None
    assert "full" in status.problem
    make_room(full)
    await full.flush()
    await first.wait()
    assert await full.read(keys) == ["big"]
    assert full.status().problem is None
    assert full.status().queue_depth == 0
    with trio.fail_after(1):  # nothing is left of the pauses between attempts
        for number in range(30):
            await full.write(partial(put, key=f"{number}"))


async def test_nobody_waits_behind_a_change_that_finds_no_room(full: Store, logged: list[EventDict]) -> None:
    full.submit(partial(put, key="big", value=BIG))
    after = full.submit(lambda connection: put(connection, "after", " ".join(keys(connection))))
    with trio.fail_after(30):
        with pytest.raises(StoreError, match="full"):
            await full.write(partial(put, key="given up"))
        with pytest.raises(StoreError, match="full"):
            await after.wait()
        with pytest.raises(StoreError, match="full"):
            await full.flush()
    make_room(full)
    await full.flush()
    assert await full.read(lambda c: c.exec_driver_sql("SELECT value FROM meta WHERE key = 'after'").scalar()) == "big"
    assert sorted(await full.read(keys)) == ["after", "big"]
    assert [entry["event"] for entry in logged] == ["writing refused", "writing resumed"]
    assert not full.failed.is_set()


async def test_closing_tells_what_could_not_be_saved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOSING_PATIENCE", 0.2)
    with trio.fail_after(30), pytest.raises(StoreError, match="could not be saved: 2"):  # noqa: PT012
        async with open_store(path) as store:
            await store.write(partial(limit, pages=1))
            store.submit(partial(put, key="big", value=BIG))
            store.submit(partial(put, key="after"))


async def test_pruning_goes_on_when_there_is_room_again(full: Store, logged: list[EventDict]) -> None:
    await full.write(
        partial(save_changes, executor="local", changes=Changes(transitions=(transition(RunnerId("1-a")),)), at=NOW)
    )
    full.submit(partial(put, key="big", value=BIG))
    ages = Ages(runners=1, executions=1, transitions=1)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(keep_house, full, ages, lambda: NOW + 100, interval=0.01))
            while "old records not pruned" not in [entry["event"] for entry in logged]:
                await trio.sleep(0.005)
            make_room(full)
            while "old records pruned" not in [entry["event"] for entry in logged]:
                await trio.sleep(0.005)
            nursery.cancel_scope.cancel()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount here")
    try:
        yield folder
    finally:
        left = subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode
        if left:  # something still has files open there: no reason to leave a mount behind as well
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        assert not left


async def test_a_disk_that_fills_up_and_is_emptied_loses_nothing_acknowledged(small_disk: Path) -> None:
    path = small_disk / "poseidon.db"
    acknowledged: list[str] = []
    with trio.fail_after(60):
        async with open_store(path) as store:
            ballast = small_disk / "ballast"
            ballast.write_bytes(bytes(700_000))
            with pytest.raises(StoreError, match="full"):  # noqa: PT012
                for number in range(1000):
                    await store.write(partial(put, key=f"{number}", value="x" * 10_000))
                    acknowledged.append(f"{number}")
            kept = [store.submit(partial(put, key=f"kept {number}", value="x" * 10_000)) for number in range(5)]
            with pytest.raises(StoreError, match="full"):
                await kept[-1].wait()
            assert set(await store.read(keys)).issuperset(acknowledged)
            ballast.unlink()
            await store.flush()
            await store.write(partial(put, key="later"))
        assert acknowledged
        async with open_store(path) as store:
            found = await store.read(keys)
    assert sorted(found) == sorted([*acknowledged, *(f"kept {number}" for number in range(5)), "later"])
    assert check(path).problems == ()


async def test_a_full_disk_at_the_start_is_told(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(2 * 1024 * 1024 - 3 * PAGE))
    with trio.fail_after(30), pytest.raises(StoreError, match=r"full|space"):
        async with open_store(small_disk / "poseidon.db"):
            pass
    (small_disk / "ballast").unlink()
    async with open_store(small_disk / "poseidon.db"):
        pass

"""Writes are grouped, durable, in order and fail alone; others may look at the file at any time."""

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, ProgrammingError

from poseidon.core.model import EnvironmentId
from poseidon.errors import EnvironmentNotFound, StoreError
from poseidon.store import connect, writer
from poseidon.store.environments import load_environments, save_environment
from poseidon.store.records import load_records, save_changes
from poseidon.store.store import Store, open_store
from tests.store.values import NOW, environment, life

SLOW = 0.5


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own waiting for locks, between whose ends the writer looks round."""
    monkeypatch.setattr(connect, "BUSY_TIMEOUT_MS", 50)


def put(key: str, value: str = "") -> Callable[[Connection], None]:
    def work(connection: Connection) -> None:
        connection.exec_driver_sql("INSERT INTO meta VALUES (?, ?)", (key, value))

    return work


def saved(path: Path) -> list[str]:
    """As another process would see it."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as other:
        return [key for (key,) in other.execute("SELECT key FROM meta WHERE key <> 'instance' ORDER BY key")]


def commits(path: Path) -> int:
    """Frames in the write-ahead log that end a transaction."""
    log = Path(f"{path}-wal").read_bytes()[32:]
    return sum(log[at + 4 : at + 8] != bytes(4) for at in range(0, len(log), 4096 + 24))


@contextmanager
def held_up(store: Store) -> Iterator[None]:
    """The writer waits inside, so that works gather."""
    go_on = threading.Event()
    store.submit(lambda _: go_on.wait(10) and None)
    try:
        yield
    finally:
        go_on.set()


async def test_a_write_is_durable_when_it_returns(store: Store, path: Path) -> None:
    await store.write(put("one"))
    assert saved(path) == ["one"]


async def test_what_a_work_returns_is_handed_back(store: Store) -> None:
    assert await store.write(lambda connection: connection.exec_driver_sql("SELECT 6 * 7").scalar_one()) == 42
    assert await store.read(lambda connection: connection.exec_driver_sql("SELECT 6 * 7").scalar_one()) == 42


async def test_fifty_tasks_share_their_commits(store: Store, path: Path) -> None:
    async def claim(number: int) -> None:
        await store.write(put(f"{number:02}"))
        assert f"{number:02}" in saved(path)

    before = commits(path)
    async with trio.open_nursery() as nursery:
        with held_up(store):
            for number in range(50):
                nursery.start_soon(claim, number)
            await trio.testing.wait_all_tasks_blocked()
    assert len(saved(path)) == 50
    assert commits(path) - before <= 2


async def test_works_are_done_in_the_order_in_which_they_came(store: Store) -> None:
    done: list[int] = []
    for number in range(2500):
        store.submit(partial(lambda _, number: done.append(number), number=number))
    await store.flush()
    assert done == sorted(done)
    assert len(done) == 2500


async def test_flush_waits_for_all_that_was_submitted(store: Store, path: Path) -> None:
    for number in range(20):
        store.submit(put(f"{number:02}"))
    await store.flush()
    assert len(saved(path)) == 20


async def test_a_bad_work_fails_alone(store: Store, path: Path) -> None:
    await store.write(put("taken"))
    with held_up(store):
        good, bad, better = store.submit(put("good")), store.submit(put("taken")), store.submit(put("later"))
    with pytest.raises(IntegrityError):
        await bad.wait()
    await good.wait()
    await better.wait()
    assert saved(path) == ["good", "later", "taken"]


async def test_a_bad_work_leaves_nothing_of_itself(store: Store, path: Path) -> None:
    def half(connection: Connection) -> None:
        put("half")(connection)
        raise EnvironmentNotFound("no such environment")

    with pytest.raises(EnvironmentNotFound):
        await store.write(half)
    assert saved(path) == []


async def test_a_change_that_fails_unheard_makes_the_store_fail(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(put("taken"))
        store.submit(put("taken"))
        with trio.fail_after(30):
            with pytest.raises(IntegrityError):
                await store.raise_failure()
        await store.write(put("later"))
    assert saved(path) == ["later", "taken"]


async def test_a_refusal_whose_caller_has_left_harms_nobody(store: Store) -> None:
    def refuse(_: Connection) -> None:
        raise EnvironmentNotFound("no such environment")

    with held_up(store), trio.move_on_after(0.01):
        await store.write(refuse)
    await store.flush()
    assert not store.failed.is_set()


async def test_a_caller_may_leave_but_its_write_goes_on(store: Store, path: Path) -> None:
    with held_up(store), trio.move_on_after(0.01) as scope:
        await store.write(put("left"))
    assert scope.cancelled_caught
    await store.flush()
    assert saved(path) == ["left"]


async def test_several_may_wait_for_one_ticket(store: Store) -> None:
    with held_up(store):
        ticket = store.submit(lambda _: "done")
    heard: list[str] = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(lambda: _append(heard, ticket.wait))
    assert heard == ["done"] * 3
    assert await ticket.wait() == "done"


async def _append(heard: list[str], wait: Callable[[], object]) -> None:
    heard.append(await wait())  # type: ignore[misc]


async def test_closing_saves_what_is_still_queued(path: Path) -> None:
    async with open_store(path) as store:
        for number in range(100):
            store.submit(put(f"{number:02}"))
    assert len(saved(path)) == 100
    assert store.closed


async def test_closing_saves_when_the_body_is_cancelled(path: Path) -> None:
    with trio.CancelScope() as scope:
        async with open_store(path) as store:
            store.submit(put("one"))
            scope.cancel()
            await trio.sleep_forever()
    assert saved(path) == ["one"]


async def test_a_closed_store_says_so(path: Path) -> None:
    async with open_store(path) as store:
        pass
    with pytest.raises(StoreError, match="closed"):
        store.submit(put("late"))
    with pytest.raises(StoreError, match="closed"):
        await store.read(load_environments)


async def test_closing_leaves_one_file_and_no_thread(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(put("one"))
    assert sorted(file.name for file in path.parent.iterdir()) == ["poseidon.db", "poseidon.db.lock"]
    deadline = time.monotonic() + 5
    while any(thread.name == "store" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await trio.sleep(0.01)


async def test_a_crash_of_the_writer_is_told_to_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trio.fail_after(30), pytest.raises(StoreError, match="changes that could not be saved: 1"):  # noqa: PT012
        async with open_store(path) as store:
            await store.write(put("one"))
            monkeypatch.setattr(store._writer, "_attempt", None)
            ticket = store.submit(put("two"))
            with pytest.raises(StoreError, match="closed before"):
                await ticket.wait()
            with pytest.raises(TypeError):
                await store.raise_failure()


async def test_readers_see_one_consistent_state_and_cannot_write(store: Store) -> None:
    def twice(connection: Connection) -> tuple[int, int]:
        count = partial(connection.exec_driver_sql, "SELECT count(*) FROM meta")
        before = count().scalar_one()
        trio.from_thread.run(store.write, put("between"))
        return before, count().scalar_one()

    before, after = await store.read(twice)
    assert before == after
    with pytest.raises(StoreError, match="readonly"):
        await store.read(put("not me"))


async def test_a_reader_does_not_hold_up_the_writer(store: Store) -> None:
    release = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(store.read, lambda connection: (load_environments(connection), release.wait(10)))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(30):
            await store.write(put("one"))
        release.set()


async def test_the_sqlite3_program_reads_on_while_the_daemon_writes(store: Store, path: Path) -> None:
    command = ["sqlite3", "-batch", str(path)]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdin is not None
    assert shell.stdout is not None
    with shell:
        shell.stdin.write("BEGIN; SELECT count(*) FROM runner_overview;\n")
        shell.stdin.flush()
        assert await trio.to_thread.run_sync(shell.stdout.readline) == "0\n"  # it holds a read transaction from now on
        slowest = 0.0
        for number in range(300):
            began = trio.current_time()
            await store.write(put(f"{number}"))
            slowest = max(slowest, trio.current_time() - began)
        output, _ = await trio.to_thread.run_sync(
            partial(shell.communicate, "SELECT count(*) FROM meta; COMMIT; SELECT count(*) FROM meta;\n")
        )
    assert output == "1\n301\n"
    assert slowest < SLOW


HOLDER = """
import sqlite3, sys, time
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
other.execute("ROLLBACK")
other.close()
"""


@contextmanager
def locked_by_another(path: Path) -> Iterator[Callable[[], None]]:
    """Another process holds the write lock until the yielded function is called."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        yield partial(other.communicate, b"\n")  # type: ignore[misc]


async def test_anothers_lock_only_delays_writes(store: Store, path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.sleep(0.01)
            ticks += 1

    with locked_by_another(path) as release:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            tickets = [store.submit(put(f"{number}")) for number in range(10)]
            await trio.sleep(0.3)
            assert store.status().problem == f"the database {path} is locked by another program"
            assert store.status().queue_depth == 10
            assert saved(path) == []
            await store.read(load_environments)
            release()
            for ticket in tickets:
                await ticket.wait()
            nursery.cancel_scope.cancel()
    assert ticks > 15
    assert store.status().problem is None
    assert len(saved(path)) == 10


async def test_a_lock_held_for_too_long_is_told_and_outlived(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BUSY_PATIENCE", 0.1)
    with locked_by_another(path) as release:
        kept = store.submit(put("kept"))
        with pytest.raises(StoreError, match="locked by another program"):
            await store.write(put("given up"))
        with pytest.raises(StoreError, match="locked by another program"):
            await kept.wait()
        release()
        await store.flush()
        await kept.wait()
    assert saved(path) == ["kept"]


async def test_closing_does_not_wait_for_ever_for_anothers_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOSING_PATIENCE", 0.1)
    async with open_store(path):
        pass
    with locked_by_another(path) as release:
        with trio.fail_after(30), pytest.raises(StoreError, match="changes that could not be saved: 1"):
            async with open_store(path) as store:
                ticket = store.submit(put("lost"))
        with pytest.raises(StoreError, match="closed before"):
            await ticket.wait()
        release()


async def test_only_locks_are_waited_for(path: Path) -> None:
    async with open_store(path) as store:
        driver = store._writer._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.close()
        with trio.fail_after(30), pytest.raises(ProgrammingError, match="closed database"):
            await store.write(put("one"))


async def test_it_can_be_opened_while_another_holds_the_write_lock(path: Path) -> None:
    async with open_store(path) as store:
        instance = store.instance
    with locked_by_another(path) as release:
        async with open_store(path) as store:
            assert store.instance == instance
        release()


async def test_the_instance_is_made_once(path: Path) -> None:
    async with open_store(path) as store:
        instance = store.instance
    assert len(instance) == 12
    assert int(instance, 16)
    async with open_store(path) as store:
        assert store.instance == instance


async def test_the_numbers_tell_how_it_is_doing(store: Store) -> None:
    await store.write(put("one"))
    status = store.status()
    assert status.queue_depth == 0
    assert 0 < status.last_commit_ms < 1000
    assert status.wal_bytes > 0
    assert status.problem is None
    with held_up(store):
        store.submit(put("two"))
        assert store.status().queue_depth == 2


async def test_records_and_position_of_a_change_are_saved_together(store: Store) -> None:
    await store.write(partial(save_environment, environment=environment(), at=NOW))
    await store.write(partial(save_changes, executor="local", changes=life().changes, at=NOW))
    assert len((await store.read(partial(load_records, executor="local"))).runners) == 1
    assert [one.id for one in await store.read(load_environments)] == [EnvironmentId(29)]

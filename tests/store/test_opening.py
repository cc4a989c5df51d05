"""A database is opened if it is sound, ours, and nobody else's; everything else is refused in plain words."""

import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import trio

from poseidon.errors import StoreCorrupt, StoreError, StoreLocked, StoreTooNew
from poseidon.store import writer
from poseidon.store.environments import save_environment
from poseidon.store.records import load_records
from poseidon.store.store import open_store
from tests.store.processes import ENVIRONMENT, python
from tests.store.values import NOW, environment


async def check(path: Path, error: type[StoreError], *words: str) -> None:
    """Opening *path* is refused with a message that has all *words*, in one line."""
    with trio.fail_after(30):
        with pytest.raises(error) as caught:
            async with open_store(path):
                pass
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message


async def test_folders_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "poseidon.db"
    async with open_store(path):
        assert path.parent.stat().st_mode & 0o777 == 0o700
        for file in path.parent.iterdir():
            assert file.stat().st_mode & 0o777 == 0o600


async def test_a_second_one_is_refused_and_told_who_holds_it(path: Path) -> None:
    async with open_store(path):
        await check(path, StoreLocked, str(path), f"process {os.getpid()}")
    async with open_store(path):
        pass


async def test_the_lock_ends_with_its_process(path: Path) -> None:
    script = (
        "import sys, time, trio\nfrom pathlib import Path\nfrom poseidon.store.store import open_store\n"
        "async def main():\n"
        "    async with open_store(Path(sys.argv[1])):\n"
        "        print('open', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    with subprocess.Popen(python(script, path), env=ENVIRONMENT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        await check(path, StoreLocked, f"process {other.pid}")
        other.kill()
    async with open_store(path):
        pass


async def test_the_lock_is_not_inherited_by_what_is_started_meanwhile(path: Path) -> None:
    async with open_store(path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        async with open_store(path):
            pass
    finally:
        child.kill()
        child.wait()


async def test_a_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    before = path.read_bytes()
    await check(path, StoreTooNew, str(path), "newer", "'9999'")
    assert path.read_bytes() == before


async def test_a_text_file_is_no_database(path: Path) -> None:
    path.write_text("once upon a time " * 1000)
    await check(path, StoreCorrupt, str(path), "not a database")


async def test_a_database_of_others_is_refused_and_left_alone(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE bookmarks (url)")
    before = path.read_bytes()
    await check(path, StoreCorrupt, str(path), "not one of Poseidon's")
    assert path.read_bytes() == before


async def test_a_database_without_a_revision_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DELETE FROM alembic_version")
    await check(path, StoreCorrupt, str(path), "revision")


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _lose_a_page(content: bytes) -> bytes:
    return content[:-4096]


def _scramble_the_schema(content: bytes) -> bytes:
    return content[:100] + bytes(4000) + content[4100:]


@pytest.mark.parametrize("damage", [_cut, _lose_a_page, _scramble_the_schema])
async def test_a_damaged_file_is_refused(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(damage(path.read_bytes()))
    await check(path, StoreCorrupt, str(path), "damaged")


async def test_after_a_crash_all_pages_are_looked_at(path: Path, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed.db"
    async with open_store(path):
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{crashed}{suffix}")
    sound = tmp_path / "sound.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{crashed}{suffix}", f"{sound}{suffix}")
    async with open_store(sound):
        pass
    _damage(crashed, "%jobs%")
    await check(crashed, StoreCorrupt, str(crashed), "damaged")


async def test_of_a_file_with_an_odd_size_all_pages_are_looked_at(path: Path) -> None:
    _damage(path, "%jobs%")
    with path.open("ab") as file:
        file.write(bytes(4096))
    await check(path, StoreCorrupt, str(path), "damaged")


async def test_damage_that_shows_only_later_is_told_by_the_query(path: Path) -> None:
    _damage(path, "%jobs%")
    async with open_store(path) as store:
        with pytest.raises(StoreCorrupt, match="damaged"):
            await store.read(lambda connection: load_records(connection, "local"))


async def test_damage_that_shows_only_in_a_write_makes_the_store_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSING_PATIENCE", 0.1)
    _damage(path, "%environments%")
    with trio.fail_after(30), pytest.raises(StoreError, match="could not be saved: 1"):  # noqa: PT012
        async with open_store(path) as store:
            store.submit(partial(save_environment, environment=environment(), at=NOW))
            with pytest.raises(StoreCorrupt, match="damaged"):
                await store.raise_failure()


def _damage(path: Path, like: str) -> None:
    pages = bytearray(path.read_bytes())
    for root in _root_pages(path, like):
        pages[(root - 1) * 4096 : (root - 1) * 4096 + 100] = b"\xff" * 100
    path.write_bytes(pages)


def _root_pages(path: Path, like: str) -> list[int]:
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as other:  # leaves a -wal as it is
        return [page for (page,) in other.execute("SELECT rootpage FROM sqlite_master WHERE name LIKE ?", (like,))]


async def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    path = tmp_path / "poseidon.db"
    path.mkdir()
    await check(path, StoreError, str(path))


async def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    await check(tmp_path / "state" / "poseidon.db", StoreError, str(tmp_path / "state"))


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    """In a process that gives up root's right to write anywhere, but stays in a folder that it may enter."""
    tmp_path.chmod(0o555)
    script = (
        "import os, trio\nfrom pathlib import Path\n"
        "from poseidon.errors import StoreError\nfrom poseidon.store.store import open_store\n"
        "async def main():\n"
        "    try:\n"
        "        async with open_store(Path('poseidon.db')): pass\n"
        "    except StoreError as error:\n"
        "        print(type(error).__name__, error)\n"
        "if os.geteuid() == 0:\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "trio.run(main)\n"
    )
    done = subprocess.run(python(script), env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "StoreError poseidon.db.lock: Permission denied\n"


async def test_a_start_that_changes_nothing_needs_no_alembic(path: Path) -> None:
    script = (
        "import sys, trio\nfrom pathlib import Path\nfrom poseidon.store.store import open_store\n"
        "async def main():\n"
        "    async with open_store(Path(sys.argv[1])): pass\n"
        "trio.run(main)\n"
        "print([name for name in sys.modules if name.startswith('alembic')])\n"
    )
    done = subprocess.run(python(script, path), env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_an_existing_database_is_open_in_a_moment(path: Path) -> None:
    began = time.perf_counter()
    async with open_store(path):
        assert time.perf_counter() - began < 10

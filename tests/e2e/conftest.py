"""Nothing may be left behind: no process of a runner, no cgroup, no mount, no folder."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """What the databases in the test's folder name is gone at its end."""
    yield
    instances = [f"poseidon-{_instance(database)}" for database in tmp_path.rglob("poseidon.db")]
    assert not [line for line in _processes() if any(instance in line for instance in instances)]
    assert not [group for group in _cgroups() if group.name in instances]
    assert not list(tmp_path.rglob("sandboxes/*/*"))
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def _instance(database: Path) -> str:
    try:
        with sqlite3.connect(database) as connection:
            return str(connection.execute("SELECT value FROM meta WHERE key = 'instance'").fetchone()[0])
    except sqlite3.Error:
        return "of a test that broke its database"


def _processes() -> Iterator[str]:
    """The control groups that each process is in."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield f"{entry.name}: {(entry / 'cgroup').read_text()}"


def _cgroups() -> Iterator[Path]:
    for folder, _, _ in os.walk("/sys/fs/cgroup"):
        yield Path(folder)

"""Every test of the local executor leaves this machine as it was."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.local.support import PATIENCE, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Where a test's sandboxes live; afterwards nothing of them may be left."""
    tmp_path.chmod(0o755)
    world = World(tmp_path)
    descriptors = open_descriptors()
    yield world
    # A process that has given up everything may still be seen, while the kernel takes its network card apart.
    until = time.monotonic() + PATIENCE
    while world.processes() and time.monotonic() < until:
        time.sleep(0.005)
    assert not world.processes(), "processes are left"
    assert not world.cgroups(), "cgroups are left"
    assert not list(world.state.glob("sandboxes/*/*")), "folders are left"
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), "mounts are left"
    assert open_descriptors() == descriptors, "descriptors are left"


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that other uids can reach, as that of an image has to be; pytest's own ones can't be."""
    with TemporaryDirectory(prefix="poseidon-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def open_descriptors() -> set[str]:
    """What this process has open, but for what pytest or trio may open at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(("/sys/fs/cgroup", "/proc", "pipe:", "socket:", "user:", "/memfd", "/dev/pt")) or (
            "state" in target
        ):
            found.add(f"{number} {target}")
    return found

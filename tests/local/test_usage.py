"""What a runner uses is measured, whatever means this machine has for it."""

import os
import subprocess
from pathlib import Path

from poseidon.executors.base import MeasuresUsage
from poseidon.executors.local.limits import Group, Hierarchy
from poseidon.executors.local.usage import by_cgroup, by_processes, memory_peak
from tests.local.support import World, run, start, stop_all

BUSY = "for ((i = 0; i < 400000; i++)); do :; done"


async def test_a_command_costs_cpu_time_and_memory_and_a_stopped_sandbox_nothing(world: World) -> None:
    async with world.executor() as executor:
        assert isinstance(executor, MeasuresUsage)
        allocation = await start(executor)
        before = executor.usage(allocation)
        await run(executor, allocation, BUSY)
        await run(executor, allocation, f"({BUSY}) & wait")
        after = executor.usage(allocation)
        assert before is not None and after is not None
        assert before.cpu_seconds is not None and after.cpu_seconds is not None
        assert after.cpu_seconds > before.cpu_seconds + 0.1
        if executor._site.limiter.holds("memory"):
            assert after.memory_peak is not None and after.memory_peak > 1_000_000
        await stop_all(executor)
        assert executor.usage(allocation) is None


def test_a_cgroup_of_either_version_tells_both(tmp_path: Path) -> None:
    controllers = ("memory", "cpu")
    group = Group((Hierarchy(tmp_path, 2, controllers),), "r")
    (tmp_path / "r").mkdir()
    (tmp_path / "r/cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (tmp_path / "r/memory.peak").write_text("4096\n")
    assert (by_cgroup(group), memory_peak(group)) == (1.5, 4096)
    group = Group((Hierarchy(tmp_path, 1, controllers),), "r")
    assert (by_cgroup(group), memory_peak(group)) == (None, None)
    (tmp_path / "r/cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "r/memory.max_usage_in_bytes").write_text("8192\n")
    assert (by_cgroup(group), memory_peak(group)) == (2.5, 8192)
    assert (by_cgroup(Group((), "r")), memory_peak(Group((), "r"))) == (None, None)


def test_processes_count_with_those_that_they_waited_for() -> None:
    before = by_processes([os.getpid()])
    subprocess.run(["/usr/bin/python3", "-c", "sum(range(5_000_000))"], check=True)
    after = by_processes([os.getpid()])
    assert before is not None and after is not None
    assert after > before
    assert by_processes([2**22 + 1]) is None

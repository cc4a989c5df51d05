"""What a sandbox has used: by its cgroup where that counts, else by what the kernel tells of its processes."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from poseidon.executors.base import Usage
from poseidon.executors.local.limits import Group, counter, words

TICKS = os.sysconf("SC_CLK_TCK")
FIRST_TIME = 11
"""utime, stime, cutime and cstime follow each other, counted after the program's name (proc(5))."""


def usage_of(group: Group, helper: int) -> Usage:
    """Of the sandbox in *group* whose first process is *helper*, which inherits and reaps all orphans in it."""
    seconds = by_cgroup(group)
    if seconds is None:
        seconds = by_processes({helper, *group.pids()})
    return Usage(seconds, memory_peak(group))


def by_cgroup(group: Group) -> float | None:
    """CPU seconds of all that ever ran in it. Version 1 tells only where cpu and cpuacct are mounted together."""
    for hierarchy, path in group.paths():
        if "cpu" not in hierarchy.controllers:
            continue
        if hierarchy.version == 2:
            return counter(path / "cpu.stat", "usage_usec") / 1e6
        if used := words(path / "cpuacct.usage"):
            return int(used[0]) / 1e9
    return None


def by_processes(pids: Iterable[int]) -> float | None:
    """CPU seconds of these, and of their children that have ended and were waited for."""
    ticks = [sum(found) for pid in pids if (found := times_of(pid))]
    return sum(ticks) / TICKS if ticks else None


def times_of(pid: int) -> list[int]:
    """Ticks: its own and its dead children's, as user and as system; none if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [int(field) for field in fields[FIRST_TIME : FIRST_TIME + 4]]
    return []


def memory_peak(group: Group) -> int | None:
    """The most bytes that it ever held; newer kernels tell."""
    for hierarchy, path in group.paths():
        if "memory" in hierarchy.controllers:
            peak = words(path / ("memory.max_usage_in_bytes" if hierarchy.version == 1 else "memory.peak"))
            return int(peak[0]) if peak else None
    return None

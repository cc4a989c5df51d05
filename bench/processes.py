"""What processes cost: memory, processor time, and which of them belong to a daemon's runners."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import trio

MIB, KIB = 1 << 20, 1 << 10
CPU_CLOCK = 2
"""Makes of a pid the id of its processor clock, as `clock_getcpuclockid` does (CPUCLOCK_SCHED)."""


def memory(pids: Iterable[int]) -> int:
    """Bytes (PSS: what is shared counts in shares)."""
    return sum(_field(pid, "smaps_rollup", "Pss:") for pid in pids) * KIB


def resident(pid: int) -> int:
    """Bytes at present (RSS)."""
    return _field(pid, "status", "VmRSS:") * KIB


def peak(pid: int) -> int:
    """The most bytes since `forget_peak` (RSS)."""
    return _field(pid, "status", "VmHWM:") * KIB


def forget_peak(pid: int) -> None:
    """Let `peak` begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _field(pid: int, file: str, name: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


async def cpu_share(groups: dict[str, Callable[[], set[int]]], seconds: float) -> dict[str, float]:
    """Per cent of one processor that each group of processes takes, over *seconds*."""
    members = {name: pids() for name, pids in groups.items()}
    before = {name: _spent(pids) for name, pids in members.items()}
    began = trio.current_time()
    await trio.sleep(seconds)
    passed = trio.current_time() - began
    return {name: 100 * (_spent(pids) - before[name]) / passed for name, pids in members.items()}


def _spent(pids: set[int]) -> float:
    """Seconds of processor time, of ended threads too, to the nanosecond: a tick is too coarse for what idles."""
    spent = 0.0
    for pid in pids:
        with suppress(OSError):
            spent += time.clock_gettime(~pid << 3 | CPU_CLOCK)
    return spent


def below(roots: set[int]) -> set[int]:
    """*roots* with all that descends from them."""
    parents = _parents()
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sandbox_of(helper: int) -> set[int]:
    """A helper with what runs below it, and the bwrap that waits for it outside."""
    parents = _parents()
    roots = {helper}
    while (parent := parents.get(min(roots), 0)) > 1 and _name(parent) == "bwrap":
        roots = {parent}
    return below(roots)


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _parents() -> dict[int, int]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                found[int(entry)] = int(Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return found

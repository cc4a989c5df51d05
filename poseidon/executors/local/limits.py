"""Limits by cgroups, of version 1, 2 or both side by side: whatever this process may write.

One cgroup (in each hierarchy in use) per runner, in a folder named after the store's id, so that two stores never touch
each other's; inside of it one per execution, so that an execution can be killed with all that descends from it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from poseidon.errors import ExecutorError

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
OWN_LEAF = "poseidon-daemon"
EMPTY_INTERVAL = 0.002


@dataclass(frozen=True, slots=True)
class Wanted:
    """Limits of one runner; quota in CPUs, 0: none."""

    memory: int
    processes: int
    shares: int
    quota: float


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder in which this store's runners have their cgroups, with the controllers that work there."""

    base: Path
    version: int
    controllers: tuple[str, ...]

    @property
    def entrance(self) -> str:
        """The file by which a process without threads enters a cgroup."""
        # "tasks" moves a single thread, for which version 1 needs no global lock: 0.2 ms instead of 7 to 11.
        return "tasks" if self.version == 1 else "cgroup.procs"


@dataclass(frozen=True, slots=True)
class Execution:
    """The cgroup of one execution."""

    path: Path
    entrance: Path
    """Written "0" into by who enters; also lists what is in it."""
    stop_file: Path
    stop_text: bytes
    """Written into *stop_file*, no process in it can fork any more (or all are killed at once)."""

    async def emptied(self) -> None:
        """Wait until no process is left in it; version 1 doesn't tell, so it is asked."""
        while pids(self.path):  # noqa: ASYNC110
            await trio.sleep(EMPTY_INTERVAL)

    def remove(self) -> bool:
        """Remove it, unless something still runs in it."""
        return remove(self.path)


@dataclass(frozen=True, slots=True)
class Group:
    """The cgroups of one runner, at most one per hierarchy."""

    hierarchies: tuple[Hierarchy, ...]
    name: str

    def paths(self) -> Iterator[tuple[Hierarchy, Path]]:
        """Its folders."""
        for hierarchy in self.hierarchies:
            yield hierarchy, hierarchy.base / self.name

    def create(self, wanted: Wanted) -> None:
        """Make it with its limits. Raises ExecutorError."""
        for hierarchy, path in self.paths():
            try:
                path.mkdir(mode=0o755, exist_ok=True)
                for file, value in settings_of(hierarchy, wanted):
                    write(path / file, value)
            except OSError as error:
                raise ExecutorError(f"can't set the limits of a runner in {path}: {error.strerror}") from error

    def entrances(self) -> list[str]:
        """The files by which a process enters it."""
        return [str(path / hierarchy.entrance) for hierarchy, path in self.paths()]

    def pids(self) -> set[int]:
        """All that run in it, in its executions too."""
        return {pid for _, path in self.paths() for folder in tree(path) for pid in pids(folder)}

    def out_of_memory_kills(self) -> int:
        """How often the kernel has killed something in it for lack of memory."""
        for hierarchy, path in self.paths():
            if "memory" in hierarchy.controllers:
                return counter(path / ("memory.oom_control" if hierarchy.version == 1 else "memory.events"), "oom_kill")
        return 0

    def execution(self, number: int, processes: int) -> Execution | None:
        """A new cgroup for one execution, where there is a hierarchy for that."""
        for hierarchy, parent in self.paths():
            path = parent / f"execution-{number}"
            if hierarchy.version == 1 and "pids" in hierarchy.controllers:
                path.mkdir()
                write(path / "pids.max", processes)
                return Execution(path, path / hierarchy.entrance, path / "pids.max", b"0")
            if hierarchy.version == 2 and (parent / "cgroup.kill").exists():
                path.mkdir()
                return Execution(path, path / hierarchy.entrance, path / "cgroup.kill", b"1")
        return None

    def highest_execution(self) -> int:
        """The highest number of an execution that still has a cgroup, from before a restart."""
        numbers = [0]
        for _, parent in self.paths():
            numbers += [int(path.name.rpartition("-")[2]) for path in folders(parent)]
        return max(numbers)

    def remove(self) -> bool:
        """Remove all of it; False if something still runs in it."""
        removed = [remove(folder) for _, path in self.paths() for folder in reversed(list(tree(path)))]
        return all(removed)


class Limiter:
    """Where this store's runners have their cgroups."""

    def __init__(self, hierarchies: Sequence[Hierarchy]) -> None:
        self._hierarchies = tuple(hierarchies)

    def holds(self, controller: str) -> str:
        """By which means *controller* works here; empty if it doesn't."""
        for hierarchy in self._hierarchies:
            if controller in hierarchy.controllers:
                return f"cgroup v{hierarchy.version}"
        return ""

    def group(self, name: str) -> Group:
        """The cgroups of the runner called *name*, existing or not."""
        return Group(self._hierarchies, name)

    def names(self) -> set[str]:
        """Of all runners that have one."""
        return {path.name for hierarchy in self._hierarchies for path in folders(hierarchy.base)}

    def close(self) -> None:
        """Leave nothing behind, if no runner is left."""
        for hierarchy in self._hierarchies:
            remove(hierarchy.base)


def open_limiter(instance: str, *, parent: str = "", process: Path = Path("/proc/self")) -> Limiter:
    """Look for what works here. *parent*: a cgroup v2 to divide instead of our own."""
    found: list[Hierarchy] = []
    for version, controllers, folder in mounted(process):
        base = (Path(parent) if parent and version == 2 else folder) / f"poseidon-{instance}"
        wanted = [name for name in CONTROLLERS if name in controllers and not any(name in h.controllers for h in found)]
        working = prepare(base, version, wanted) if wanted else ()
        if working:
            found.append(Hierarchy(base, version, working))
    return Limiter(found)


def mounted(process: Path) -> Iterator[tuple[int, frozenset[str], Path]]:
    """Version, controllers and our own folder of each mounted hierarchy; version 1 first."""
    own = own_cgroups((process / "cgroup").read_text())
    seen: list[tuple[int, frozenset[str], Path]] = []
    for line in (process / "mountinfo").read_text().splitlines():
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        names = frozenset(CONTROLLERS).intersection(options)
        root, point = fields[3], Path(fields[4])
        if kind == "cgroup" and names:
            seen.append((1, names, below(point, root, own.get(next(iter(names)), "/"))))
        elif kind == "cgroup2":
            folder = below(point, root, own.get("", "/"))
            seen.append((2, frozenset(words(folder / "cgroup.controllers")), folder))
    yield from sorted(seen, key=lambda entry: entry[0])


def own_cgroups(text: str) -> dict[str, str]:
    """Controller → our own cgroup; the one of version 2 under the name ""."""
    found = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


def below(point: Path, root: str, own: str) -> Path:
    """The folder of cgroup *own* in a hierarchy of which *root* is mounted at *point*."""
    if root != "/" and (own == root or own.startswith(root + "/")):
        own = own[len(root) :]
    return point / own.strip("/")


def prepare(base: Path, version: int, controllers: Sequence[str]) -> tuple[str, ...]:
    """Make *base* and see which controllers work in it."""
    probe = base / "probe"
    try:
        if version == 2:
            delegate(base.parent, controllers)
        base.mkdir(mode=0o755, exist_ok=True)
        if version == 2:
            enable(base, controllers)
        probe.mkdir(exist_ok=True)
        files = {
            "memory": limit_file(version),
            "pids": "pids.max",
            "cpu": "cpu.shares" if version == 1 else "cpu.weight",
        }
        return tuple(name for name in controllers if os.access(probe / files[name], os.W_OK))
    except OSError:
        return ()
    finally:
        remove(probe)
        remove(base) if not os.access(base, os.W_OK) else None


def delegate(parent: Path, controllers: Sequence[str]) -> None:
    """Let *parent* (version 2) hand its controllers on, for which no process may be in it but in a leaf."""
    if set(controllers) <= set(words(parent / "cgroup.subtree_control")):
        return
    try:
        enable(parent, controllers)
    except OSError:
        leaf = parent / OWN_LEAF
        leaf.mkdir(exist_ok=True)
        write(leaf / "cgroup.procs", os.getpid())
        enable(parent, controllers)


def enable(folder: Path, controllers: Sequence[str]) -> None:
    """Have the children of *folder* (version 2) limited by *controllers*."""
    write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))


def limit_file(version: int) -> str:
    """The file of the memory limit."""
    return "memory.limit_in_bytes" if version == 1 else "memory.max"


def settings_of(hierarchy: Hierarchy, wanted: Wanted) -> Iterator[tuple[str, object]]:
    """The files to write and their values, in this order."""
    first = hierarchy.version == 1
    if "memory" in hierarchy.controllers:
        yield limit_file(hierarchy.version), wanted.memory
        yield ("memory.memsw.limit_in_bytes", wanted.memory) if first else ("memory.swap.max", 0)
    if "pids" in hierarchy.controllers:
        yield "pids.max", wanted.processes
    if "cpu" in hierarchy.controllers:
        shares = min(max(wanted.shares, 2), 262_144)
        yield ("cpu.shares", shares) if first else ("cpu.weight", 1 + (shares - 2) * 9_999 // 262_142)
        if wanted.quota:
            quota = int(wanted.quota * PERIOD)
            yield ("cpu.cfs_quota_us", quota) if first else ("cpu.max", f"{quota} {PERIOD}")


OPTIONAL = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max"})
"""Only there if the kernel accounts swap."""


def write(file: Path, value: object) -> None:
    """Write one value; a missing file is an error unless it is optional."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if file.name in OPTIONAL:
            return
        raise
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def words(file: Path) -> list[str]:
    """The words of a file; none if it isn't there."""
    with suppress(OSError):
        return file.read_text().split()
    return []


def counter(file: Path, name: str) -> int:
    """The number after *name* in a file of lines."""
    found: Mapping[str, str] = {}
    with suppress(OSError):
        found = dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
    return int(found.get(name, "0"))


def pids(folder: Path) -> set[int]:
    """The processes of one cgroup itself."""
    return {int(word) for word in words(folder / "cgroup.procs")}


def folders(folder: Path) -> list[Path]:
    """The folders in it; none if it isn't there."""
    with suppress(OSError):
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    return []


def tree(folder: Path) -> Iterator[Path]:
    """*folder* and what is in it, parents first."""
    if folder.is_dir():
        yield folder
        for child in folders(folder):
            yield from tree(child)


def remove(folder: Path) -> bool:
    """Remove one cgroup; True if it isn't there (any more)."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

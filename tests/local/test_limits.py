"""Where limits are written, on machines with cgroups of version 1, 2, both or none."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from poseidon.errors import ConfigError, ExecutorError
from poseidon.executors.local.limits import (
    Group,
    Hierarchy,
    Limiter,
    Wanted,
    below,
    open_limiter,
    settings_of,
)
from poseidon.executors.local.settings import MIB, LocalSettings
from poseidon.executors.local.users import FIRST, LAST, choose_range, taken_ranges

INSTANCE = "0123456789ab"
WANTED = Wanted(memory=100 * MIB, processes=50, shares=1024, quota=0.5)


def fake_process(folder: Path, mounts: Sequence[str], cgroups: Sequence[str]) -> Path:
    """A /proc/self in which these cgroup hierarchies are mounted."""
    process = folder / "self"
    process.mkdir()
    (process / "mountinfo").write_text("".join(f"{n} 1 0:{n} {line}\n" for n, line in enumerate(mounts)))
    (process / "cgroup").write_text("".join(f"{line}\n" for line in cgroups))
    return process


def fake_v2(folder: Path, own: str, controllers: str, *, instance: str = INSTANCE) -> Path:
    """A tree of version 2. The kernel would make the files of new cgroups, here they are made in advance."""
    point = folder / "unified"
    parent = point / own
    base = parent / f"poseidon-{instance}"
    for path in (parent, base, base / "probe", base / "runner", parent / "poseidon-daemon"):
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.controllers").write_text(controllers)
        for name in ("cgroup.subtree_control", "cgroup.procs", "cgroup.kill"):
            (path / name).write_text("")
        for controller, name in (("memory", "memory.max"), ("pids", "pids.max"), ("cpu", "cpu.weight")):
            if controller in controllers:
                (path / name).write_text("max")
        (path / "cpu.max").write_text("")
    return point


def test_version_2_is_found_and_its_controllers_handed_down(tmp_path: Path) -> None:
    point = fake_v2(tmp_path, "system.slice/poseidon.service", "cpuset cpu io memory pids")
    process = fake_process(
        tmp_path, [f"/ {point} rw - cgroup2 cgroup2 rw,nsdelegate"], ["0::/system.slice/poseidon.service"]
    )
    limiter = open_limiter(INSTANCE, process=process)
    assert [limiter.holds(name) for name in ("memory", "pids", "cpu")] == ["cgroup v2"] * 3
    for folder in (
        point / "system.slice/poseidon.service",
        point / f"system.slice/poseidon.service/poseidon-{INSTANCE}",
    ):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_the_limits_of_version_2_are_written(tmp_path: Path) -> None:
    base = fake_v2(tmp_path, "own", "memory pids cpu") / f"own/poseidon-{INSTANCE}"
    (base / "runner/memory.swap.max").write_text("max")
    group = Group((Hierarchy(base, 2, ("memory", "pids", "cpu")),), "runner")
    group.create(WANTED)
    written = {file.name: file.read_text() for file in (base / "runner").iterdir()}
    assert written["memory.max"] == str(100 * MIB) + ""
    assert (written["memory.swap.max"], written["pids.max"]) == ("0ax", "50x")  # a fake doesn't replace its content
    assert written["cpu.weight"].startswith("39")
    assert written["cpu.max"] == "50000 100000"
    assert group.entrances() == [str(base / "runner/cgroup.procs")]


def test_an_execution_of_version_2_is_killed_by_its_own_file(tmp_path: Path) -> None:
    base = fake_v2(tmp_path, "own", "memory pids cpu") / f"own/poseidon-{INSTANCE}"
    execution = Group((Hierarchy(base, 2, ("pids",)),), "runner").execution(1, 10)
    assert execution
    assert execution.stop_file == base / "runner/execution-1/cgroup.kill"
    assert (execution.stop_text, execution.entrance.name) == (b"1", "cgroup.procs")


def test_a_kernel_without_cgroup_kill_has_no_cgroup_per_execution(tmp_path: Path) -> None:
    base = fake_v2(tmp_path, "own", "memory pids cpu") / f"own/poseidon-{INSTANCE}"
    (base / "runner/cgroup.kill").unlink()
    assert Group((Hierarchy(base, 2, ("pids",)),), "runner").execution(1, 10) is None


def test_out_of_memory_kills_are_counted_in_both_versions(tmp_path: Path) -> None:
    for version, file, text in (
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        (2, "memory.events", "low 0\nhigh 0\nmax 7\noom 4\noom_kill 3\noom_group_kill 0\n"),
    ):
        (tmp_path / "runner").mkdir(exist_ok=True)
        (tmp_path / "runner" / file).write_text(text)
        assert Group((Hierarchy(tmp_path, version, ("memory",)),), "runner").out_of_memory_kills() == 3
    assert Group((), "runner").out_of_memory_kills() == 0


def test_without_a_delegated_controller_nothing_is_claimed_to_hold(tmp_path: Path) -> None:
    point = fake_v2(tmp_path, "own", "")
    process = fake_process(tmp_path, [f"/ {point} rw - cgroup2 cgroup2 rw"], ["0::/own"])
    limiter = open_limiter(INSTANCE, process=process)
    assert not any(limiter.holds(name) for name in ("memory", "pids", "cpu"))
    assert limiter.group("runner").entrances() == []
    assert limiter.group("runner").remove()


def test_a_folder_that_cant_be_written_is_not_used(tmp_path: Path) -> None:
    process = fake_process(
        tmp_path,
        ["/ /proc/sys/nowhere rw - cgroup cgroup rw,memory", "/ /proc/nowhere rw - cgroup2 cgroup2 rw"],
        ["0::/"],
    )
    assert not open_limiter(INSTANCE, process=process).holds("memory")


def test_both_versions_side_by_side_share_the_controllers(tmp_path: Path) -> None:
    point = fake_v2(tmp_path, "own", "pids cpu")
    memory = tmp_path / "memory/own" / f"poseidon-{INSTANCE}" / "probe"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("")
    process = fake_process(
        tmp_path,
        [f"/ {point} rw - cgroup2 cgroup2 rw", f"/ {tmp_path / 'memory'} rw - cgroup cgroup rw,memory"],
        ["3:memory:/own", "0::/own"],
    )
    limiter = open_limiter(INSTANCE, process=process)
    assert [limiter.holds(name) for name in ("memory", "pids", "cpu")] == ["cgroup v1", "cgroup v2", "cgroup v2"]


@pytest.mark.parametrize(
    ("root", "own", "expected"),
    [("/", "/", "/p"), ("/", "/a/b", "/p/a/b"), ("/docker/x", "/docker/x/y", "/p/y"), ("/docker/x", "/docker/x", "/p")],
)
def test_our_own_cgroup_is_found_where_only_a_part_is_mounted(root: str, own: str, expected: str) -> None:
    assert below(Path("/p"), root, own) == Path(expected)


def test_shares_stay_within_what_the_kernel_takes() -> None:
    hierarchies = [Hierarchy(Path("/"), version, ("cpu",)) for version in (1, 2)]
    for shares, first, second in ((0, 2, 1), (1024, 1024, 39), (10_000_000, 262_144, 10_000)):
        wanted = Wanted(memory=0, processes=0, shares=shares, quota=0)
        assert [dict(settings_of(hierarchy, wanted)) for hierarchy in hierarchies] == [
            {"cpu.shares": first},
            {"cpu.weight": second},
        ]


def test_a_limit_that_cant_be_set_is_an_error_with_its_place(tmp_path: Path) -> None:
    group = Limiter([Hierarchy(tmp_path, 1, ("pids",))]).group("runner")
    with pytest.raises(ExecutorError, match=r"can't set the limits of a runner in .*/runner: No such file"):
        group.create(WANTED)


def test_the_file_systems_never_take_more_than_half_of_the_memory() -> None:
    settings = LocalSettings()
    for memory in range(settings.least_memory(), 2000, 7):
        assert settings.sizes(memory).total <= memory * MIB // 2
    fixed = LocalSettings(workspace_mb=100)
    assert fixed.sizes(fixed.least_memory()).total <= fixed.least_memory() * MIB // 2
    assert fixed.sizes(fixed.least_memory() - 1).total > (fixed.least_memory() - 1) * MIB // 2


def test_a_range_of_uids_keeps_clear_of_what_others_have(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text(f"someone:{FIRST}:150000000\nbroken line\n")
    (tmp_path / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    taken = taken_ranges(tmp_path)
    for number in range(12):
        base, count = choose_range(f"{number * 982_451_653:012x}", 0, 0, taken)
        assert FIRST + 150_000_000 <= base < base + count <= LAST
    with pytest.raises(ConfigError, match="overlaps"):
        choose_range(INSTANCE, FIRST + 5, 100, taken)
    with pytest.raises(ConfigError, match="no range"):
        choose_range(INSTANCE, 0, 0, [(0, 2**31)])
    assert choose_range(INSTANCE, 5_000_000, 100, taken) == (5_000_000, 100)


def test_two_stores_have_different_ranges() -> None:
    assert choose_range("000000000001", 0, 0, []) != choose_range("000000000002", 0, 0, [])

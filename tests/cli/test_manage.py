"""status, environments and runners: what they show, what they ask of the daemon, and their exit codes."""

import json
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from poseidon.cli.output import ago, duration, table
from tests.cli.conftest import PATIENCE, Child, Result
from tests.cli.fake_daemon import FakeDaemon
from tests.cli.screen import Screen

Poseidon = Callable[..., Result]


def test_status_shows_pools_services_and_promises(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.add_environment(12, "python", prewarmingPoolSize=34)
    daemon.add_runner(1, "idle")
    result = poseidon("status")
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert result.out.startswith("poseidon 9.9.9: well, up ")
    assert "runners: 1 idle, 0 used, 0 starting" in result.out
    assert ["12", "python", "34", "1", "0", "0", "0", "-"] in lines
    assert any(line[:2] == ["deadlines", "running"] and "2" in line for line in lines)
    assert ["local", "memory", "no", "no", "cgroup", "can", "be", "written"] in lines
    assert ["local", "reachable", "at", "once"] in lines
    assert "nomad     nobody answers  heard 12.5 s ago, newest told after 0.250 s, 1 breaks" in result.out
    assert "\x1b" not in result.out


def test_status_fails_when_the_daemon_is_not_well(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.health = "the prewarming pool is depleting: environments 1"
    result = poseidon("status")
    assert result.code == 1
    assert "poseidon 9.9.9: the prewarming pool is depleting: environments 1, up" in result.out


def test_status_as_json_is_the_daemons_own(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert json.loads(poseidon("status", "--json").out)["services"][0]["name"] == "deadlines"


def test_watching_redraws_in_place(screen: Callable[..., Screen], daemon: FakeDaemon) -> None:
    at = screen("status", "--watch", "--interval", "0.1", rows=12, columns=40)
    at.read_until("\x1b[H\x1b[J", times=2)
    daemon.add_environment(77, "x" * 100)
    at.read_until("xxxxxxxx")
    frames = at.text.split("\x1b[H\x1b[J")[1:]
    lines = [line.replace("\x1b[K", "") for line in frames[0].replace("\r", "").splitlines()]
    assert len(lines) < 12
    assert max(map(len, lines)) <= 40
    at.type("\x03")
    assert at.end() == 0
    assert "Traceback" not in at.text


def test_watching_without_a_terminal_prints_one_after_the_other(
    process: Callable[..., Child], daemon: FakeDaemon
) -> None:
    watch = process("status", "--watch", "--interval", "0.1", "--json")
    assert json.loads(watch.stdout.readline())["version"] == "9.9.9"
    assert json.loads(watch.stdout.readline())["version"] == "9.9.9"
    watch.send_signal(signal.SIGINT)
    assert watch.wait(PATIENCE) == 0
    assert watch.stderr.read() == b""


def test_watching_goes_on_without_a_daemon(screen: Callable[..., Screen], daemon: FakeDaemon) -> None:
    daemon.instead["GET /api/v1/health"] = (500, "application/json", '{"message":"not now"}')
    at = screen("status", "--watch", "--interval", "0.1")
    at.read_until("not now", times=2)
    daemon.instead.clear()
    at.read_until("9.9.9: well")


def test_environments_are_listed(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.add_environment(3, "python", networkAccess=True, exposedPorts=[80, 443])
    assert poseidon("environments", "list").out.splitlines() == [
        "ID  IMAGE    POOL  CPU  MEMORY  NETWORK  PORTS",
        " 1  default     1    0       0  no       -",
        " 3  python      1    0       0  yes      80,443",
    ]
    assert [known["id"] for known in json.loads(poseidon("environments", "list", "--json").out)] == [1, 3]


def test_a_new_environment_has_defaults(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("environments", "put", "5") == Result(0, "environment 5 created\n", "")
    assert daemon.environments[5] == {
        "id": 5,
        "image": "default",
        "prewarmingPoolSize": 1,
        "cpuLimit": 0,
        "memoryLimit": 0,
        "networkAccess": False,
        "exposedPorts": [],
    }


def test_an_environment_keeps_what_is_not_given(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    words = ["--image", "py", "--pool-size", "3", "--cpu", "20", "--memory", "64", "--network", "--port", "80"]
    poseidon("environments", "put", "5", *words)
    assert poseidon("environments", "put", "5", "--pool-size", "0") == Result(0, "environment 5 changed\n", "")
    assert daemon.environments[5] == {
        "id": 5,
        "image": "py",
        "prewarmingPoolSize": 0,
        "cpuLimit": 20,
        "memoryLimit": 64,
        "networkAccess": True,
        "exposedPorts": [80],
    }
    poseidon("environments", "put", "5", "--no-network")
    assert daemon.environments[5]["networkAccess"] is False


def test_environments_are_removed(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("environments", "rm", "1") == Result(0, "environment 1 removed\n", "")
    assert not daemon.environments
    missing = poseidon("environments", "rm", "1")
    assert missing.code == 1
    assert "404" in missing.err


def test_runners_are_listed(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    idle, used = daemon.add_runner(1, "idle"), daemon.add_runner(2)
    daemon.runners["1-gone"] = {"environmentId": 1, "phase": "gone"}
    lines = poseidon("runners", "list").out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [[idle, "1", "idle", "here"], [used, "2", "used", "here"]]
    assert [known["id"] for known in json.loads(poseidon("runners", "list", "--json", "-e", "2").out)] == [used]


def test_named_runners_are_stopped_idle_ones_too(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    idle, used, kept = daemon.add_runner(1, "idle"), daemon.add_runner(1), daemon.add_runner(1)
    result = poseidon("runners", "stop", idle, used)
    assert result == Result(0, f"runner {idle} stopped\nrunner {used} stopped\n", "")
    assert list(daemon.runners) == [kept]


def test_a_runner_that_is_not_there_is_told_but_the_others_are_stopped(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    used = daemon.add_runner(1)
    result = poseidon("runners", "stop", "1-nobody", used)
    assert result == Result(1, f"runner {used} stopped\n", "poseidon: no such runner (any more): 1-nobody\n")


def test_all_runners_are_stopped(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    for _ in range(3):
        daemon.add_runner(1, "idle")
    other = daemon.add_runner(2)
    assert poseidon("runners", "stop", "--all", "--environment", "1").out == "3 runners stopped\n"
    assert list(daemon.runners) == [other]
    assert poseidon("runners", "stop", "--all").out == "1 runners stopped\n"
    assert not daemon.runners


@pytest.mark.parametrize("words", [[], ["--all", "1-x"], ["--environment", "1", "1-x"]])
def test_stop_wants_to_know_what(poseidon: Poseidon, daemon: FakeDaemon, words: list[str]) -> None:
    assert poseidon("runners", "stop", *words).code == 2


def test_tables_are_aligned_and_harmless() -> None:
    lines = table(("NAME", "COUNT"), [("a\x1b[31m\nb", 5), (None, 1000)])
    assert lines == ["NAME      COUNT", "a�[31m b      5", "-          1000"]


@pytest.mark.parametrize(
    ("then", "shown"),
    [
        ("2026-11-30T08:00:00.000Z", "2 min"),
        ("2026-11-30T08:02:05+00:00", "in 5 s"),
        (1, "20787 d"),
        (None, "-"),
        ("yesterday", "-"),
    ],
)
def test_times_are_told_by_their_distance(then: str | float | None, shown: str) -> None:
    assert ago(then, datetime(2026, 11, 30, 8, 2, tzinfo=UTC)) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (119, "119 s"), (7199, "120 min"), (7200, "2 h"), (1e6, "12 d")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_reader_that_has_gone_is_141_as_for_any_program(process: Callable[..., Child], daemon: FakeDaemon) -> None:
    listing = process("environments", "list")
    listing.stdout.close()
    assert listing.wait(PATIENCE) == 141
    assert listing.stderr.read() == b""


def test_output_that_nobody_reads_is_no_error(daemon: FakeDaemon) -> None:
    at = Screen(["bash", "-c", f"{sys.executable} -m poseidon status --watch --interval 0.1 | head -1"], 24, 80)
    try:
        assert at.end() == 0
        assert "Traceback" not in at.text
        assert "poseidon:" not in at.text
    finally:
        at.close()

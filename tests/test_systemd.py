"""systemd: notifications, watchdog, handed over sockets, and the units that we ship."""

import configparser
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from poseidon.config import ServerSettings
from poseidon.errors import ConfigError
from poseidon.telemetry import systemd
from poseidon.telemetry.systemd import Notifier, feed_watchdog, take_sockets

DEPLOY = Path(__file__).parent.parent / "deploy"


class Manager:
    """systemd's end of the notify socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def heard(self) -> list[str]:
        """What has been said since the last time."""
        said = []
        while True:
            try:
                said.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return said


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the 107 bytes of a socket's address."""
    with tempfile.TemporaryDirectory(prefix="p-") as folder:
        yield Path(folder)


@pytest.fixture
def manager(short_path: Path) -> Iterator[Manager]:
    made = Manager(str(short_path / "notify"))
    with made.socket:
        yield made


# Notifications


async def test_systemd_hears_each_stage(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    with trio.fail_after(30):
        await notifier.ready("serving on 127.0.0.1:7200")
        await notifier.status("two\nlines")
        await notifier.alive()
        await notifier.stopping("draining")
    assert manager.heard() == [
        "READY=1\nSTATUS=serving on 127.0.0.1:7200",
        "STATUS=two lines",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=draining",
    ]


async def test_an_abstract_address_works() -> None:
    manager = Manager(f"@poseidon-test-{os.getpid()}")
    with manager.socket, trio.fail_after(30):
        await Notifier(manager.address).status("x")
        assert manager.heard() == ["STATUS=x"]


async def test_without_systemd_nothing_happens() -> None:
    with trio.fail_after(30):
        notifier = Notifier.take({})
        assert (notifier.address, notifier.watchdog) == ("", 0.0)
        await notifier.ready("x")


async def test_a_manager_that_is_gone_is_logged_and_no_failure(short_path: Path) -> None:
    with trio.fail_after(30), structlog.testing.capture_logs() as events:
        await Notifier(str(short_path / "nobody")).ready("x")
    assert [(event["event"], event["about"]) for event in events] == [("systemd not notified", "READY=1")]


async def test_a_manager_that_doesnt_read_holds_nobody_up(
    manager: Manager, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(10_000), structlog.testing.capture_logs() as events:
        for _ in range(600):  # more than net.unix.max_dgram_qlen
            await Notifier(manager.address).alive()
            if events:
                break
    assert events[0]["error"] == "it doesn't read"


def test_what_concerned_us_isnt_passed_on() -> None:
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    assert Notifier.take(environ) == Notifier("/run/x", 3.0)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    ("environ", "period"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_watchdog_is_ours_only_if_systemd_says_so(environ: dict[str, str], period: float) -> None:
    assert Notifier.take({"NOTIFY_SOCKET": "/run/x", **environ}).watchdog == period
    assert Notifier.take(dict(environ)).watchdog == 0.0


def test_an_address_of_an_unknown_kind_is_ignored() -> None:
    assert Notifier.take({"NOTIFY_SOCKET": "vsock:2:1"}).address == ""


# Watchdog


async def test_a_healthy_daemon_gives_two_signs_of_life_a_period(
    manager: Manager, autojump_clock: trio.testing.MockClock
) -> None:
    notifier = Notifier(manager.address, 10.0)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(feed_watchdog, notifier)
            await trio.sleep(21)
            nursery.cancel_scope.cancel()
    assert manager.heard() == ["WATCHDOG=1"] * 5


async def test_without_a_watchdog_nobody_is_fed(manager: Manager, autojump_clock: trio.testing.MockClock) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(feed_watchdog, Notifier(manager.address))
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
    assert manager.heard() == []


# Sockets


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listening socket whose descriptor stands where systemd's first one would."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        monkeypatch.setattr(systemd, "FIRST_DESCRIPTOR", os.dup(made.fileno()))
        yield made


def handed_over(count: int = 1, **changes: str) -> dict[str, str]:
    return {"LISTEN_FDS": str(count), "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "x"} | changes


def test_a_handed_over_socket_is_ours_alone(listener: socket.socket) -> None:
    environ = handed_over()
    os.set_inheritable(systemd.FIRST_DESCRIPTOR, True)
    (taken,) = take_sockets(environ)
    with taken:
        assert taken.getsockname() == listener.getsockname()
        assert (taken.family, taken.get_inheritable(), environ) == (socket.AF_INET, False, {})


def test_sockets_for_another_process_are_left_alone(listener: socket.socket) -> None:
    environ = handed_over(LISTEN_PID="1")
    with structlog.testing.capture_logs() as events:
        assert take_sockets(environ) == ()
    assert [event["log_level"] for event in events] == ["warning"] and environ == {}
    os.close(systemd.FIRST_DESCRIPTOR)


def test_without_sockets_there_are_none() -> None:
    assert take_sockets({}) == take_sockets(handed_over(0)) == take_sockets(handed_over(LISTEN_FDS="x")) == ()


def test_a_descriptor_that_doesnt_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with socket.socket() as idle, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        for number, problem in (
            (reading, "isn't a socket"),
            (idle.fileno(), "listening"),
            (datagram.fileno(), "listening"),
        ):
            monkeypatch.setattr(systemd, "FIRST_DESCRIPTOR", number)
            with pytest.raises(ConfigError, match=problem):
                take_sockets(handed_over())
    os.close(reading)
    os.close(writing)
    with pytest.raises(ConfigError, match="5000 sockets"):
        take_sockets(handed_over(5000))


ACTIVATED = """
import json, os, subprocess, sys
from poseidon.telemetry.systemd import take_sockets
taken = take_sockets(os.environ)
descriptors, variables = "sorted(os.listdir('/proc/self/fd'))", "[name for name in os.environ if 'LISTEN' in name]"
look = f"import json, os; print(json.dumps([{descriptors}, {variables}]))"
child = json.loads(subprocess.check_output([sys.executable, "-I", "-c", look], close_fds=False))
for listener in taken:
    listener.setblocking(True)
    connection, _ = listener.accept()
    connection.sendall(json.dumps([len(taken), listener.family, child]).encode())
    connection.close()
    listener.close()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="systemd-socket-activate is missing")
def test_every_socket_of_systemd_is_served_and_no_child_sees_them(short_path: Path) -> None:
    addresses: list[str | tuple[str, int]] = [str(short_path / "a"), ("127.0.0.1", free_port()), str(short_path / "b")]
    listen = [f"--listen={where if isinstance(where, str) else f'{where[0]}:{where[1]}'}" for where in addresses]
    command = ["systemd-socket-activate", *listen, sys.executable, "-W", "error", "-c", ACTIVATED]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as activated:
        try:
            answers = [json.loads(ask(where)) for where in addresses]
            assert activated.wait(10) == 0
        finally:
            activated.kill()
    families = [socket.AF_UNIX, socket.AF_INET, socket.AF_UNIX]
    assert [(count, family) for count, family, _ in answers] == [(3, family) for family in families]
    descriptors, variables = answers[0][2]
    assert variables == [] and descriptors == ["0", "1", "2", "3"]  # 3: the folder that it reads


@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="systemd-socket-activate is missing")
def test_both_kinds_of_internet_sockets_are_taken(short_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    addresses: list[str | tuple[str, int]] = [("127.0.0.1", free_port()), ("::1", free_port())]
    command = ["systemd-socket-activate", f"-l127.0.0.1:{addresses[0][1]}", f"-l[::1]:{addresses[1][1]}"]
    with subprocess.Popen(
        [*command, sys.executable, "-W", "error", "-c", ACTIVATED], stderr=subprocess.DEVNULL
    ) as activated:
        try:
            answers = [json.loads(ask(where)) for where in addresses]
            assert activated.wait(10) == 0
        finally:
            activated.kill()
    assert [family for _, family, _ in answers] == [socket.AF_INET, socket.AF_INET6]


def ask(where: str | tuple[str, int]) -> bytes:
    """All that a server at *where* says, once it listens."""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    patience = time.monotonic() + 10
    while True:
        with socket.socket(family) as client:
            client.settimeout(10)
            try:
                client.connect(where)
            except (ConnectionRefusedError, FileNotFoundError):
                assert time.monotonic() < patience
                time.sleep(0.01)
            else:
                return b"".join(iter(partial(client.recv, 4096), b""))


# Units


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / name)
    return parser


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
def test_systemd_takes_the_units_without_a_remark(tmp_path: Path) -> None:
    for file in DEPLOY.glob("poseidon.*"):
        text = file.read_text().replace("/opt/poseidon/bin/poseidon", "/bin/true")  # it must exist for this
        (tmp_path / file.name).write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.glob("poseidon.*")))]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_leaves_runners_alive() -> None:
    service = unit("poseidon.service")["Service"]
    wanted = {
        "Type": "notify",
        "KillMode": "process",
        "Delegate": "yes",
        "OOMPolicy": "continue",
        "PrivateTmp": "no",
        "RuntimeDirectoryPreserve": "yes",
        "StateDirectory": "poseidon",
        "Restart": "on-failure",
    }
    assert {key: service[key] for key in wanted} == wanted
    harmful = {
        "ProtectProc",
        "ProtectKernelTunables",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "RestrictNamespaces",
    }
    harmful |= {"ProtectHostname", "SystemCallFilter", "MemoryDenyWriteExecute", "RestrictSUIDSGID", "PrivateDevices"}
    assert not harmful & set(service)


def test_the_units_agree_with_the_defaults() -> None:
    service, server = unit("poseidon.service")["Service"], ServerSettings()
    assert float(service["TimeoutStopSec"]) > server.drain_timeout * 2
    assert float(service["WatchdogSec"]) >= 10
    assert unit("poseidon.socket")["Socket"]["ListenStream"] == f"{server.address}:{server.port}"

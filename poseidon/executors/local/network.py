"""How runners reach a network: by a user-mode stack (slirp4netns) beside the sandbox, which has a namespace of its own.

The stack makes ordinary connections of this machine for the sandbox, as a process without any right here. What mustn't
be reached is rejected by routes inside, which no program there can change. No name server is emulated: that of
slirp4netns would lead to every port of the machine that has the real one, even if that is this one.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import trio

from poseidon.errors import ExecutorError, Unsupported
from poseidon.executors.base import Ability
from poseidon.executors.local.launch import ENTER_AND_DETACH, NETWORK_LOCK, lock, log_of, opened
from poseidon.executors.local.root import PYTHON
from poseidon.executors.local.routing import free_subnet, own_networks, resolvers_of, smallest, without
from poseidon.executors.local.settings import LocalSettings
from poseidon.executors.local.users import ENVIRONMENT, entering

PROGRAM = "slirp4netns"
SEARCHED = "/usr/local/bin:/usr/bin:/bin"
TUN = Path("/dev/net/tun")
RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
"""The second has the real name servers where the first only names a local one."""
SUBNETS = ("10.0.2.0/24", "10.213.2.0/24", "172.29.213.0/24", "192.168.213.0/24")
"""Of the sandbox's own network card: the first that this machine doesn't know."""
MTU = 65520
"""As large as it can be: the stack costs about as much per packet as per byte."""
GET_USER_NAMESPACE = 0xB701
"""ioctl NS_GET_USERNS."""
LOG = "network.log"


@dataclass(frozen=True, slots=True)
class Target:
    """A sandbox whose network is to be prepared."""

    pid: int
    """Of its helper."""
    folder: Path
    entrances: Sequence[str]
    """Files of its cgroups: what is run for it counts as its own."""


class Network:
    """What this machine can do for the networks of its runners."""

    def __init__(self, settings: LocalSettings, *, own_users: bool) -> None:
        self._settings = settings
        self._own_users = own_users
        self._source = Path(__file__).with_name("stack.py").read_text()
        self._program = shutil.which(PROGRAM, path=SEARCHED) or ""

    def ability(self) -> Ability:
        """Whether runners can have network access."""
        trouble = self._trouble()
        if trouble:
            return Ability("network", False, f"{trouble}: networkAccess is refused")
        names = ", ".join(self.name_servers()) or "none that runners could use: [local] name_servers sets some"
        return Ability("network", True, f"a user-mode stack ({self._program}); name servers: {names}")

    def check(self) -> None:
        """Raise Unsupported if they can't."""
        if trouble := self._trouble():
            raise Unsupported(f"networkAccess isn't available on this machine: {trouble}")

    def _trouble(self) -> str:
        if not self._program:
            return f"{PROGRAM} isn't installed"
        if not TUN.exists():
            return f"{TUN} isn't there"
        if not (TUN.stat().st_mode & 0o006 == 0o006 if self._own_users else os.access(TUN, os.R_OK | os.W_OK)):
            return f"{TUN} can't be opened by everybody"
        return ""

    def name_servers(self) -> tuple[str, ...]:
        """Those that runners are told, IPv4 only, as their network is."""
        if self._settings.name_servers:
            return self._settings.name_servers
        own = own_networks()
        for path in RESOLVERS:
            usable = [found for found in resolvers_of(path) if not any(found in network for network in own)]
            if usable:
                return tuple(map(str, usable))
        return ()

    def resolver_file(self) -> str:
        """/etc/resolv.conf of a runner."""
        return "".join(f"nameserver {server}\n" for server in self.name_servers())

    def rejected(self) -> tuple[str, ...]:
        """What no runner may reach: this machine, whichever of its addresses; and what the settings say."""
        servers = [IPv4Address(server) for server in self.name_servers()]
        forbidden = [IPv4Network(text) for text in self._settings.network_blocked]
        for server in servers:  # blocked or not, names have to be resolved
            forbidden = [rest for network in forbidden for rest in without(network, server)]
        return smallest([*own_networks(), *forbidden])

    async def open(self, target: Target, tie: int) -> None:
        """Give the sandbox its network; *tie* is closed by whichever of the two ends first. Raises ExecutorError."""
        subnet = free_subnet(SUBNETS, [IPv4Address(server) for server in self.name_servers()])
        options = ("--configure", f"--mtu={MTU}", f"--cidr={subnet}", "--disable-host-loopback", "--disable-dns")
        shields = ("--enable-sandbox", "--enable-seccomp", f"--exit-fd={tie}")
        await self._prepare(target, [tie], (self._program, *options, *shields))

    async def open_ports(self, target: Target) -> None:
        """Let programs bind each port, also without a network."""
        await self._prepare(target, [], ())

    async def _prepare(self, target: Target, needed: Sequence[int], program: Sequence[str]) -> None:
        try:
            with ExitStack() as stack:
                ready, theirs = os.pipe()
                stack.callback(os.close, ready)
                await trio.to_thread.run_sync(self._begin, target, needed, program, theirs)
                os.set_blocking(ready, False)
                with trio.fail_after(self._settings.start_timeout):
                    await trio.lowlevel.wait_readable(ready)
                if not os.read(ready, 1):
                    raise ExecutorError(
                        f"a runner's network didn't come up: {log_of(target.folder, LOG) or 'no reason given'}"
                    )
        except (OSError, subprocess.SubprocessError, trio.TooSlowError) as error:
            raise ExecutorError(f"a runner's network didn't come up: {error}") from error

    def _begin(self, target: Target, needed: Sequence[int], program: Sequence[str], ready: int) -> None:
        """Start the chain of programs; *ready* is closed here."""
        with ExitStack() as stack:
            stack.callback(os.close, ready)
            namespace = stack.enter_context(opened(os.open(f"/proc/{target.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)))
            users = stack.enter_context(opened(fcntl.ioctl(namespace, GET_USER_NAMESPACE)))
            locked = stack.enter_context(opened(lock(target.folder, NETWORK_LOCK)))
            log = stack.enter_context((target.folder / LOG).open("wb"))
            where = ("--netns-type=path", f"--ready-fd={ready}", f"/proc/self/fd/{namespace}", "tap0")
            subprocess.run(
                [
                    *("/bin/sh", "-c", ENTER_AND_DETACH, "sh", str(len(target.entrances)), *target.entrances),
                    *entering(users, own_users=self._own_users),
                    *(PYTHON, "-I", "-S", "-E", "-B", "-c", self._source),
                    *(str(namespace), ",".join(self.rejected()) if program else "", str(ready)),
                    *((*program, *where) if program else ()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(namespace, users, ready, locked, *needed),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                timeout=self._settings.start_timeout,
                check=True,
            )

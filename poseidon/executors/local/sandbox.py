"""The life of one sandbox: brought up or found again, watched, and dissolved until it is proven gone."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time

import structlog
import trio

from poseidon.core.model import JobId
from poseidon.errors import ConnectionLost, ExecutorError
from poseidon.executors.local import launch, wire
from poseidon.executors.local.book import OUT_OF_MEMORY, Book
from poseidon.executors.local.commands import Commands
from poseidon.executors.local.ledger import SandboxRecord
from poseidon.executors.local.limits import Group, Limiter, Wanted
from poseidon.executors.local.network import Network, Target
from poseidon.executors.local.ports import Bound, Ports, to_text
from poseidon.executors.local.room import Room
from poseidon.executors.local.settings import MIB, LocalSettings
from poseidon.executors.local.users import Users

log = structlog.get_logger(__name__)

RESERVE = 16
"""Processes beyond the limit of an execution, so that the helper can fork while one execution has all of its own."""
GREETING_PATIENCE = 5.0
FIRST_WAIT, LONGEST_WAIT = 0.001, 5.0
COMPLAIN_AFTER = 5.0
FIRST_FREE_PORT = 1024
"""Below it, only who has a privilege may bind a port, unless that is changed."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where sandboxes are, and by what they are made: the same for all."""

    settings: LocalSettings
    book: Book
    launcher: launch.Launcher
    limiter: Limiter
    room: Room
    users: Users | None
    network: Network
    ports: Ports
    nursery: trio.Nursery
    launches: trio.CapacityLimiter

    def wanted(self, memory_mb: int, cpu_limit: int) -> Wanted:
        """Limits of the sandbox as a whole."""
        return Wanted(
            memory=(memory_mb + self.settings.overhead_mb) * MIB,
            processes=self.settings.processes + RESERVE,
            shares=cpu_limit or self.settings.cpu_shares,
            quota=self.settings.cpu_quota,
        )

    def rlimits(self, memory_mb: int) -> tuple[int, int, int, int]:
        """Limits of each process: open files; processes, address space and file size where no cgroup does that."""
        memory = 0 if self.limiter.holds("memory") else memory_mb * MIB
        processes = 0 if self.limiter.holds("pids") else self.settings.processes
        return (self.settings.open_files, processes, memory, memory)


@dataclass(slots=True, eq=False)
class Sandbox:
    """What we hold of one."""

    record: SandboxRecord
    group: Group
    image: str = ""
    cpu_limit: int = 0
    network_access: bool = False
    exposed_ports: tuple[int, ...] = ()
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of its being brought up and watched; cancelled by a stop."""
    stopped: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)
    """The helper is dead, and all that ran in its sandbox with it."""
    pidfd: int = -1
    hold: wire.Channel | None = None
    commands: Commands | None = None
    kills: int = 0
    """Out-of-memory kills before we began to watch."""

    @property
    def job(self) -> JobId:
        """Which job it is."""
        return JobId(self.record.job)

    @property
    def folder(self) -> Path:
        """Outside of it: its socket, lock and log."""
        return Path(self.record.folder)

    def stop(self) -> None:
        """Let it be dissolved."""
        self.stopped.set()
        self.scope.cancel()

    def watch(self, site: Site, born: launch.Born) -> None:
        """Take over what was found or launched."""
        self.pidfd, self.hold = born.pidfd, born.hold
        self.kills = self.group.out_of_memory_kills()
        self.commands = Commands(
            launch.open_folder(self.folder),
            self.group,
            processes=site.settings.processes,
            gone=self.gone,
            nursery=site.nursery,
        )

    def release(self) -> None:
        """Close what we hold of it."""
        if self.pidfd >= 0:
            trio.lowlevel.notify_closing(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        if self.hold:
            self.hold.close()
            self.hold = None
        if self.commands:
            self.commands.close()
            self.commands = None


async def live(sandbox: Sandbox, site: Site) -> None:
    """All of its life, until it has been stopped and is gone, or the executor closes."""
    try:
        with sandbox.scope:
            if sandbox.record.state in ("asked", "running"):
                reason = await until_death(sandbox, site)
                await end(sandbox, site, reason)
        await dissolve(sandbox, site)
        await sandbox.stopped.wait()
        await site.book.remove(sandbox.job)
        log.info("sandbox removed", job=sandbox.job)
    finally:
        sandbox.release()


async def end(sandbox: Sandbox, site: Site, reason: str) -> None:
    """Record and tell that it is over."""
    log.warning("sandbox ended", job=sandbox.job, reason=reason)
    sandbox.record = await site.book.change(sandbox.job, state="ended", reason=reason, ended_at=time())


async def until_death(sandbox: Sandbox, site: Site) -> str:
    """Bring it up unless it is, and watch it; the answer is why it ended."""
    try:
        if sandbox.pidfd < 0:
            async with site.launches:
                await bring_up(sandbox, site)
    except ExecutorError as error:
        return error.message
    except OSError as error:
        return f"its folder can't be used: {error}"
    await trio.lowlevel.wait_readable(sandbox.pidfd)
    sandbox.gone.set()
    return OUT_OF_MEMORY if sandbox.group.out_of_memory_kills() > sandbox.kills else "its helper ended"


async def bring_up(sandbox: Sandbox, site: Site) -> None:
    """Launch it, record it, let it serve. Raises ExecutorError."""
    memory = sandbox.record.memory_mb
    sandbox.group.create(site.wanted(memory, sandbox.cpu_limit))
    with ExitStack() as ours:  # the sandbox and its network have inherited what is closed here
        bound = site.ports.bind(sandbox.exposed_ports, ours)
        tie = tie_of(sandbox, ours)
        plan = launch.Plan(
            folder=sandbox.folder,
            entrances=sandbox.group.entrances(),
            namespace=await site.users.namespace(sandbox.record.slot) if site.users else -1,
            memory_mb=memory,
            image=sandbox.image,
            rlimits=site.rlimits(memory),
            resolver=site.network.resolver_file() if tie else "",
            ports={port.exposed: port.listener.fileno() for port in bound},
            tie=tie[0].fileno() if tie else -1,
        )
        born = await site.launcher.launch(plan)
        if site.users:
            site.nursery.start_soon(site.users.prepare)
        try:
            sandbox.watch(site, born)
            if tie:
                await site.network.open(Target(born.pid, plan.folder, plan.entrances), tie[1].fileno())
            elif any(port.exposed < FIRST_FREE_PORT for port in bound):
                await site.network.open_ports(Target(born.pid, plan.folder, plan.entrances))
            await record(sandbox, site, born, bound)
            await born.go()
        finally:
            born.close_birth()


def tie_of(sandbox: Sandbox, stack: ExitStack) -> tuple[socket.socket, socket.socket] | None:
    """What makes a sandbox and its network end together: whoever has one end sees the other one closed."""
    if not sandbox.network_access:
        return None
    inner, outer = socket.socketpair()
    return stack.enter_context(inner), stack.enter_context(outer)


async def record(sandbox: Sandbox, site: Site, born: launch.Born, bound: Sequence[Bound]) -> None:
    """Make it durable before it may do anything: whoever finds the record later will know the process by it."""
    changes = {"state": "running", "pid": born.pid, "started": born.started, "ports": to_text(bound)}
    sandbox.record = await site.book.change(sandbox.job, **changes)


async def find_again(sandbox: Sandbox, site: Site) -> None:
    """After a restart of the daemon: watch it if it runs, else record its end. A pid alone proves nothing."""
    record = sandbox.record
    if record.state == "asked":
        await end(sandbox, site, "the daemon ended while this was being launched")
    elif record.state == "running":
        if not is_alive(record) or not launch.is_held(sandbox.folder):
            await end(sandbox, site, "it ended while no daemon watched")
        elif not await reconnect(sandbox, site):
            await end(sandbox, site, "its helper doesn't answer, or is of another version")


async def reconnect(sandbox: Sandbox, site: Site) -> bool:
    """Connect to a helper that was found alive, if it is the one that was recorded."""
    with suppress(OSError, ConnectionLost), trio.move_on_after(GREETING_PATIENCE):
        born = await launch.meet(sandbox.folder)
        sandbox.watch(site, born)
        await launch.greeting(born.hold)
        if (born.pid, born.started) == (sandbox.record.pid, sandbox.record.started):
            return True
    sandbox.release()
    return False


def is_alive(record: SandboxRecord) -> bool:
    """The very process that was recorded still runs."""
    return record.pid > 0 and launch.identity(record.pid) == record.started


async def dissolve(sandbox: Sandbox, site: Site) -> None:
    """Kill what is left and remove its traces, until that is proven; only then are its uids and memory free again."""
    began, wait = trio.current_time(), FIRST_WAIT
    complained = False
    while not is_gone(sandbox):
        kill(sandbox)
        await trio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)
        if not complained and trio.current_time() - began > COMPLAIN_AFTER:
            log.error("sandbox can't be ended yet", job=sandbox.job, folder=sandbox.record.folder)
            complained = True
    sandbox.gone.set()
    launch.remove_folder(sandbox.folder)
    site.room.give_back(sandbox.record.memory_mb)
    if site.users:
        site.users.give_back(sandbox.record.slot)


def is_gone(sandbox: Sandbox) -> bool:
    """Its helper is dead, no launch goes on, nor its network, and its cgroups were empty enough to be removed."""
    held = any(launch.is_held(sandbox.folder, name) for name in (launch.LOCK, launch.NETWORK_LOCK))
    return not is_alive(sandbox.record) and not held and sandbox.group.remove()


def kill(sandbox: Sandbox) -> None:
    """Kill the helper, with which the kernel kills all in its pid namespace, and whatever else is in the cgroups.

    The helper goes first: it mustn't see its commands die, and tell of exits that are none.
    """
    doomed = sandbox.group.pids()
    if is_alive(sandbox.record):
        doomed.add(sandbox.record.pid)
    elif not doomed and launch.is_held(sandbox.folder):
        doomed.add(launch.listening_in(sandbox.folder))
    for pid in sorted(doomed - {0}, key=lambda pid: pid != sandbox.record.pid):
        kill_one(pid, sandbox)


def kill_one(pid: int, sandbox: Sandbox) -> None:
    """By a pidfd, and only if that is still a process of the sandbox: the pid may be another's by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        known = pid == sandbox.record.pid and is_alive(sandbox.record)
        if known or pid in sandbox.group.pids() or pid == launch.listening_in(sandbox.folder):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(descriptor)

"""The local executor: the sandboxes of this machine behind the port of `poseidon.executors.base`."""

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from time import time
from uuid import uuid4

import structlog
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, Environment, JobId, Listing
from poseidon.errors import AllocationGone, BudgetExhausted, ConfigError, Unsupported
from poseidon.executors.base import Ability, Batch, LookedUp, Process, Usage
from poseidon.executors.local import launch, ports, root, seccomp
from poseidon.executors.local.binary import open_binary
from poseidon.executors.local.book import Book
from poseidon.executors.local.ledger import Ledger, SandboxRecord
from poseidon.executors.local.limits import Limiter, open_limiter
from poseidon.executors.local.network import Network
from poseidon.executors.local.room import Room
from poseidon.executors.local.sandbox import Sandbox, Site, dissolve, find_again, live
from poseidon.executors.local.settings import LocalSettings
from poseidon.executors.local.usage import usage_of
from poseidon.executors.local.users import Users, choose_range, taken_ranges

log = structlog.get_logger(__name__)

SHELLS = ("bin/bash", "usr/bin/bash")
"""Where an image may have it: /bin is a link in some."""


class LocalExecutor:
    """See Executor."""

    name = "local"
    settle = 0.0
    list_interval = 5.0

    def __init__(self, site: Site, folder: Path, abilities: Sequence[Ability]) -> None:
        self.start_timeout = site.settings.start_timeout
        self._site = site
        self._folder = folder
        self._abilities = tuple(abilities)
        self._sandboxes: dict[JobId, Sandbox] = {}

    def abilities(self) -> Sequence[Ability]:
        """See Executor."""
        return self._abilities

    def check(self, environment: Environment) -> None:
        """See Executor."""
        settings = self._site.settings
        if environment.network_access:
            self._site.network.check()
        ports.check(environment.exposed_ports)
        memory, least = settings.memory_of(environment.memory_limit), settings.least_memory()
        if memory < least:
            raise Unsupported(f"memoryLimit {memory} is too small: the local executor needs at least {least} MB")
        self._site.room.check_size(memory)
        image = settings.images.get(environment.image)
        if image is None and settings.require_image:
            raise Unsupported(f"image {environment.image!r} isn't one of [local] images, and require_image is set")
        if image is not None and not Path(image).is_dir():
            raise Unsupported(f"image {environment.image!r} is configured as {image!r}, which is no folder")
        if image is not None and not any(os.path.lexists(f"{image}/{place}") for place in SHELLS):
            raise Unsupported(f"image {environment.image!r} is configured as {image!r}, which has no /bin/bash")

    async def start(self, job: JobId, environment: Environment) -> int:
        """See Executor."""
        self.check(environment)
        site = self._site
        await site.book.prepare()
        if job in site.book:
            return site.book[job].created
        memory = site.settings.memory_of(environment.memory_limit)
        site.room.check(memory)
        slot = site.users.take() if site.users else -1
        if site.users and slot < 0:
            raise BudgetExhausted("uids exhausted: all of [local] uid_count are in use")
        site.room.take(memory)
        record = site.book.enter(new_record(job, environment, slot, memory, self._folder))
        await self._record(record)
        sandbox = Sandbox(record, site.limiter.group(record.allocation))
        sandbox.image = site.settings.images.get(environment.image, "")
        sandbox.cpu_limit = environment.cpu_limit
        sandbox.network_access, sandbox.exposed_ports = environment.network_access, environment.exposed_ports
        self._begin(sandbox)
        return record.created

    async def _record(self, record: SandboxRecord) -> None:
        """Make a new one durable, or undo it."""
        site = self._site
        try:
            with trio.CancelScope(shield=True):  # once on disk, it has to be known here too
                await site.book.save(record)
        except BaseException:
            site.room.give_back(record.memory_mb)
            if site.users:
                site.users.give_back(record.slot)
            site.book.drop(JobId(record.job))
            raise

    def _begin(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.job] = sandbox
        self._site.nursery.start_soon(self._live, sandbox)

    async def _live(self, sandbox: Sandbox) -> None:
        await live(sandbox, self._site)
        del self._sandboxes[sandbox.job]

    async def stop(self, job: JobId) -> int:
        """See Executor."""
        await trio.lowlevel.checkpoint()
        sandbox = self._sandboxes.get(job)
        if sandbox:
            sandbox.stop()
        return self._site.book.index

    async def snapshot(self) -> Listing:
        """See Executor."""
        await trio.lowlevel.checkpoint()
        return self._site.book.listing()

    async def look_up(self, job: JobId) -> LookedUp:
        """See Executor."""
        await trio.lowlevel.checkpoint()
        return LookedUp(self._site.book.listing(job))

    def follow(self, position: int | None) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """See Executor. Nothing is kept for those who come back: they list again anyway."""
        return self._site.book.follow()

    def usage(self, allocation: Allocation) -> Usage | None:
        """See MeasuresUsage."""
        sandbox = self._sandboxes.get(allocation.job)
        if sandbox is None or sandbox.record.allocation != allocation.id:
            return None
        return usage_of(sandbox.group, sandbox.record.pid)

    def execute(self, allocation: Allocation, command: Command) -> AbstractAsyncContextManager[Process]:
        """See Executor."""
        return self._execute(allocation, command)

    @asynccontextmanager
    async def _execute(self, allocation: Allocation, command: Command) -> AsyncIterator[Process]:
        if command.privileged and self._site.users is None:
            raise Unsupported(
                f"privilegedExecution isn't available: Poseidon runs as {root.account_name()}, not as root, "
                "so its runners have a single user"
            )
        sandbox = self._sandboxes.get(allocation.job)
        if (
            sandbox is None
            or sandbox.commands is None
            or sandbox.stopped.is_set()
            or sandbox.gone.is_set()
            or (sandbox.record.allocation, sandbox.record.started) != (allocation.id, allocation.started)
        ):
            raise AllocationGone(f"the sandbox of job {allocation.job!r} doesn't run any more")
        async with sandbox.commands.open(command) as process:
            yield process

    async def recover(self, records: Sequence[SandboxRecord]) -> None:
        """Find the recorded sandboxes again, end those that nobody has recorded. Other stores' aren't touched."""
        found = [Sandbox(record, self._site.limiter.group(record.allocation)) for record in records]
        async with trio.open_nursery() as nursery:
            for sandbox in found:
                self._site.room.take(sandbox.record.memory_mb)
                if self._site.users:
                    self._site.users.occupy(sandbox.record.slot)
                nursery.start_soon(find_again, sandbox, self._site)
        for sandbox in found:
            if sandbox.record.state == "stopped":
                sandbox.stop()
            self._begin(sandbox)
        known = {sandbox.record.allocation for sandbox in found}
        for name in (self._site.limiter.names() | names_in(self._folder)) - known:
            self._site.nursery.start_soon(self._clean, name)

    async def _clean(self, name: str) -> None:
        log.warning("unrecorded sandbox found", folder=str(self._folder / name))
        sandbox = Sandbox(stranger(name, self._folder), self._site.limiter.group(name))
        self._site.room.take(sandbox.record.memory_mb)
        await dissolve(sandbox, self._site)


@asynccontextmanager
async def open_local(settings: LocalSettings, state: Path, ledger: Ledger) -> AsyncIterator[LocalExecutor]:
    """The sandboxes of this machine. They outlive this; the next one with the same *ledger* finds them again."""
    own_users = os.geteuid() == 0
    if not os.access(root.PYTHON, os.X_OK):
        raise ConfigError(f"[local] enabled: {root.PYTHON} is needed in every runner, and isn't here")
    node = socket.gethostname()
    folder = state / "sandboxes" / ledger.instance
    with ExitStack() as stack:
        make_folder(folder)
        stack.callback(remove_if_empty, folder.parent)
        stack.callback(remove_if_empty, folder)
        binary = stack.enter_context(open_binary(state / "bin", for_others=own_users))
        limiter = open_limiter(ledger.instance, parent=settings.user_cgroup)
        stack.callback(limiter.close)
        users = None
        if own_users:
            users = Users(*choose_range(ledger.instance, settings.uid_base, settings.uid_count, taken_ranges()))
            stack.callback(users.close)
        filtering = seccomp.program()
        network = Network(settings, own_users=own_users)
        abilities = abilities_of(limiter, network, users=own_users, filtering=filtering is not None)
        demand(settings.require, abilities)
        book = Book(ledger, node)
        records = await book.open()
        launcher = launch.Launcher(settings, binary, filtering)
        async with trio.open_nursery() as nursery:
            site = Site(
                settings=settings,
                book=book,
                launcher=launcher,
                limiter=limiter,
                room=Room(settings),
                users=users,
                network=network,
                ports=ports.Ports(settings),
                nursery=nursery,
                launches=trio.CapacityLimiter(settings.launches()),
            )
            executor = LocalExecutor(site, folder, abilities)
            await executor.recover(records)
            if users:
                nursery.start_soon(users.prepare)
            yield executor
            nursery.cancel_scope.cancel()


def new_record(job: JobId, environment: Environment, slot: int, memory_mb: int, folder: Path) -> SandboxRecord:
    """A sandbox that is about to be launched."""
    allocation = str(uuid4())
    return SandboxRecord(
        allocation=allocation,
        job=job,
        environment=environment.id,
        generation=environment.generation,
        slot=slot,
        pid=0,
        started="",
        folder=str(folder / allocation),
        memory_mb=memory_mb,
        created=0,
        version=0,
        state="asked",
        reason="",
        created_at=time(),
        ended_at=None,
    )


def stranger(name: str, folder: Path) -> SandboxRecord:
    """What we would have recorded of a sandbox that we only found."""
    return SandboxRecord(name, "", 0, 0, -1, 0, "", str(folder / name), 0, 0, 0, "stopped", "", 0.0, None)


def make_folder(folder: Path) -> None:
    """Make it, for nobody else. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the local executor can't make its folder {folder}: {error.strerror}") from error


def names_in(folder: Path) -> set[str]:
    """The sandboxes that have a folder."""
    return {path.name for path in folder.iterdir()}


def remove_if_empty(folder: Path) -> None:
    """Leave no folder behind when no sandbox is."""
    try:
        folder.rmdir()
    except OSError:
        return


def abilities_of(limiter: Limiter, network: Network, *, users: bool, filtering: bool) -> tuple[Ability, ...]:
    """Which promises hold here."""

    def by_cgroup(name: str, controller: str, otherwise: str, *, holds_otherwise: bool = False) -> Ability:
        how = limiter.holds(controller)
        return Ability(name, bool(how) or holds_otherwise, how or otherwise)

    return (
        by_cgroup("memory", "memory", "rlimits only: each process may use as much as the limit of its runner"),
        by_cgroup("processes", "pids", "rlimits", holds_otherwise=True),
        by_cgroup("cpu", "cpu", "no cgroup can be written: runners share the CPUs as they come"),
        Ability("users", users, "two uids of its own for each runner" if users else "not root: a single user"),
        network.ability(),
        Ability("isolation", True, "namespaces" + (" and a filter of system calls" if filtering else "")),
    )


def demand(required: Sequence[str], abilities: Sequence[Ability]) -> None:
    """Raise ConfigError if one that is required doesn't hold."""
    known: Mapping[str, Ability] = {ability.name: ability for ability in abilities}
    for name in required:
        if name not in known:
            raise ConfigError(f"[local] require: {name!r} is none of {', '.join(known)}")
        if not known[name].holds:
            raise ConfigError(f"[local] require: {name!r} doesn't hold on this machine: {known[name].how}")

"""READ FIRST: the daemon opens its parts in order, supervises them in one nursery, and stops them inside out.

config → logging → store (lock, migrations) → executors → the shell's state from the store → API → events, pools,
deadlines, housekeeping, watchdog. Runners stay when it ends; the next start takes them over.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import structlog
import trio

from poseidon import opening
from poseidon.api.app import create_app
from poseidon.api.auth import Keyring
from poseidon.api.parts import Parts
from poseidon.api.server import ServerLimits, serve
from poseidon.api.tls import open_tls
from poseidon.config import Config
from poseidon.core.model import Reason
from poseidon.errors import BadRequest, ConfigError, PoseidonError
from poseidon.executors.base import HasCredentials
from poseidon.opening import api_settings, environments_of, listen
from poseidon.reloading import Reloading, keys_of
from poseidon.runners.assembly import Shell, open_shell
from poseidon.runners.executions import Caps, Executions, open_executions
from poseidon.runners.files import Files
from poseidon.runners.overview import Overview
from poseidon.store.retention import Ages, keep_house
from poseidon.store.store import open_store
from poseidon.supervisor import open_supervisor
from poseidon.telemetry.logging import setup_logging
from poseidon.telemetry.systemd import Notifier, feed_watchdog, take_sockets

log = structlog.get_logger(__name__)

DESCRIPTORS = 65536
LAST_ANSWERS = 5.0
"""Seconds that requests under way have at the end, when the executions are over."""
STOP_RUNNERS_WITHIN = 30.0
"""Seconds for `--stop-runners` until the executors have proven that all are gone."""
STATUS_INTERVAL = 10.0
DAY = 86400.0


def main(config: Config, *, stop_runners: bool = False) -> int:
    """Run until a signal; the exit status. *stop_runners*: destroy all runners at the end."""
    setup_logging(config.logging.level, config.logging.format, secrets=config.secrets())
    for caution in config.cautions():
        log.warning("caution", about=caution)
    use_descriptors()
    status = 0
    try:
        trio.run(partial(run, config, stop_runners=stop_runners))
    except* PoseidonError as group:
        _report(group)
        status = 1
    return status


def use_descriptors() -> None:
    """As many as are allowed: the usual soft limit of 1024 is for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(slots=True)
class Stopping:
    """How the daemon is asked to stop."""

    wanted: trio.Event = field(default_factory=trio.Event)
    hurry: trio.Event = field(default_factory=trio.Event)
    """A second signal: don't wait for anybody."""

    async def listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Heed SIGTERM and SIGINT; on a terminal SIGHUP too, which is its end and no wish to reload."""
        ends = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if on_terminal() else []))
        with trio.open_signal_receiver(*ends) as signals:
            task_status.started()
            async for number in signals:
                log.info("asked to stop", signal=signal.Signals(number).name, again=self.wanted.is_set())
                if self.wanted.is_set():
                    self.hurry.set()
                self.wanted.set()


async def run(config: Config, *, stop_runners: bool) -> None:
    """Open everything, serve until asked to stop, and close it again."""
    notifier = Notifier.take(os.environ)
    stopping = Stopping()
    async with AsyncExitStack() as stack:
        signals = await stack.enter_async_context(trio.open_nursery())
        await signals.start(stopping.listen)
        stack.callback(signals.cancel_scope.cancel, reason="stopped")
        store = await stack.enter_async_context(open_store(config.database, synchronous=config.store.synchronous))
        signals.start_soon(store.raise_failure)
        sockets = take_sockets(os.environ) or listen(config.server.address, config.server.port)
        executors = await opening.open_executors(config, store, stack)
        supervisor = await stack.enter_async_context(open_supervisor())
        shell = await open_shell(executors, store, supervisor, claim_wait=config.server.claim_wait)
        executions = await stack.enter_async_context(
            open_executions(
                shell.claims,
                store,
                shell.clock.now,
                expiry=config.server.execution_expiry,
                caps=Caps(config.server.max_time_limit, config.server.max_executions_per_runner),
            )
        )
        overview = Overview(shell, shell.clock.now(), config.server.alert.prewarming_pool_threshold)
        daemon = Daemon(config, shell, executions, overview, sockets, notifier)
        await daemon.start()
        await stopping.wanted.wait()
        await daemon.stop(stopping.hurry, stop_runners=stop_runners)
    log.info("stopped")


def on_terminal() -> bool:
    """Whether a person has started us, and has us under their eyes."""
    return os.isatty(0)


@dataclass(slots=True)
class Daemon:
    """All parts, opened: their services are started and stopped here."""

    config: Config
    shell: Shell
    executions: Executions
    overview: Overview
    sockets: Sequence[socket.socket]
    notifier: Notifier
    server_stops: trio.Event = field(default_factory=trio.Event)
    reloading: Reloading = field(init=False)

    def __post_init__(self) -> None:
        self.reloading = Reloading(self.config, Keyring(keys_of(self.config)), open_tls(self.config.server.tls))
        self.reloading.followers.append(self._renew_credentials)

    async def start(self) -> None:
        """The API answers first, and tells what isn't ready; systemd hears of it when all services run."""
        supervisor = self.shell.supervisor
        await supervisor.start("api", self._serve, may_end=True)
        await self.shell.run()
        for environment in environments_of(self.config, next(iter(self.shell.dispatchers))):
            try:
                await self.shell.environments.put_if_changed(environment)
            except BadRequest as error:
                raise ConfigError(f"environments.{environment.id}: {error.message}") from error
        kept = self.config.store.retention_days * DAY
        ages = Ages(kept, kept, kept)
        supervisor.add("housekeeping", partial(keep_house, self.shell.store, ages, self.shell.clock.now))
        if not on_terminal():
            supervisor.add("reloading", self.reloading.listen)
        supervisor.add("watchdog", partial(feed_watchdog, self.notifier))
        supervisor.add("status line", self._tell_systemd)
        await self.notifier.ready(self.overview.line())
        log.info("serving", addresses=[_name(each) for each in self.sockets], state=str(self.config.state))

    async def stop(self, hurry: trio.Event, *, stop_runners: bool) -> None:
        """No new claims; what runs gets its time, unless a second signal hurries, then its last words; then the API."""
        await self.notifier.stopping("finishing what runs")
        self.overview.draining = True
        self.shell.claims.drain()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hurry, hurry)
            await self.executions.drain(self.config.server.drain_timeout)
            nursery.cancel_scope.cancel(reason="drained")
        if stop_runners:
            with trio.move_on_after(STOP_RUNNERS_WITHIN) as scope:
                await self.shell.stop_all_runners(Reason.SHUTDOWN)
            if scope.cancelled_caught:
                log.error("not all runners are proven to be gone; the next start goes on with it")
        self.server_stops.set()
        with trio.move_on_after(LAST_ANSWERS + 1):
            await self.shell.supervisor.join("api")

    def _renew_credentials(self, config: Config) -> None:
        for dispatcher in self.shell.dispatchers.values():
            if isinstance(dispatcher.executor, HasCredentials):
                try:
                    dispatcher.executor.use_credentials(config.nomad.token)
                except ConfigError as error:
                    log.error("credentials of the cluster not renewed", error=error.message)

    async def _hurry(self, hurry: trio.Event) -> None:
        await hurry.wait()
        self.executions.end_all()

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        config = self.config.server
        parts = Parts(
            self.shell.environments, self.shell.claims, self.executions, Files(self.shell.claims), self.overview
        )
        first = next(iter(self.shell.dispatchers))
        app = create_app(parts, api_settings(config, self.reloading.keyring, first))
        limits = ServerLimits(
            body=config.max_body_mb * 1024 * 1024,
            stall=config.stall_timeout,
            connections=config.limits.connections or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2,
        )
        ours = [each.dup() for each in self.sockets]  # a server closes its sockets, also when it crashes
        tls, stops = self.reloading.tls, self.server_stops
        await serve(app, ours, limits, shutdown=stops, grace=LAST_ANSWERS, tls=tls, task_status=task_status)

    async def _tell_systemd(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        while True:
            await trio.sleep(STATUS_INTERVAL)
            await self.notifier.status(self.overview.line())


def _name(bound: socket.socket) -> str:
    where = bound.getsockname()
    return f"{where[0]}:{where[1]}" if isinstance(where, tuple) else str(where)


def _report(group: BaseExceptionGroup[PoseidonError]) -> None:
    """Tell a person why the daemon ended, without a traceback."""
    for error in _leaves(group):
        log.critical("ended", reason=error.message)
        print(f"poseidon: {error.message}", file=sys.stderr)  # noqa: T201


def _leaves(group: BaseExceptionGroup[PoseidonError]) -> list[PoseidonError]:
    found: list[PoseidonError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found

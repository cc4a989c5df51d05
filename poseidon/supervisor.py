"""Keep the daemon's services running: a crashed one is started again, one that keeps crashing ends the daemon.

What a service expects to fail it handles itself; what comes out of one is a bug, and is told as such. The others
don't notice.
"""

import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import structlog
import trio

from poseidon.errors import ConfigError, ServiceKeepsCrashing
from poseidon.telemetry.logging import describe

log = structlog.get_logger(__name__)

MOST_CRASHES = 5
WITHIN = 60.0
FIRST_DELAY = 0.5
LONGEST_DELAY = 10.0


class Service(Protocol):
    """Runs until cancelled, and says when it is ready; called again after a crash."""

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> object: ...


class ServiceState(StrEnum):
    """What a service does just now."""

    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service, for health and `status`."""

    name: str
    state: ServiceState
    since: float
    """When it came into this state, in seconds since the epoch."""
    crashes: int
    """Since the daemon started."""
    error: str | None
    """Type and message of the last crash."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A service under supervision; also the `task_status` that it gets."""

    name: str
    service: Service
    may_end: bool
    now: Callable[[], float]
    state: ServiceState = ServiceState.STOPPED
    since: float = 0.0
    crashes: int = 0
    error: str | None = None
    recent: deque[float] = field(default_factory=deque)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ready: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)

    def enter(self, state: ServiceState) -> None:
        self.state, self.since = state, self.now()

    def status(self) -> ServiceStatus:
        return ServiceStatus(self.name, self.state, self.since, self.crashes, self.error)

    def started(self, _value: object = None) -> None:
        """The service is ready."""
        self.enter(ServiceState.RUNNING)
        self.ready.set()

    def crash(self, error: Exception) -> None:
        self.crashes += 1
        self.error = describe(error)
        self.recent.append(trio.current_time())
        while self.recent[0] <= trio.current_time() - WITHIN:
            self.recent.popleft()
        log.error("service crashed", service=self.name, crashes=self.crashes, exc_info=error)

    def delay(self) -> float:
        """Seconds until the next attempt: more with each recent crash, and never the same for all."""
        return min(FIRST_DELAY * 2.0 ** (len(self.recent) - 1), LONGEST_DELAY) * random.uniform(0.8, 1.2)  # noqa: S311


class Supervisor:
    """Runs services, each restarted on its own. Opened by `open_supervisor`."""

    def __init__(self, nursery: trio.Nursery, now: Callable[[], float]) -> None:
        self._nursery = nursery
        self._now = now
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, service: Service, *, may_end: bool = False) -> None:
        """Start a service without waiting for it. One that *may_end* is done when it returns."""
        self._launch(name, service, may_end=may_end)

    async def start(self, name: str, service: Service, *, may_end: bool = False) -> None:
        """Start a service and return when it is ready (or, if it *may_end*, done), after crashes if need be."""
        entry = self._launch(name, service, may_end=may_end)
        await entry.ready.wait()
        if entry.over.is_set() and not may_end:
            raise ServiceKeepsCrashing(f"service {name!r} was over before it was ready: {entry.error or 'stopped'}")

    async def stop(self, name: str) -> None:
        """Cancel a service and wait until it is over; it is forgotten then. An unknown one is stopped already."""
        if entry := self._entries.get(name):
            entry.scope.cancel(reason="service stopped")
            await entry.over.wait()
            if self._entries.get(name) is entry:
                del self._entries[name]

    async def join(self, name: str) -> None:
        """Wait until a service is over by itself. An unknown one is."""
        if entry := self._entries.get(name):
            await entry.over.wait()

    def status(self) -> tuple[ServiceStatus, ...]:
        """All services, in the order of their start."""
        return tuple(entry.status() for entry in self._entries.values())

    def _launch(self, name: str, service: Service, *, may_end: bool) -> _Entry:
        known = self._entries.get(name)
        if known and not known.over.is_set():
            raise ValueError(f"service {name!r} runs already")
        entry = self._entries[name] = _Entry(name, service, may_end, self._now)
        self._nursery.start_soon(self._run, entry, name=f"service {name}")
        return entry

    async def _run(self, entry: _Entry) -> None:
        try:
            with entry.scope, structlog.contextvars.bound_contextvars(service=entry.name):
                while await _crashes(entry):
                    if len(entry.recent) >= MOST_CRASHES:
                        raise ServiceKeepsCrashing(f"service {entry.name!r} keeps crashing: {entry.error}")
                    entry.enter(ServiceState.BACKING_OFF)
                    await trio.sleep(entry.delay())
        finally:
            entry.enter(ServiceState.STOPPED)
            entry.ready.set()
            entry.over.set()


@asynccontextmanager
async def open_supervisor(*, now: Callable[[], float] = time.time) -> AsyncIterator[Supervisor]:
    """A supervisor whose services are cancelled at the end of the block.

    ServiceKeepsCrashing and ConfigError come out of it in an ExceptionGroup.
    """
    async with trio.open_nursery() as nursery:
        yield Supervisor(nursery, now)
        nursery.cancel_scope.cancel(reason="shutting down")


async def _crashes(entry: _Entry) -> bool:
    """Run the service once; whether it crashed rather than ended as it may."""
    entry.enter(ServiceState.STARTING)
    crash: Exception | None = None
    try:
        await entry.service(task_status=entry)
        if not entry.may_end:
            raise RuntimeError("the service ended, though it should run until it is stopped")
    except* ConfigError:  # no restart mends a wrong setting
        raise
    except* Exception as group:  # noqa: BLE001 - a bug is anything; beside a cancellation, which goes on by itself, this may be a part of a group
        crash = _unwrapped(group)
        entry.crash(crash)
    return crash is not None


def _unwrapped(error: Exception) -> Exception:
    """The only error in a group, however deep, else the group."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error

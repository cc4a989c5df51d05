"""One task and one heap for all inactivity timers. Deadlines are absolute and stored: a restart doesn't move them."""

import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import structlog
import trio

from poseidon.core.model import Phase, Runner, RunnerId
from poseidon.runners.clock import Clock
from poseidon.runners.dispatcher import Rows
from poseidon.store.queries import save_deadline

log = structlog.get_logger(__name__)

GRACE_AFTER_RESTART = 10.0
"""Seconds that a client has at least after a downtime; never more than the runner's own timeout."""


class Deadlines:
    """When each used runner expires. *expire* is called for those whose time has come."""

    def __init__(self, clock: Clock, rows: Rows, expire: Callable[[RunnerId], None]) -> None:
        self._clock = clock
        self._rows = rows
        self._expire = expire
        self._timeouts: dict[RunnerId, int] = {}
        self._deadlines: dict[RunnerId, float] = {}
        self._held: dict[RunnerId, int] = {}
        self._heap: list[tuple[float, RunnerId]] = []
        self._changed = trio.Event()

    def watch(self, runner: Runner) -> None:
        """A runner has changed its phase."""
        if runner.phase is Phase.USED and runner.id not in self._timeouts and runner.timeout > 0:
            self._timeouts[runner.id] = runner.timeout
            self.active(runner.id)
        elif runner.phase is Phase.GONE:
            self._timeouts.pop(runner.id, None)
            self._deadlines.pop(runner.id, None)

    def restore(self, runner: Runner, deadline: float | None) -> None:
        """A used runner was found in the store."""
        if runner.timeout > 0:
            self._timeouts[runner.id] = runner.timeout
            earliest = self._clock.now() + min(GRACE_AFTER_RESTART, runner.timeout)
            self._set(runner.id, max(deadline or 0.0, earliest))

    def active(self, runner: RunnerId) -> None:
        """Its client has done something: the full time is left again."""
        timeout = self._timeouts.get(runner)
        if timeout is not None:
            self._set(runner, self._clock.now() + timeout)

    def deadline(self, runner: RunnerId) -> float | None:
        """When *runner* expires, in seconds since the epoch; None: never, or held at present."""
        return None if self._held.get(runner) else self._deadlines.get(runner)

    @contextmanager
    def hold(self, runner: RunnerId) -> Iterator[None]:
        """Within the block *runner* doesn't expire."""
        self._held[runner] = self._held.get(runner, 0) + 1
        try:
            yield
        finally:
            self._held[runner] -= 1
            if not self._held[runner]:
                del self._held[runner]
                self.active(runner)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The service."""
        task_status.started()
        while True:
            for runner in self._due():
                log.info("runner inactive for too long", runner_id=runner)
                self._expire(runner)
            self._changed = trio.Event()
            with trio.move_on_after(self._wait()):
                await self._changed.wait()

    def _set(self, runner: RunnerId, deadline: float) -> None:
        self._deadlines[runner] = deadline
        heapq.heappush(self._heap, (deadline, runner))
        if len(self._heap) > 1000 and len(self._heap) > 4 * len(self._deadlines):
            self._heap = [(at, known) for known, at in self._deadlines.items()]
            heapq.heapify(self._heap)
        if self._heap[0][1] == runner:
            self._changed.set()
        self._rows.submit(partial(save_deadline, runner=runner, at=deadline))

    def _due(self) -> Iterator[RunnerId]:
        while self._heap and self._heap[0][0] <= self._clock.now():
            deadline, runner = heapq.heappop(self._heap)
            if self._deadlines.get(runner) != deadline:
                continue  # it has been active since
            if self._held.get(runner):
                continue  # the end of the hold sets a new one
            yield runner

    def _wait(self) -> float:
        return max(0.0, self._heap[0][0] - self._clock.now()) if self._heap else math.inf

"""All executions: each waits, durably, for the one client that may connect to it, and then lives its life.

The lives belong to a nursery of this service, not to the requests that brought them about.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from uuid import uuid4

import structlog
import trio
from sqlalchemy import Connection

from poseidon.core.command import LARGEST_ARGUMENT, Command
from poseidon.core.model import ExecutionId, RunnerId
from poseidon.errors import BadRequest, Draining, ExecutionNotFound, Overloaded, RunnerGone, StoreError
from poseidon.executors.base import Stream
from poseidon.runners.execution import Claims, Client, Execution
from poseidon.runners.execution_outcomes import SHUTDOWN, Outcome
from poseidon.store.executions import (
    ExecutionEnd,
    WaitingExecution,
    begin_execution,
    end_execution,
    expire_executions,
    fail_running_executions,
    load_waiting_executions,
    save_waiting_execution,
)

T = TypeVar("T")
log = structlog.get_logger(__name__)

MOST_WAITING = 10_000
"""Executions that wait for their client; each holds a command of up to 128 KiB and more."""
MOST_IN_A_RUNNER = 32
LARGEST_ENVIRONMENT = 1024 * 1024
"""Bytes of all variables of a command together; execve takes about twice that, with the arguments."""
LAST_WORDS = 2.0
"""Seconds that clients have for the final message at the shutdown."""
LOOK_FOR_EXPIRED = 30.0


@dataclass(frozen=True, slots=True)
class Caps:
    """What no client may exceed; 0: no cap."""

    time_limit: int = 0
    """Seconds. Longer limits are cut to it, and none at all becomes it."""
    per_runner: int = MOST_IN_A_RUNNER
    """Executions that wait or run at once in one runner."""

    def cut(self, time_limit: int) -> int:
        """The limit that holds where *time_limit* is asked for."""
        return min(time_limit or self.time_limit, self.time_limit) if self.time_limit else time_limit


class Records(Protocol):
    """What executions need of the store."""

    def submit(self, work: Callable[[Connection], object]) -> object:
        """Queue a change, in order."""

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Do *work* durably."""


@asynccontextmanager
async def open_executions(
    claims: Claims, records: Records, now: Callable[[], float], *, expiry: float, caps: Caps | None = None
) -> AsyncIterator["Executions"]:
    """Take up the executions that wait in the store. At the end, those that still run are stopped."""
    await records.write(partial(fail_running_executions, at=now()))
    waiting = await records.write(load_waiting_executions)
    async with trio.open_nursery() as nursery:
        executions = Executions(claims, records, now, nursery, expiry, caps or Caps())
        executions.restore(waiting)
        nursery.start_soon(executions.expire)
        try:
            yield executions
        finally:
            executions.end_all()
            nursery.cancel_scope.cancel(reason="shutting down")


class Executions:
    """Opened by `open_executions`. *expiry*: seconds that an execution waits for its client."""

    def __init__(  # noqa: PLR0917
        self,
        claims: Claims,
        records: Records,
        now: Callable[[], float],
        nursery: trio.Nursery,
        expiry: float,
        caps: Caps,
    ) -> None:
        self.draining = False
        self._claims = claims
        self._records = records
        self._now = now
        self._nursery = nursery
        self._expiry = expiry
        self._caps = caps
        self._coming: Counter[RunnerId] = Counter()
        """Executions that are just being recorded."""
        self._waiting: dict[ExecutionId, WaitingExecution] = {}
        self._lives: set[Execution] = set()
        self._halting: Counter[RunnerId] = Counter()
        self._moved = trio.lowlevel.ParkingLot()

    @property
    def running(self) -> int:
        """How many run, or have a client who still reads."""
        return len(self._lives)

    @property
    def waiting(self) -> int:
        """How many wait for their clients."""
        return len(self._waiting)

    def restore(self, waiting: tuple[WaitingExecution, ...]) -> None:
        """These were found in the store."""
        self._waiting |= {each.id: each for each in waiting}

    async def create(self, runner: RunnerId, command: Command, *, time_limit: int = 0) -> ExecutionId:
        """Keep *command* for the client that will connect. Durable when this returns.

        Raises RunnerGone, BadRequest, Draining, Overloaded, StoreError.
        """
        self._claims.used(runner)
        self._refuse_while_draining()
        check(command)
        if len(self._waiting) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} executions wait for their WebSockets already")
        limit = self._caps.cut(time_limit)
        waiting = WaitingExecution(ExecutionId(str(uuid4())), runner, command, limit, self._now())
        with self._place(runner):
            await self._records.write(partial(save_waiting_execution, execution=waiting))
            self._waiting[waiting.id] = waiting
        return waiting.id

    @contextmanager
    def _place(self, runner: RunnerId) -> Iterator[None]:
        """Room for one more execution in *runner*. Raises Overloaded."""
        waiting = sum(each.runner == runner and not self._is_late(each) for each in self._waiting.values())
        present = waiting + sum(each.runner == runner for each in self._lives)
        if 0 < self._caps.per_runner <= present + self._coming[runner]:
            raise Overloaded(f"the runner has {self._caps.per_runner} executions already, as many as allowed")
        self._coming[runner] += 1
        try:
            yield
        finally:
            self._coming[runner] -= 1
            self._coming += Counter()  # drops the zero

    def find(self, runner: RunnerId, execution: ExecutionId) -> WaitingExecution:
        """The execution that waits in *runner*. Raises RunnerGone, ExecutionNotFound."""
        self._claims.used(runner)
        waiting = self._waiting.get(execution)
        if waiting is None or waiting.runner != runner or self._is_late(waiting):
            raise ExecutionNotFound("execution id unknown")
        return waiting

    async def run(self, runner: RunnerId, execution: ExecutionId, client: Client) -> None:
        """Run what waits, for *client*, who is refused by an error before it is accepted, or served to the end.

        Raises RunnerGone, ExecutionNotFound, Draining, StoreError.
        """
        life = await self._begin(runner, execution)
        self._nursery.start_soon(self._conduct, life)
        await life.converse(client)

    async def drain(self, patience: float) -> None:
        """Start nothing more, give what runs its time, then end it. Returns when all is over and, if heard, told."""
        self.draining = True
        with trio.move_on_after(patience):
            while self._lives:
                await self._moved.park()
        lives = list(self._lives)
        self.end_all()
        for life in lives:
            await life.over.wait()
        with trio.move_on_after(LAST_WORDS):
            for life in lives:
                await life.told.wait()

    def end_all(self) -> None:
        """Whatever still runs ends now."""
        self.draining = True
        for life in self._lives:
            life.decide(SHUTDOWN)

    async def expire(self) -> None:
        """Forget, again and again, what nobody connected to in time."""
        while True:
            await trio.sleep(min(LOOK_FOR_EXPIRED, self._expiry))
            self.forget_stale()

    def forget_stale(self) -> None:
        """Give up what waits for too long, or in a runner that is gone."""
        now = self._now()
        for waiting in [each for each in self._waiting.values() if self._is_stale(each)]:
            del self._waiting[waiting.id]
        self._records.submit(partial(expire_executions, created_before=now - self._expiry, at=now))

    def _is_stale(self, waiting: WaitingExecution) -> bool:
        try:
            self._claims.used(waiting.runner)
        except RunnerGone:
            return True
        return self._is_late(waiting)

    def _is_late(self, waiting: WaitingExecution) -> bool:
        return waiting.created_at < self._now() - self._expiry

    async def _begin(self, runner: RunnerId, execution: ExecutionId) -> Execution:
        self.find(runner, execution)
        while self._halting[runner]:  # what is being stopped must not meet what has just begun
            await self._moved.park()
        self._refuse_while_draining()
        waiting = self.find(runner, execution)
        del self._waiting[execution]
        try:
            with trio.CancelScope(shield=True):  # it is taken; that must be known before it can have any effect
                await self._records.write(partial(begin_execution, execution=execution, at=self._now()))
        except StoreError:
            self._waiting[execution] = waiting
            raise
        life = Execution(waiting, self._claims, partial(self._halt, runner))
        self._lives.add(life)
        return life

    async def _conduct(self, life: Execution) -> None:
        started = trio.current_time()
        try:
            await life.perform()
        except Exception as error:  # a fault in one execution must not end all the others
            log.error("execution crashed", execution_id=life.id, runner_id=life.runner, exc_info=error)
        finally:
            self._record(life, trio.current_time() - started)
        await life.told.wait()
        self._lives.discard(life)
        self._moved.unpark_all()

    def _record(self, life: Execution, seconds: float) -> None:
        outcome = life.outcome
        log.info(
            "execution ended",
            execution_id=life.id,
            runner_id=life.runner,
            outcome=str(outcome.ending),
            exit_code=outcome.code,
            detail=outcome.detail,
            seconds=round(seconds, 3),
        )
        self._records.submit(partial(end_execution, execution=life.id, end=_end(life, outcome), at=self._now()))

    @contextmanager
    def _halt(self, runner: RunnerId) -> Iterator[None]:
        self._halting[runner] += 1
        try:
            yield
        finally:
            self._halting[runner] -= 1
            self._halting += Counter()  # drops the zero
            self._moved.unpark_all()

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise Draining("the service is about to stop")


def _end(life: Execution, outcome: Outcome) -> ExecutionEnd:
    return ExecutionEnd(
        outcome.ending,
        outcome.code,
        outcome.detail,
        life.input.received,
        life.output.received[Stream.STDOUT],
        life.output.received[Stream.STDERR],
    )


def check(command: Command) -> None:
    """Raise BadRequest for what no kernel could start."""
    _check_text("command", command.line)
    total = 0
    for name, value in command.environment.items():
        if not name or "=" in name:
            raise BadRequest(f"{name!r} can't be the name of an environment variable")
        total += _check_text(f"environment variable {name!r}", f"{name}={value}")
    if total > LARGEST_ENVIRONMENT:
        raise BadRequest(f"the environment variables exceed {LARGEST_ENVIRONMENT} bytes together: pass a file instead")


def _check_text(what: str, text: str) -> int:
    size = len(text.encode())
    if "\0" in text:
        raise BadRequest(f"the {what} contains a NUL character")
    if size > LARGEST_ARGUMENT:
        raise BadRequest(f"the {what} exceeds {LARGEST_ARGUMENT} bytes: pass a file instead")
    return size

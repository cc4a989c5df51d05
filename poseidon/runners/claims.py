"""Claim and release: each runner gets at most one client, durably before the client hears of it."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import structlog
import trio
from sqlalchemy import Connection

from poseidon.core.events import Claim, Stop
from poseidon.core.model import Allocation, Environment, EnvironmentId, Phase, Reason, Runner, RunnerId
from poseidon.errors import Draining, EnvironmentNotFound, Overloaded, RunnerGone, StoreError
from poseidon.executors.base import Executor
from poseidon.runners.deadlines import Deadlines
from poseidon.runners.dispatcher import Dispatcher, Ticket
from poseidon.runners.facts import ExecutionFacts, RunnerFacts
from poseidon.store.queries import count_executions, gone_runner

T = TypeVar("T")
log = structlog.get_logger(__name__)

REMEMBERED = 1000
"""Recently gone runners whose reasons are told without asking the store."""


class Reads(Protocol):
    """What claims need of the store."""

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run *query*."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A client that waits for a runner of its environment, first come, first served."""

    timeout: int
    served: trio.Event = field(default_factory=trio.Event)
    claim: tuple[Runner, Ticket] | None = None


class Claims:
    """*find* raises EnvironmentNotFound. *dispatchers* by the name of their executors; *claim_wait* in seconds."""

    def __init__(
        self,
        dispatchers: dict[str, Dispatcher],
        find: Callable[[EnvironmentId], Environment],
        reads: Reads,
        *,
        claim_wait: float,
        wake: Callable[[EnvironmentId], None],
    ) -> None:
        self._dispatchers = dispatchers
        self._find = find
        self._reads = reads
        self._claim_wait = claim_wait
        self._wake = wake
        self._waiting: dict[EnvironmentId, deque[_Waiter]] = defaultdict(deque)
        self._serving: set[EnvironmentId] = set()
        self._recent: dict[RunnerId, RunnerFacts] = {}
        self._deadlines: Deadlines | None = None
        self.draining = False
        for dispatcher in dispatchers.values():
            dispatcher.on_pool.append(self._serve)
            dispatcher.on_runner.append(self._remember)

    def use(self, deadlines: Deadlines) -> None:
        """Deadlines and claims need each other; this closes the circle."""
        self._deadlines = deadlines
        for dispatcher in self._dispatchers.values():
            dispatcher.on_runner.append(deadlines.watch)

    # Taking

    async def claim(self, environment: EnvironmentId, *, timeout: int) -> Runner:  # noqa: ASYNC109
        """An idle runner for one client, durably its own. *timeout*: inactivity in seconds, 0 for never.

        Raises EnvironmentNotFound, Draining, Overloaded (none came in time), StoreError.
        """
        give_up_at = trio.current_time() + self._claim_wait
        while True:
            self._find(environment)
            if self.draining:
                raise Draining("the service is about to stop")
            taken = self._take(environment, timeout)
            if taken is None:
                with trio.move_on_at(give_up_at) as patience:
                    taken = await self._wait(environment, timeout)
                if patience.cancelled_caught:
                    raise Overloaded("no runners available for this execution environment")
            if taken is not None and await self._commit(*taken):
                return taken[0]

    def drain(self) -> None:
        """From now on nobody gets a runner; who waits for one is told so."""
        self.draining = True
        for queue in self._waiting.values():
            for waiter in queue:
                waiter.served.set()

    def waiting(self, environment: EnvironmentId) -> int:
        """How many clients wait for a runner."""
        return len(self._waiting.get(environment, ()))

    def _take(self, environment_id: EnvironmentId, timeout: int) -> tuple[Runner, Ticket] | None:
        """Claim the oldest idle runner, unless others have waited longer. One step: nothing can come between."""
        return None if self._waiting.get(environment_id) else self._take_oldest(environment_id, timeout)

    def _take_oldest(self, environment_id: EnvironmentId, timeout: int) -> tuple[Runner, Ticket] | None:
        environment = self._find(environment_id)
        dispatcher = self._dispatchers[environment.executor]
        idle = dispatcher.fleet.idle(environment_id, environment.compatible_since)
        if idle is None:
            return None
        ticket = dispatcher.handle(Claim(idle.id, timeout))
        claimed = dispatcher.fleet.runner(idle.id)
        assert claimed is not None
        return claimed, ticket

    async def _wait(self, environment: EnvironmentId, timeout: int) -> tuple[Runner, Ticket] | None:  # noqa: ASYNC109
        waiter = _Waiter(timeout)
        queue = self._waiting[environment]
        queue.append(waiter)
        self._wake(environment)
        try:
            await waiter.served.wait()
        except trio.Cancelled:
            if waiter.claim is not None:  # served in the very moment in which it gave up
                self._stop(waiter.claim[0].id, Reason.RELEASED)
            raise
        finally:
            if waiter in queue:
                queue.remove(waiter)
            if not queue:
                self._waiting.pop(environment, None)
            self._wake(environment)
        return waiter.claim

    def _serve(self, environment: EnvironmentId) -> None:
        """The pool has changed: give what is idle to those who wait, in their order."""
        if environment in self._serving:
            return  # what is given away changes the pool in turn; who gives it looks again anyway
        self._serving.add(environment)
        try:
            self._serve_in_order(environment)
        finally:
            self._serving.discard(environment)

    def _serve_in_order(self, environment: EnvironmentId) -> None:
        queue = self._waiting.get(environment)
        while queue:
            waiter = queue[0]
            if not waiter.served.is_set():
                try:
                    waiter.claim = self._take_oldest(environment, waiter.timeout)
                except EnvironmentNotFound:
                    pass  # removed meanwhile: it finds out itself
                else:
                    if waiter.claim is None:
                        return
            queue.popleft().served.set()

    async def _commit(self, runner: Runner, ticket: Ticket) -> bool:
        """Wait until the claim is durable; False if the runner has gone meanwhile."""
        try:
            with trio.CancelScope(shield=True):  # the fleet has changed, so its record must follow
                await ticket.wait()
            await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            self._stop(runner.id, Reason.RELEASED)  # nobody will ever use it
            raise
        return any(dispatcher.fleet.runner(runner.id) is not None for dispatcher in self._dispatchers.values())

    # Having

    def used(self, runner: RunnerId) -> Runner:
        """The runner in use with this id. Raises RunnerGone."""
        known = self._living(runner)
        if known is None or known.phase is not Phase.USED:
            recent = self._recent.get(runner)
            raise RunnerGone(f"no runner found with this id{'' if recent is None else f' ({recent.reason})'}")
        return known

    def place(self, runner: Runner) -> tuple[Executor, Allocation]:
        """Where *runner* lives. Raises RunnerGone."""
        self.used(runner.id)
        dispatcher = self._dispatcher(runner.id)
        assert dispatcher is not None
        allocation = dispatcher.fleet.allocation(runner)
        assert allocation is not None
        return dispatcher.executor, allocation

    @contextmanager
    def on_end(self, runner: RunnerId, callback: Callable[[Reason], None]) -> Iterator[None]:
        """While in the block, *callback* is called once, synchronously, if the runner ends; at once if it has."""
        dispatcher = self._dispatcher(runner)
        if dispatcher is None:
            callback(Reason.STOPPED)
            yield
        else:
            with dispatcher.ending(runner, callback):
                yield

    def active(self, runner: RunnerId) -> None:
        """Its client has done something: its inactivity starts anew."""
        assert self._deadlines is not None
        self._deadlines.active(runner)

    def hold(self, runner: RunnerId) -> AbstractContextManager[None]:
        """Within the block the runner doesn't expire."""
        assert self._deadlines is not None
        return self._deadlines.hold(runner)

    # Giving back

    async def release(self, runner: RunnerId, reason: Reason = Reason.RELEASED) -> None:
        """A used runner's client is done with it: it is hidden at once and destroyed in the background.

        Returns when the intent is durable, or is kept until it can be: an error in place of the answer would cut off
        all that CodeOcean runs. Raises RunnerGone.
        """
        self.used(runner)
        await self._stop_durably(runner, reason)

    def expire(self, runner: RunnerId) -> None:
        """Its client has been inactive for too long. A runner that is gone already has expired as well."""
        self._stop(runner, Reason.INACTIVE)

    async def stop(self, runner: RunnerId) -> None:
        """An operator wants this living runner gone, idle or used. Raises RunnerGone."""
        if self._living(runner) is None:
            self.used(runner)
        await self._stop_durably(runner, Reason.RELEASED)

    def stop_all(self, reason: Reason) -> None:
        """Every job of every executor is to go."""
        for dispatcher in self._dispatchers.values():
            for environment in dispatcher.fleet.environments():
                for job, _, _ in list(dispatcher.fleet.jobs(environment)):
                    dispatcher.handle(Stop(job.id, reason))

    def _stop(self, runner: RunnerId, reason: Reason) -> Ticket | None:
        for dispatcher in self._dispatchers.values():
            known = dispatcher.fleet.runner(runner)
            if known is not None:
                return dispatcher.handle(Stop(known.job, reason))
        return None

    async def _stop_durably(self, runner: RunnerId, reason: Reason) -> None:
        ticket = self._stop(runner, reason)
        if ticket is not None:
            try:
                with trio.CancelScope(shield=True):
                    await ticket.wait()
            except StoreError as error:  # it is hidden already, and will be saved as soon as that works
                log.warning("stop not saved yet", runner_id=runner, error=error.message)

    # Telling

    async def tell(self, runner: RunnerId) -> RunnerFacts | None:
        """What is known of a runner, also one that has been gone for long; None if there never was one."""
        known = self._living(runner)
        if known is not None:
            return self._facts(known)
        if runner in self._recent:  # the store may not have heard of its end yet
            return self._recent[runner]
        return await self._reads.read(partial(_gone_facts, runner=runner))

    async def executions_of(self, runner: RunnerId) -> ExecutionFacts:
        """What ran in a runner. Raises StoreError."""
        return ExecutionFacts(*await self._reads.read(partial(count_executions, runner=runner)))

    def list(self) -> "list[RunnerFacts]":
        """All living runners."""
        return [self._facts(runner) for runner in self._all()]

    def _facts(self, runner: Runner) -> RunnerFacts:
        return RunnerFacts.of(runner, None if self._deadlines is None else self._deadlines.deadline(runner.id))

    def _all(self) -> Iterable[Runner]:
        for dispatcher in self._dispatchers.values():
            yield from dispatcher.fleet.runners()

    def _living(self, runner: RunnerId) -> Runner | None:
        dispatcher = self._dispatcher(runner)
        return None if dispatcher is None else dispatcher.fleet.runner(runner)

    def _dispatcher(self, runner: RunnerId) -> Dispatcher | None:
        for dispatcher in self._dispatchers.values():
            if dispatcher.fleet.runner(runner) is not None:
                return dispatcher
        return None

    def _remember(self, runner: Runner) -> None:
        if runner.phase is Phase.GONE:
            self._recent[runner.id] = RunnerFacts.of(runner)
            if len(self._recent) > REMEMBERED:
                self._recent.pop(next(iter(self._recent)))


def _gone_facts(connection: Connection, runner: RunnerId) -> RunnerFacts | None:
    found = gone_runner(connection, runner)
    if found is None:
        return None
    return RunnerFacts(
        runner,
        Phase.GONE,
        found.environment,
        found.node_name,
        found.allocation,
        None if found.reason is None else str(found.reason),
        found.ready_at,
        found.claimed_at,
        None,
        found.gone_at,
        job=found.job,
    )

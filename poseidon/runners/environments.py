"""The environments: what clients put and delete, kept in the store, each with a refresher for its pool."""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import structlog
import trio
from sqlalchemy import Connection

from poseidon.core.events import Stop
from poseidon.core.model import Environment, EnvironmentId, Job, Reason, Runner
from poseidon.core.pool import survey
from poseidon.errors import BadRequest, BudgetExhausted, EnvironmentNotFound, ExecutorUnreachable, PoseidonError
from poseidon.executors.base import KeepsTemplates
from poseidon.runners.carrier import Carrier
from poseidon.runners.dispatcher import Dispatcher
from poseidon.runners.facts import PoolStatistics, PoolStatus
from poseidon.runners.generations import save_next
from poseidon.runners.refresher import Refresher
from poseidon.store.queries import remove_environment
from poseidon.supervisor import Supervisor

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Writes(Protocol):
    """What environments need of the store."""

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Do *work* durably."""


class Environments:
    """*waiting* tells how many clients wait for a runner of an environment."""

    def __init__(
        self, dispatchers: dict[str, Dispatcher], writes: Writes, supervisor: Supervisor, now: Callable[[], float]
    ) -> None:
        self._dispatchers = dispatchers
        self._writes = writes
        self._supervisor = supervisor
        self._now = now
        self._known: dict[EnvironmentId, Environment] = {}
        self._refreshers: dict[EnvironmentId, Refresher] = {}
        self._locks: dict[EnvironmentId, trio.Lock] = defaultdict(trio.Lock)
        self._carriers: dict[str, Carrier] = {}
        self._waiting: Callable[[EnvironmentId], int] = lambda _: 0
        self.fetchers: list[Callable[[], Awaitable[None]]] = []
        """Each makes one executor's templates and what is known here agree."""
        self._removals: Counter[EnvironmentId] = Counter()
        self._moved = trio.lowlevel.ParkingLot()
        self.untold: set[EnvironmentId] = set()
        """Environments whose executor couldn't be told of their newest state."""
        self.on_untold: list[Callable[[], None]] = []
        for dispatcher in dispatchers.values():
            dispatcher.on_pool.append(self.wake)
            dispatcher.on_runner.append(self._runner_changed)
            dispatcher.on_stillborn.append(self._stillborn)

    def use(self, carriers: dict[str, Carrier], waiting: Callable[[EnvironmentId], int]) -> None:
        """Carriers and claims need environments, and these them; this closes the circle."""
        self._carriers = carriers
        self._waiting = waiting

    # Asking

    def find(self, environment: EnvironmentId) -> Environment | None:
        """The environment, if there is one."""
        return self._known.get(environment)

    def get(self, environment: EnvironmentId) -> Environment:
        """The environment. Raises EnvironmentNotFound."""
        found = self._known.get(environment)
        if found is None:
            raise EnvironmentNotFound("execution environment not found")
        return found

    def list(self) -> "list[Environment]":
        """All, by id."""
        return [self._known[environment] for environment in sorted(self._known)]

    def statistics(self) -> dict[EnvironmentId, PoolStatistics]:
        """Each environment's pool in numbers."""
        return {environment.id: self._count(environment) for environment in self.list()}

    # Changing

    def restore(self, environment: Environment) -> None:
        """An environment was found in the store; `launch` looks after its pool."""
        if environment.executor not in self._dispatchers:
            log.warning(
                "environment left alone: its executor is not enabled",
                environment_id=environment.id,
                executor=environment.executor,
            )
            return
        self._known[environment.id] = environment
        self._dispatchers[environment.executor].fleet.know(environment.id, environment.generation)

    def launch(self) -> None:
        """Begin to look after the pools of all that was restored."""
        for environment in self.list():
            self._launch(environment)

    async def put(self, wanted: Environment, *, template_may_wait: bool = False) -> bool:
        """Create or update; True if it is new. Returns when it is durable: the pool is filled in the background.

        A change of size only scales. The same again refreshes: each idle runner is replaced, one by one. Any other
        change replaces idle runners at once. Used ones always finish. An executor that keeps templates is told first,
        so that nothing is done by halves; *template_may_wait*: later, if it can't be reached.
        Raises BadRequest, Unsupported, StoreError, ExecutorError.
        """
        dispatcher = self._dispatchers.get(wanted.executor)
        if dispatcher is None:
            raise BadRequest(f"executor {wanted.executor!r} is not enabled")
        dispatcher.executor.check(wanted)
        async with self._locks[wanted.id]:
            known = self._known.get(wanted.id)
            if known is not None and known.executor != wanted.executor:
                await self._remove_template(known)
            await self._put_template(wanted, may_wait=template_may_wait)
            with trio.CancelScope(shield=True):
                environment = await self._writes.write(partial(save_next, known=known, wanted=wanted, at=self._now()))
                if known is not None and known.executor != environment.executor:
                    await self._supervisor.stop(_service(environment.id))
                    self._stop_jobs(self._dispatchers[known.executor], environment.id, Reason.REPLACED)
                self._take_in(environment)
                if isinstance(dispatcher.executor, KeepsTemplates) and (
                    known is None or known.executor != wanted.executor
                ):
                    dispatcher.compare_soon()  # for runners that others have left there
        log.info("environment put", environment_id=environment.id, created=known is None, size=environment.pool_size)
        return known is None

    async def put_if_changed(self, wanted: Environment) -> None:
        """As `put`, but the same again changes nothing: for what a configuration says at each start."""
        known = self._known.get(wanted.id)
        if (
            known is None
            or replace(wanted, generation=known.generation, compatible_since=known.compatible_since) != known
        ):
            await self.put(wanted, template_may_wait=True)

    async def filled(self, environment: EnvironmentId) -> None:
        """Wait until its pool has as many idle runners, of its newest kind, as it shall. Raises EnvironmentNotFound."""
        while True:
            known = self.get(environment)
            pool = survey(known, self._dispatchers[known.executor].fleet.jobs(environment))
            if len(pool.idle) >= known.pool_size:
                return
            await self._moved.park()

    async def fetch(self) -> None:
        """Ask those executors that keep templates for environments that others have put there.
        Raises ExecutorError, StoreError."""
        for fetch in self.fetchers:
            await fetch()

    def count_removals(self) -> "Counter[EnvironmentId]":
        """To be asked for before an executor is asked for its templates: they may be removed meanwhile."""
        return self._removals.copy()

    async def take_over(
        self,
        found: Iterable[Environment],
        removed: "Counter[EnvironmentId]",
        look: Callable[[], Awaitable[None]],
    ) -> None:
        """From now on we know those that we don't know yet. *look* finds their runners before their pools are looked
        after. Raises StoreError, ExecutorUnreachable."""

        def is_new(environment: Environment) -> bool:
            unchanged = self._removals[environment.id] == removed[environment.id]
            return unchanged and environment.id not in self._known

        saved = [environment for each in found if (environment := await self._save_if(each, is_new)) is not None]
        if saved:
            await look()
        for environment in saved:
            if is_new(environment):  # a client may have put it, and even have removed it, meanwhile
                self._take_in(environment)
                log.info("environment taken over", environment_id=environment.id, size=environment.pool_size)

    async def _save_if(self, found: Environment, is_new: Callable[[Environment], bool]) -> Environment | None:
        async with self._locks[found.id]:
            if not is_new(found):
                return None
            with trio.CancelScope(shield=True):
                environment = await self._writes.write(partial(save_next, known=None, wanted=found, at=self._now()))
            self._dispatchers[found.executor].fleet.know(environment.id, environment.generation)
            return environment

    async def register_again(self, environment: EnvironmentId) -> None:
        """Its executor doesn't have its template, or has it as it was before. Raises ExecutorError."""
        async with self._locks[environment]:
            known = self._known.get(environment)
            executor = None if known is None else self._dispatchers[known.executor].executor
            if known is None or not isinstance(executor, KeepsTemplates):
                return
            await executor.put_template(known)
            self.untold.discard(environment)
        log.info("template registered again", environment_id=environment)

    async def _put_template(self, wanted: Environment, *, may_wait: bool) -> None:
        executor = self._dispatchers[wanted.executor].executor
        if not isinstance(executor, KeepsTemplates):
            return
        try:
            await executor.put_template(wanted)
        except ExecutorUnreachable as error:
            if not may_wait:
                raise
            log.warning("template has to wait", environment_id=wanted.id, error=error.message)
            self.untold.add(wanted.id)
            for tell in self.on_untold:
                tell()

    async def _remove_template(self, known: Environment) -> None:
        executor = self._dispatchers[known.executor].executor
        if isinstance(executor, KeepsTemplates):
            await executor.remove_template(known.id)
        self.untold.discard(known.id)

    async def remove(self, environment: EnvironmentId) -> None:
        """Delete it, and destroy all its runners, used ones too.

        Raises EnvironmentNotFound, StoreError; ExecutorUnreachable if its template can't be removed, for that would
        bring it back."""
        self.get(environment)  # first: whoever asks for ids that don't exist makes no locks
        async with self._locks[environment]:
            known = self.get(environment)
            await self._remove_template(known)
            with trio.CancelScope(shield=True):
                await self._writes.write(partial(remove_environment, environment=environment, at=self._now()))
                del self._known[environment]
                self._removals[environment] += 1
                await self._supervisor.stop(_service(environment))
                self._refreshers.pop(environment, None)
                dispatcher = self._dispatchers[known.executor]
                dispatcher.fleet.forget(environment)
                self._stop_jobs(dispatcher, environment, Reason.REMOVED)
            self._moved.unpark_all()
        log.info("environment removed", environment_id=environment)

    async def stop_refreshing(self) -> None:
        """Pools are no longer looked after, until the next start."""
        for environment in self.list():
            await self._supervisor.stop(_service(environment.id))

    def wake(self, environment: EnvironmentId) -> None:
        """Its pool has changed, or clients wait."""
        self._moved.unpark_all()
        refresher = self._refreshers.get(environment)
        if refresher is not None:
            refresher.wake()

    def wake_all(self) -> None:
        """There may be room now for starts that had to wait."""
        for refresher in self._refreshers.values():
            refresher.wake()

    def start_failed(self, environment: EnvironmentId, error: PoseidonError) -> None:
        """A start of this environment found no room."""
        refresher = self._refreshers.get(environment)
        if refresher is not None and refresher.start_failed(error) and isinstance(error, BudgetExhausted):
            self._make_room(environment, refresher)

    def _make_room(self, environment: EnvironmentId, refresher: Refresher) -> None:
        """No pool may keep others from having any runner: the one with most idle ones gives one up.

        Its last one only for a client who waits.
        """
        known = self._known.get(environment)
        clients = self._waiting(environment)
        if known is None or self._at_hand(known) >= max(1, clients):
            return
        others = [each for each in self.list() if each.executor == known.executor and each.id != environment]
        richest = max(others, key=self._idle, default=None)
        if richest is None or self._idle(richest) < (1 if clients else 2):
            return
        if self._refreshers[richest.id].give_way():
            refresher.retry_soon()

    def _idle(self, environment: Environment) -> int:
        pool = self._count(environment)
        return pool.idle - pool.waiting

    def _at_hand(self, environment: Environment) -> int:
        pool = self._count(environment)
        return pool.idle + pool.starting

    def _take_in(self, environment: Environment) -> None:
        known = self._known.get(environment.id)
        self._known[environment.id] = environment
        self._dispatchers[environment.executor].fleet.know(environment.id, environment.generation)
        if known is None or known.executor != environment.executor:
            self._launch(environment)
        else:
            if environment.generation != known.generation:
                self._refreshers[environment.id].begin_anew()
            self._refreshers[environment.id].wake()

    def _launch(self, environment: Environment) -> None:
        executor = environment.executor
        refresher = Refresher(
            environment.id, self._dispatchers[executor], self._carriers[executor], self.find, self._waiting
        )
        self._refreshers[environment.id] = refresher
        self._supervisor.add(_service(environment.id), refresher.run, may_end=True)

    def _stop_jobs(self, dispatcher: Dispatcher, environment: EnvironmentId, reason: Reason) -> None:
        for job, _, _ in list(dispatcher.fleet.jobs(environment)):
            dispatcher.handle(Stop(job.id, reason))

    def _runner_changed(self, runner: Runner) -> None:
        refresher = self._refreshers.get(runner.environment)
        if refresher is not None:
            refresher.runner_changed(runner)

    def _stillborn(self, job: Job, trouble: str) -> None:
        environment, refresher = self._known.get(job.environment), self._refreshers.get(job.environment)
        if environment is not None and refresher is not None and job.generation >= environment.generation:
            refresher.stillborn(trouble)

    def _count(self, environment: Environment) -> PoolStatistics:
        jobs = list(self._dispatchers[environment.executor].fleet.jobs(environment.id))
        pool = survey(environment, jobs)
        idle, starting = len(pool.idle) + len(pool.old_idle), len(pool.starting) + pool.strangers
        trouble = self._refreshers[environment.id].trouble
        if idle >= environment.pool_size:
            status = PoolStatus.OK
        else:
            status = PoolStatus.FAILING if trouble else PoolStatus.FILLING
        return PoolStatistics(
            environment.pool_size,
            idle,
            pool.used,
            starting,
            self._waiting(environment.id),
            status,
            trouble if status is PoolStatus.FAILING else "",
        )


def _service(environment: EnvironmentId) -> str:
    return f"environment {environment}"

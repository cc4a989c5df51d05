"""The environments: what clients put and delete, kept in the store, each with a refresher for its pool."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import structlog
import trio
from sqlalchemy import Connection

from poseidon.core.events import Stop
from poseidon.core.model import Environment, EnvironmentId, Reason, Runner
from poseidon.core.pool import survey
from poseidon.errors import BadRequest, EnvironmentNotFound, PoseidonError
from poseidon.runners.carrier import Carrier
from poseidon.runners.dispatcher import Dispatcher
from poseidon.runners.facts import PoolStatistics, PoolStatus
from poseidon.runners.refresher import Refresher
from poseidon.store.queries import last_generation, remove_environment, save_environment
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
        for dispatcher in dispatchers.values():
            dispatcher.on_pool.append(self.wake)
            dispatcher.on_runner.append(self._runner_changed)

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

    async def put(self, wanted: Environment) -> bool:
        """Create or update; True if it is new. Returns when it is durable: the pool is filled in the background.

        A change of size only scales. The same again refreshes: each idle runner is replaced, one by one. Any other
        change replaces idle runners at once. Used ones always finish. Raises BadRequest, Unsupported, StoreError.
        """
        dispatcher = self._dispatchers.get(wanted.executor)
        if dispatcher is None:
            raise BadRequest(f"executor {wanted.executor!r} is not enabled")
        dispatcher.executor.check(wanted)
        async with self._locks[wanted.id]:
            known = self._known.get(wanted.id)
            with trio.CancelScope(shield=True):
                environment = await self._writes.write(partial(_save_next, known=known, wanted=wanted, at=self._now()))
                if known is not None and known.executor != environment.executor:
                    await self._supervisor.stop(_service(environment.id))
                    self._stop_jobs(self._dispatchers[known.executor], environment.id, Reason.REPLACED)
                self._take_in(environment)
        log.info("environment put", environment_id=environment.id, created=known is None, size=environment.pool_size)
        return known is None

    async def put_if_changed(self, wanted: Environment) -> None:
        """As `put`, but the same again changes nothing: for what a configuration says at each start."""
        known = self._known.get(wanted.id)
        if (
            known is None
            or replace(wanted, generation=known.generation, compatible_since=known.compatible_since) != known
        ):
            await self.put(wanted)

    async def remove(self, environment: EnvironmentId) -> None:
        """Delete it, and destroy all its runners, used ones too. Raises EnvironmentNotFound, StoreError."""
        self.get(environment)  # first: whoever asks for ids that don't exist makes no locks
        async with self._locks[environment]:
            known = self.get(environment)
            with trio.CancelScope(shield=True):
                await self._writes.write(partial(remove_environment, environment=environment, at=self._now()))
                del self._known[environment]
                await self._supervisor.stop(_service(environment))
                self._refreshers.pop(environment, None)
                dispatcher = self._dispatchers[known.executor]
                dispatcher.fleet.forget(environment)
                self._stop_jobs(dispatcher, environment, Reason.REMOVED)
        log.info("environment removed", environment_id=environment)

    async def stop_refreshing(self) -> None:
        """Pools are no longer looked after, until the next start."""
        for environment in self.list():
            await self._supervisor.stop(_service(environment.id))

    def wake(self, environment: EnvironmentId) -> None:
        """Its pool has changed, or clients wait."""
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
        if refresher is not None:
            refresher.start_failed(error)

    def _take_in(self, environment: Environment) -> None:
        known = self._known.get(environment.id)
        self._known[environment.id] = environment
        self._dispatchers[environment.executor].fleet.know(environment.id, environment.generation)
        if known is None or known.executor != environment.executor:
            self._launch(environment)
        else:
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

    def _count(self, environment: Environment) -> PoolStatistics:
        jobs = list(self._dispatchers[environment.executor].fleet.jobs(environment.id))
        pool = survey(environment, jobs)
        idle, starting = len(pool.idle) + len(pool.old_idle), len(pool.starting)
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
            trouble,
        )


def _service(environment: EnvironmentId) -> str:
    return f"environment {environment}"


def _save_next(connection: Connection, known: Environment | None, wanted: Environment, at: float) -> Environment:
    """Save *wanted* as what follows *known*, and return it with its generation."""
    if known is None:
        generation = last_generation(connection, wanted.id) + 1
        environment = replace(wanted, generation=generation, compatible_since=generation)
    else:
        environment = _next_generation(known, wanted)
    save_environment(connection, environment, at)
    return environment


def _next_generation(known: Environment, wanted: Environment) -> Environment:
    as_before = replace(wanted, generation=known.generation, compatible_since=known.compatible_since)
    if as_before == known:
        return replace(known, generation=known.generation + 1)
    if replace(as_before, pool_size=known.pool_size) == known:
        return as_before
    generation = known.generation + 1
    return replace(wanted, generation=generation, compatible_since=generation)

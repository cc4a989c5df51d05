"""Carries out what the fleet decides: starts, stops, look-ups and marks, each after its intent is durable.

One request per job at a time, repeated until it is answered. It decides nothing itself.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import structlog
import trio
from sqlalchemy import Connection

from poseidon.core.events import (
    Decision,
    LookedUp,
    LookUp,
    Mark,
    Marked,
    Overdue,
    Start,
    Started,
    Stop,
    StopJob,
    Stopped,
)
from poseidon.core.model import Environment, EnvironmentId, JobId, Reason, environment_of
from poseidon.errors import ExecutorError, ExecutorUnreachable, PlacementFailed, PoseidonError, StoreError, Unsupported
from poseidon.executors.base import KeepsRecords
from poseidon.runners.delays import Delays
from poseidon.runners.dispatcher import Dispatcher, Ticket
from poseidon.store.queries import job_had_runner

T = TypeVar("T")
log = structlog.get_logger(__name__)

ANSWER_WITHIN = 120.0
"""Seconds for one request to an executor; it bounds itself more tightly where it can."""
MARK_SURE_AFTER = 15.0
"""Seconds after which a request that wasn't answered isn't carried out any more: Nomad holds one for 5 s at most while
its servers have no leader."""
CHECK_INTERVAL = 1.0
"""Seconds between two looks for jobs that are overdue."""


class Reads(Protocol):
    """What the carrier needs of the store."""

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run *query*."""


class Carrier:
    """*find* gives the environment of an id, *failed* is told of starts that found no room."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        reads: Reads,
        find: Callable[[EnvironmentId], Environment | None],
        failed: Callable[[EnvironmentId, PoseidonError], None],
        *,
        concurrency: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._executor = dispatcher.executor
        self._fleet = dispatcher.fleet
        self._reads = reads
        self._find = find
        self._failed = failed
        self._nursery: trio.Nursery | None = None
        self._concurrency = concurrency
        self._limiter = trio.CapacityLimiter(concurrency)
        self._requests: dict[JobId, trio.Lock] = {}
        self._looking: set[JobId] = set()
        self._starting: dict[JobId, EnvironmentId] = {}
        self._hungry: set[EnvironmentId] = set()
        """Those that want to begin more starts than they may, as of their last look."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The service: take up what is under way, then carry out each decision as it comes."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._looking.clear()
            self._starting.clear()
            self._requests.clear()
            self._dispatcher.carry = self._carry
            try:
                self._dispatcher.resume()
                for job in self._fleet.unanswered_starts():
                    self._spawn_start(job, None)
                task_status.started()
                while True:
                    await trio.sleep(CHECK_INTERVAL)
                    self._give_up_overdue()
            finally:
                self._nursery = None

    def hungers(self, environment: EnvironmentId, hungry: bool) -> None:
        """Whether *environment* wants to begin more starts than it may."""
        (self._hungry.add if hungry else self._hungry.discard)(environment)

    def room(self, environment: EnvironmentId) -> int:
        """How many starts *environment* may begin now: a fair part of what there is, if others hunger for some too."""
        if self._nursery is None:
            return 0
        free = self._concurrency - len(self._starting)
        others = len(self._hungry - {environment})
        part = -(-self._concurrency // (others + 1)) - sum(each == environment for each in self._starting.values())
        return max(0, min(free, part) if others else free)

    def begin_start(self, job: JobId, environment: Environment) -> None:
        """Record that a new job is wanted, and ask for it as soon as that is durable."""
        mark = False if _records(self._executor) is not None else None
        ticket = self._dispatcher.handle(Start(job, environment.id, environment.generation, mark))
        self._spawn_start(job, ticket)

    def _spawn_start(self, job: JobId, ticket: Ticket | None) -> None:
        if self._nursery is not None:
            self._starting[job] = environment_of(job) or EnvironmentId(0)
            self._nursery.start_soon(self._start, job, ticket)

    def _carry(self, decision: Decision, ticket: Ticket) -> None:
        if self._nursery is None:
            return  # a crash is being handled: everything is decided again by `resume`
        match decision:
            case StopJob(job):
                self._nursery.start_soon(self._stop, job, ticket)
            case LookUp(job, at):
                if job not in self._looking:
                    self._looking.add(job)
                    self._nursery.start_soon(self._look_up, job, at)
            case Mark(job):
                if _records(self._executor) is not None:
                    self._nursery.start_soon(self._mark, job)
            case _:
                raise AssertionError(f"not for the carrier: {decision!r}")

    async def _start(self, job: JobId, ticket: Ticket | None) -> None:
        try:
            if ticket is not None:
                await _durable(ticket)
            with self._request(job) as lock:
                async with lock, self._limiter:
                    await self._ask_start(job)
        finally:
            self._starting.pop(job, None)
            known = self._fleet.job(job)
            for environment in {*self._hungry, *([] if known is None else [known.environment])}:
                for wake in self._dispatcher.on_pool:
                    wake(environment)

    async def _ask_start(self, job: JobId) -> None:
        def wanted() -> bool:
            known = self._fleet.job(job)
            return known is not None and known.stop is None

        known = self._fleet.job(job)
        environment = None if known is None else self._find(known.environment)
        if known is None or environment is None:
            self._dispatcher.handle(Stop(job, Reason.REMOVED))
            return
        try:
            index = await self._repeat("start", job, partial(self._executor.start, job, environment), wanted)
        except (ExecutorError, Unsupported) as error:  # an image, say, may have vanished since the PUT
            log.warning("start failed", job_id=job, environment_id=known.environment, error=error.message)
            refused = isinstance(error, PlacementFailed)
            self._dispatcher.handle(Stop(job, Reason.PLACEMENT_FAILED if refused else Reason.FAILED))
            self._failed(known.environment, error)
            return
        if index is not None:
            self._dispatcher.handle(Started(job, index))

    async def _stop(self, job: JobId, ticket: Ticket) -> None:
        def wanted() -> bool:
            known = self._fleet.job(job)
            return known is not None and known.stop is not None and known.stop.answered is None

        await _durable(ticket)
        with self._request(job) as lock:
            async with lock:  # a start under way ends first, for its intent is no longer wanted
                index = await self._repeat("stop", job, partial(self._executor.stop, job), wanted)
        if index is not None:
            self._dispatcher.handle(Stopped(job, index))

    async def _look_up(self, job: JobId, at: float) -> None:
        try:
            await trio.sleep(max(0.0, at - self._dispatcher.clock.now()))
            asked = self._fleet.ask(self._dispatcher.clock.now())
            found = await self._repeat(
                "look-up", job, partial(self._executor.look_up, job), partial(self._fleet.needs_look_up, job)
            )
            if found is None:
                return
            issued = await self._repeat(
                "look-up",
                job,
                partial(self._reads.read, partial(job_had_runner, job=job)),
                partial(self._fleet.needs_look_up, job),
            )
            if issued is None:
                return
        finally:
            self._looking.discard(job)
        self._dispatcher.handle(
            LookedUp(job, found.listing, asked, used=found.used, timeout=found.timeout or 0, issued=issued)
        )

    async def _mark(self, job: JobId) -> None:
        """Write the mark that is wanted. What was asked in vain may still be carried out, even after the opposite was
        found to be the case already: then it is looked at again when that is over."""
        sure = await self._ask_for_mark(job)
        while not sure and self._is_wanted(job):
            await trio.sleep(MARK_SURE_AFTER)
            if self._fleet.wanted_mark(job) is not None:
                sure = await self._ask_for_mark(job)

    async def _ask_for_mark(self, job: JobId) -> bool:
        """Whether the first request was answered."""
        records = _records(self._executor)
        assert records is not None
        asked = answered = 0

        async def ask(used: bool, timeout: int) -> None:  # noqa: ASYNC109 - a value that is written
            nonlocal asked, answered
            asked += 1
            await records.mark(job, used=used, timeout=timeout)
            answered += 1

        with self._request(job) as lock:
            async with lock:
                wanted = self._fleet.wanted_mark(job)
                if wanted is None:
                    return True
                runner = self._fleet.living(job)
                timeout = 0 if runner is None else runner.timeout
                request = partial(ask, wanted, timeout)
                await self._repeat("mark", job, request, lambda: self._fleet.wanted_mark(job) == wanted)
        self._dispatcher.handle(Marked(job, wanted))
        return asked == answered

    def _is_wanted(self, job: JobId) -> bool:
        known = self._fleet.job(job)
        return known is not None and known.stop is None

    async def _repeat(
        self, what: str, job: JobId, request: Callable[[], Awaitable[T]], wanted: Callable[[], bool]
    ) -> T | None:
        """Ask until there is an answer, or until it is no longer *wanted* (then None)."""
        delays = Delays(first=0.2, most=30)
        while wanted():
            try:
                with trio.fail_after(ANSWER_WITHIN):
                    return await request()
            except (ExecutorUnreachable, StoreError, trio.TooSlowError) as error:
                log.warning("request not answered", request=what, job_id=job, error=str(error))
            await trio.sleep(delays.next())
        return None

    def _give_up_overdue(self) -> None:
        for job in self._fleet.overdue(self._dispatcher.clock.now(), self._executor.start_timeout):
            log.warning("job without a running life for too long", job_id=job)
            known, trouble = self._fleet.job(job), self._fleet.trouble(job)
            self._dispatcher.handle(Overdue(job))
            if known is not None:
                message = f"no runner became ready in time{f': {trouble}' if trouble else ''}"
                self._failed(known.environment, PlacementFailed(message))

    @contextmanager
    def _request(self, job: JobId) -> Iterator[trio.Lock]:
        """The job's turn: one request at a time."""
        lock = self._requests.setdefault(job, trio.Lock())
        try:
            yield lock
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._requests.pop(job, None)


async def _durable(ticket: Ticket) -> None:
    """Wait until *ticket* is durable, however long the disk refuses."""
    delays = Delays(first=0.2, most=5)
    while True:
        try:
            await ticket.wait()
        except StoreError:
            await trio.sleep(delays.next())
        else:
            return


def _records(executor: object) -> KeepsRecords | None:
    return executor if isinstance(executor, KeepsRecords) else None

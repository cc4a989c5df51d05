"""The only owner of one executor's fleet: applies events, queues the rows, wakes those concerned.

`handle` awaits nothing, so nothing interleaves and there are no locks. What it decides is carried out by `Carrier`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import structlog
import trio
from sqlalchemy import Connection

from poseidon.core.events import Decision, EndExecutions, Event, Listed, LookedUp, PoolChanged
from poseidon.core.fleet import Fleet
from poseidon.core.model import Changes, EnvironmentId, Job, JobId, Phase, Reason, Runner, RunnerId
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import Batch, Executor, JobsListed, ListsJobs
from poseidon.runners.clock import Clock
from poseidon.runners.recognition import Recognition
from poseidon.store.queries import save_changes

log = structlog.get_logger(__name__)

_PHRASES = {Phase.IDLE: "runner ready", Phase.USED: "runner claimed", Phase.GONE: "runner gone"}


class Ticket(Protocol):
    """Something queued for the store."""

    async def wait(self) -> Any:
        """Return when it is durable."""


class Rows(Protocol):
    """What the dispatcher needs of the store."""

    def submit(self, work: Callable[[Connection], Any]) -> Ticket:
        """Queue a change, in order."""


class NothingQueued:
    """The ticket of a step that changed nothing."""

    async def wait(self) -> None:
        """Return at once."""


class Dispatcher:
    """*wake* is called with each environment whose pool has changed, *carry* with each other decision."""

    def __init__(self, executor: Executor, fleet: Fleet, rows: Rows, clock: Clock) -> None:
        self.executor = executor
        self.fleet = fleet
        self.clock = clock
        self.reachable = False
        """Whether the executor's stream is followed at present."""
        self.trouble: str | None = None
        """Why not, if it isn't."""
        self.listed = False
        """Whether everything has been listed since the start."""
        self.recognition = Recognition(executor, fleet)
        self.carry: Callable[[Decision, Ticket], None] = _carry_nothing
        self.on_pool: list[Callable[[EnvironmentId], None]] = []
        self.on_runner: list[Callable[[Runner], None]] = []
        self.on_templates: list[Callable[[Set[EnvironmentId]], None]] = []
        """Told which environments' templates the executor has as we left them, whenever jobs are compared."""
        self.on_stillborn: list[Callable[[Job, str], None]] = []
        """Called with each job that is given up without ever having had a runner, and what the executor tells of it."""
        self._stillborn: set[JobId] = set()
        self._rows = rows
        self._comparison_wanted = trio.Event()
        self._endings: dict[RunnerId, list[Callable[[Reason], None]]] = defaultdict(list)

    def handle(self, event: Event) -> Ticket:
        """Take in *event*; the ticket tells when what it changed is durable."""
        decisions = self.fleet.handle(event, self.clock.now())
        return self._settle(decisions)

    def apply(self, batch: Batch) -> Ticket:
        """Take in what the stream told, as one change together with its position; not before it is sure that it is of
        the executor that we know. Raises ExecutorUnreachable."""
        if not self.recognition.sure:
            self.recognition.hold(batch)
            return NothingQueued()
        now = self.clock.now()
        decisions = [decision for value in batch.values for decision in self.fleet.handle(value, now)]
        if batch.values:
            self.fleet.advance(batch.position)
        return self._settle(decisions)

    async def list_all(self) -> None:
        """Take a listing and apply it. Raises ExecutorUnreachable."""
        if await self._list_is_older():  # the cluster may have gone back; only a second one in a row proves it
            await trio.sleep(self.executor.settle)
            await self._list_is_older()

    async def _list_is_older(self) -> bool:
        asked = self.fleet.ask(self.clock.now())
        listing = await self.executor.snapshot()
        try:
            self.recognition.check(listing, asked)
        except ExecutorUnreachable:
            self.compare_soon()  # whoever has asked: the stream's news wait from now on
            raise
        self.handle(Listed(listing, asked))
        for batch in self.recognition.release():
            self.apply(batch)
        self.listed = True
        return listing.jobs_index < asked.jobs_version or listing.allocations_index < asked.allocations_version

    async def compare(self) -> None:
        """Compare what is there with what is known, as cheaply as the executor can. Raises ExecutorUnreachable."""
        if not isinstance(self.executor, ListsJobs):
            await self.list_all()
            return
        if not self.recognition.sure:
            await self.list_all()
            return
        asked = self.fleet.ask(self.clock.now())
        found = await self.executor.list_jobs()
        if found.listing.jobs_index < asked.jobs_version or not self.recognition.knows(found.listing, asked):
            await self.list_all()
            return
        self.handle(Listed(found.listing, asked))
        if found.templates is not None:
            for tell in self.on_templates:
                tell(found.templates)
        for job in self._differing(found):
            await self._look_up(job)

    def compare_soon(self) -> None:
        """There may be jobs that haven't concerned us so far: don't wait for the next comparison."""
        self._comparison_wanted.set()

    async def comparison_due(self) -> None:
        """Return when jobs are to be compared (again)."""
        with trio.move_on_after(self.executor.list_interval):
            await self._comparison_wanted.wait()
        self._comparison_wanted = trio.Event()

    def _differing(self, found: JobsListed) -> list[JobId]:
        """Jobs of which the executor says that something runs, or nothing, and the stream has told otherwise."""
        known = ((seen.job, self.fleet.job(seen.job)) for seen in found.listing.jobs)
        return [
            job
            for job, entry in known
            if entry is not None and entry.adopted and entry.stop is None
            if (job in found.running) != (self.fleet.living(job) is not None)
        ]

    async def _look_up(self, job: JobId) -> None:
        asked = self.fleet.ask(self.clock.now())
        found = await self.executor.look_up(job)
        self.handle(LookedUp(job, found.listing, asked, used=found.used, timeout=found.timeout or 0))

    def resume(self) -> Ticket:
        """Decide again what was under way before a restart, of the daemon or of the carrier."""
        return self._settle(self.fleet.resume(self.clock.now()))

    @contextmanager
    def ending(self, runner: RunnerId, callback: Callable[[Reason], None]) -> Iterator[None]:
        """While in the block, *callback* is called once if the used *runner* ends; at once if it has ended already."""
        known = self.fleet.runner(runner)
        if known is None:
            callback(Reason.STOPPED)
            yield
            return
        callbacks = self._endings[runner]
        callbacks.append(callback)
        try:
            yield
        finally:
            callbacks.remove(callback)
            if not callbacks:
                self._endings.pop(runner, None)

    def _settle(self, decisions: list[Decision]) -> Ticket:
        changes = self.fleet.take_changes()
        ticket = self._save(changes) if changes else NothingQueued()
        for runner in changes.runners:
            self._tell(runner)
        self._tell_stillborn(changes)
        for decision in decisions:
            self._carry_out(decision, ticket)
        return ticket

    def _save(self, changes: Changes) -> Ticket:
        return self._rows.submit(
            partial(save_changes, executor=self.executor.name, changes=changes, at=self.clock.now())
        )

    def _tell(self, runner: Runner) -> None:
        facts = {"runner_id": runner.id, "environment_id": runner.environment, "node": runner.node_name}
        if runner.reason is not None:
            facts["reason"] = str(runner.reason)
        log.info(_PHRASES[runner.phase], **facts)
        for callback in self.on_runner:
            callback(runner)

    def _tell_stillborn(self, changes: Changes) -> None:
        for job in changes.jobs:
            if job.stop_reason is Reason.DEAD and not job.id_issued and job.ours and job.id not in self._stillborn:
                self._stillborn.add(job.id)
                for callback in self.on_stillborn:
                    callback(job, self.fleet.trouble(job.id))
        self._stillborn.difference_update(changes.ended)

    def _carry_out(self, decision: Decision, ticket: Ticket) -> None:
        match decision:
            case EndExecutions(runner, reason):
                for ending in list(self._endings.get(runner, ())):
                    ending(reason)
            case PoolChanged(environment):
                for wake in self.on_pool:
                    wake(environment)
            case _:
                self.carry(decision, ticket)


def _carry_nothing(_decision: Decision, _ticket: Ticket) -> None:
    """Until a carrier runs: it decides everything again when it begins (`resume`)."""

"""Puts the shell's parts together: for each executor a dispatcher, a carrier and a consumer; one of the others."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import trio

from poseidon.core.fleet import Fleet
from poseidon.core.model import EnvironmentId, Phase, Reason, RunnerId
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import Executor, KeepsTemplates
from poseidon.runners import consumer
from poseidon.runners.carrier import Carrier
from poseidon.runners.claims import Claims
from poseidon.runners.clock import Clock
from poseidon.runners.deadlines import Deadlines
from poseidon.runners.dispatcher import Dispatcher
from poseidon.runners.environments import Environments
from poseidon.runners.templates import Templates
from poseidon.store.queries import load_deadlines, load_environments, load_records
from poseidon.store.store import Store
from poseidon.supervisor import Supervisor

CONCURRENT_STARTS = 16
"""Starts that an executor is asked for at the same time; it may have a tighter limit of its own."""
PROOF_INTERVAL = 0.1
"""Seconds between listings while all runners are being stopped."""


@dataclass(frozen=True, slots=True)
class Shell:
    """The parts that others use."""

    clock: Clock
    dispatchers: dict[str, Dispatcher]
    carriers: dict[str, Carrier]
    environments: Environments
    templates: dict[str, Templates]
    claims: Claims
    deadlines: Deadlines
    supervisor: Supervisor
    store: Store

    async def run(self) -> None:
        """Start the services: those that carry out before those that decide."""
        for name, carrier in self.carriers.items():
            await self.supervisor.start(f"carrier {name}", carrier.run)
        self.environments.launch()
        for name, dispatcher in self.dispatchers.items():
            self.supervisor.add(f"events {name}", partial(consumer.follow, dispatcher))
        for name, templates in self.templates.items():
            self.supervisor.add(f"templates {name}", templates.run)
        await self.supervisor.start("deadlines", self.deadlines.run)

    async def stop_all_runners(self, reason: Reason) -> None:
        """Destroy everything, and wait until listings prove that nothing is left."""
        await self.environments.stop_refreshing()
        self.claims.stop_all(reason)
        for dispatcher in self.dispatchers.values():
            while dispatcher.fleet.environments():
                with suppress(ExecutorUnreachable):
                    await dispatcher.compare()
                await trio.sleep(PROOF_INTERVAL)


async def open_shell(
    executors: Sequence[Executor], store: Store, supervisor: Supervisor, *, claim_wait: float
) -> Shell:
    """The shell with all that *store* remembers; nothing runs before `Shell.run`."""
    clock = Clock()
    dispatchers: dict[str, Dispatcher] = {}
    for executor in executors:
        records = await store.read(partial(load_records, executor=executor.name))
        fleet = Fleet(settle=executor.settle, mint=_mint, records=records)
        dispatchers[executor.name] = Dispatcher(executor, fleet, store, clock)
    environments = Environments(dispatchers, store, supervisor, clock.now)
    templates = {
        name: Templates(dispatcher.executor, dispatcher, environments)
        for name, dispatcher in dispatchers.items()
        if isinstance(dispatcher.executor, KeepsTemplates)
    }
    environments.on_untold += [each.wake for each in templates.values()]
    environments.fetchers += [each.fetch for each in templates.values()]
    carriers = {
        name: Carrier(dispatcher, store, environments.find, environments.start_failed, concurrency=CONCURRENT_STARTS)
        for name, dispatcher in dispatchers.items()
    }
    claims = Claims(dispatchers, environments.get, store, claim_wait=claim_wait, wake=environments.wake)
    deadlines = Deadlines(clock, store, claims.expire)
    claims.use(deadlines)
    environments.use(carriers, claims.waiting)
    for environment in await store.read(load_environments):
        environments.restore(environment)
    stored = await store.read(load_deadlines)
    for dispatcher in dispatchers.values():
        for runner in dispatcher.fleet.runners():
            if runner.phase is Phase.USED:
                deadlines.restore(runner, stored.get(runner.id))
    return Shell(clock, dispatchers, carriers, environments, templates, claims, deadlines, supervisor, store)


def _mint(environment: EnvironmentId) -> RunnerId:
    return RunnerId(f"{environment}-{uuid4()}")

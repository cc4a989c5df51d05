"""Keeps an executor's templates and our environments in agreement. What the store knows counts.

Puts and removals tell the executor themselves, first; this is for what happened while one of both wasn't there.
"""

from collections.abc import Iterable

import structlog
import trio

from poseidon.core.model import Environment
from poseidon.errors import ExecutorError
from poseidon.executors.base import KeepsTemplates
from poseidon.runners.delays import Delays
from poseidon.runners.dispatcher import Dispatcher
from poseidon.runners.environments import Environments

log = structlog.get_logger(__name__)


class Templates:
    """Of one executor."""

    def __init__(self, keeper: KeepsTemplates, dispatcher: Dispatcher, environments: Environments) -> None:
        self._keeper = keeper
        self._dispatcher = dispatcher
        self._environments = environments

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The service: agree once, and again for each environment whose template had to wait."""
        task_status.started()
        delays = Delays(first=0.5, most=30)
        while True:
            try:
                await self._agree()
            except ExecutorError as error:
                log.warning("templates not compared", executor=self._dispatcher.executor.name, error=error.message)
                await trio.sleep(delays.next())
            else:
                delays = Delays(first=0.5, most=30)
                await self._environments.waiting_for_template()

    async def _agree(self) -> None:
        kept = {environment.id: environment for environment in await self._keeper.environments()}
        await self._register(kept)
        strangers = [found for found in kept.values() if self._environments.find(found.id) is None]
        await self._environments.take_over(strangers, self._dispatcher.list_all)

    async def _register(self, kept: Iterable[int]) -> None:
        """Those of ours that the executor doesn't have, or has as they were before."""
        known = set(kept)
        for environment in self._environments.list():
            if not self._is_kept_here(environment):
                continue
            if environment.id not in known or environment.id in self._environments.untold:
                await self._keeper.put_template(environment)
                self._environments.untold.discard(environment.id)
                log.info("template registered again", environment_id=environment.id)

    def _is_kept_here(self, environment: Environment) -> bool:
        return environment.executor == self._dispatcher.executor.name

"""Keeps an executor's templates and our environments in agreement. What the store knows counts.

Puts and removals tell the executor themselves, first; this is for what happened while one of both wasn't there, and
for what others have put into the executor.
"""

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

import structlog
import trio

from poseidon.core.model import Environment, EnvironmentId
from poseidon.errors import ExecutorError, StoreError
from poseidon.executors.base import KeepsTemplates
from poseidon.runners.delays import Delays
from poseidon.runners.dispatcher import Dispatcher
from poseidon.runners.environments import Environments

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Asked:
    """Somebody waits for the next agreement."""

    over: trio.Event = field(default_factory=trio.Event)
    error: ExecutorError | StoreError | None = None


class Templates:
    """Of one executor."""

    def __init__(self, keeper: KeepsTemplates, dispatcher: Dispatcher, environments: Environments) -> None:
        self._keeper = keeper
        self._dispatcher = dispatcher
        self._environments = environments
        self._woken = trio.Event()
        self._asked: list[_Asked] = []
        self._stray: set[EnvironmentId] = set()
        """Those whose template has vanished, or isn't as we left it."""
        dispatcher.on_templates.append(self._compare)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The service: agree once, then when somebody asks for it or a comparison demands it, and until no template has
        to wait."""
        task_status.started()
        delays = Delays(first=0.5, most=30)
        while True:
            self._woken = trio.Event()
            agreed = await self._try() and not self._environments.untold
            if agreed:
                delays.made = 0
            with trio.move_on_after(math.inf if agreed else delays.next()):
                await self._woken.wait()

    def wake(self) -> None:
        """There is something to tell the executor."""
        self._woken.set()

    def _compare(self, kept: Set[EnvironmentId]) -> None:
        """The executor has these as we left them. What was removed on purpose isn't known any more."""
        missing = {environment.id for environment in self._ours()} - kept
        if missing:
            self._stray |= missing
            self.wake()

    def _ours(self) -> Iterator[Environment]:
        name = self._dispatcher.executor.name
        return (environment for environment in self._environments.list() if environment.executor == name)

    async def fetch(self) -> None:
        """Wait until both agree, as of now. The service sees to it: a client that hangs up leaves nothing half done.
        Raises ExecutorError, StoreError."""
        asked = _Asked()
        self._asked.append(asked)
        self.wake()
        await asked.over.wait()
        if asked.error is not None:
            raise asked.error

    async def _try(self) -> bool:
        asked, self._asked = self._asked, []
        error = None
        try:
            await self._agree()
        except (ExecutorError, StoreError) as failed:
            error = failed
            log.warning("templates not compared", executor=self._dispatcher.executor.name, error=error.message)
        finally:
            for each in asked:
                each.error = error
                each.over.set()
        return error is None

    async def _agree(self) -> None:
        """Of an environment that both know, nothing changes."""
        removed = self._environments.count_removals()
        kept = {environment.id: environment for environment in await self._keeper.environments()}
        await self._register(kept)
        await self._environments.take_over(kept.values(), removed, self._dispatcher.list_all)

    async def _register(self, kept: Iterable[int]) -> None:
        """Those of ours that the executor doesn't have, or has as they were before."""
        ours = list(self._ours())
        self._stray &= {environment.id for environment in ours}
        fine = set(kept) - self._stray - self._environments.untold
        for environment in ours:
            if environment.id not in fine:
                await self._environments.register_again(environment.id)
            self._stray.discard(environment.id)

"""One `poseidon run`: claim, copy, execute, converse, release. The runner is released however it ends."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from poseidon.cli import wire
from poseidon.cli.api import Api
from poseidon.cli.conversation import Conversation, Ending
from poseidon.cli.failures import CommandFailed, DaemonRefused, complain, printable
from poseidon.cli.program import Program
from poseidon.cli.terminal import Terminal
from poseidon.cli.timings import Timings
from poseidon.errors import PoseidonError

SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGCONT)
DAY = 24 * 3600
"""Without a time limit a runner that we can no longer release is kept for so long."""
MARGIN = 60
"""Seconds beyond a time limit for all that isn't the program itself."""
FAREWELL = 5
"""Seconds for what must still be told to the daemon when we are leaving."""
DEFAULT = wire.Environment(id=1, image="default", prewarming_pool_size=1, exposed_ports=[])
NOT_FOUND = 404
SAME_TERMINAL = "exec 2>&1; "
"""The daemon keeps stderr apart; without a terminal there, a shell shows no prompt, and lines may swap places."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for on the command line."""

    program: Program
    environment: int | None = None
    time_limit: int = 0
    privileged: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def inactivity_timeout(self) -> int:
        """When the daemon may take the runner back without us."""
        return self.time_limit + MARGIN if self.time_limit else DAY


class Session:
    """A wish being fulfilled."""

    def __init__(self, api: Api, wish: Wish, terminal: Terminal, timings: Timings) -> None:
        self._api, self._wish, self._terminal, self._timings = api, wish, terminal, timings
        self._scope = trio.CancelScope()
        self._ended_by: int | None = None
        self._conversation: Conversation | None = None

    async def run(self) -> int:
        """Do all of it; the exit code."""
        ending = Ending(0)
        with trio.open_signal_receiver(*SIGNALS) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._heed, signals)
                with self._scope:
                    ending = await self._perform()
                nursery.cancel_scope.cancel()
        if self._ended_by is not None:
            return 128 + self._ended_by
        if ending.message:
            complain(printable(ending.message))
        return ending.code

    async def _heed(self, signals: AsyncIterator[int]) -> None:
        """Until the program runs, a signal ends us; then the first Ctrl-C is the program's."""
        async for number in signals:
            talk = self._conversation
            if number in (signal.SIGWINCH, signal.SIGCONT):
                self._terminal.make_raw()
                if talk:
                    talk.resize()
            elif number != signal.SIGINT or talk is None or not talk.interrupt():
                self._ended_by = number
                self._scope.cancel()

    async def _perform(self) -> Ending:
        environment = await self._environment()
        self._timings.lap("environment")
        async with self._claimed(environment) as runner:
            self._timings.lap("claim")
            if self._wish.program.files:
                await self._api.copy(runner, self._wish.program.files)
                self._timings.lap("copy")
            url = await self._api.execute(runner, self._request())
            self._timings.lap("execute")
            self._conversation = Conversation(self._terminal, self._timings)
            return await self._conversation.hold(url, self._api.target)

    def _request(self) -> dict[str, object]:
        wish = self._wish
        body: dict[str, object] = {
            "command": (SAME_TERMINAL if self._terminal.whole else "") + wish.program.line,
            "timeLimit": wish.time_limit,
            "privilegedExecution": wish.privileged,
            "environment": dict(wish.variables),
            "tty": self._terminal.interactive,
        }
        if self._terminal.interactive:
            rows, columns = self._terminal.size
            body |= {"rows": rows, "columns": columns, "environment": {**self._terminal.kind, **wish.variables}}
        return body

    async def _environment(self) -> int:
        """The one asked for, else the only one, else a new one."""
        if self._wish.environment is not None:
            return self._wish.environment
        known = await self._api.environments()
        if len(known) > 1:
            raise CommandFailed(f"which environment? name one with --environment: {listed(known)}")
        if known:
            return known[0].id
        await self._api.put_environment(DEFAULT)
        complain(f"there was no environment yet: created {listed([DEFAULT])}")
        return DEFAULT.id

    @asynccontextmanager
    async def _claimed(self, environment: int) -> AsyncIterator[str]:
        """A runner of our own; released at the end, though we may have been cancelled while claiming it."""
        runners: list[str] = []

        async def claim() -> None:
            runners.append(await self._claim(environment))

        try:
            await finish(claim)
            yield runners[0]
        finally:
            with trio.move_on_after(FAREWELL, shield=True) as farewell:
                for runner in runners:
                    await self._release(runner)
            if farewell.cancelled_caught:
                complain(f"runner {runners[0]} may be left over: the daemon doesn't answer")

    async def _claim(self, environment: int) -> str:
        try:
            return await self._api.claim(environment, inactivity_timeout=self._wish.inactivity_timeout)
        except DaemonRefused as error:
            if error.http_status != NOT_FOUND:
                raise
        known = listed(await self._api.environments()) or "none at all"
        raise CommandFailed(f"there is no environment {environment}; there are: {known}")

    async def _release(self, runner: str) -> None:
        try:
            await self._api.release(runner)
        except PoseidonError as error:
            complain(printable(f"runner {runner} may be left over: {error.message}"))
        self._timings.lap("release")


async def finish(work: Callable[[], Awaitable[None]]) -> None:
    """Let *work* end although we're cancelled, for a short while: what it brings about has to be undone."""
    done = trio.Event()
    shelter = trio.CancelScope(shield=True)

    async def sheltered() -> None:
        with shelter:
            await work()
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sheltered)
        try:
            await done.wait()
        finally:
            shelter.deadline = trio.current_time() + FAREWELL


def listed(environments: list[wire.Environment]) -> str:
    """`1 (default), 2 (python)`."""
    return ", ".join(f"{known.id} ({known.image})" for known in environments)

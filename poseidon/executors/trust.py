"""Whether an executor may be asked to do something: not before it is sure that it is the one that we know."""

from collections.abc import Awaitable, Callable

import trio

from poseidon.errors import ExecutorUnreachable


class Trust:
    """Given, until somebody has doubts. Who needs it looks for itself, and else waits until the doubt is settled."""

    def __init__(self) -> None:
        self.look: Callable[[], Awaitable[bool]] | None = None
        """Whether it is the right one: True is sure, False tells nothing. Raises ExecutorUnreachable."""
        self._given = True
        self._why_not: str | None = None
        self._settled = trio.Event()
        self._settled.set()
        self._turn = trio.Lock()
        self._looks = 0
        self._failure: ExecutorUnreachable | None = None
        """What became of the newest look."""

    @property
    def given(self) -> bool:
        """Whether anything may be asked."""
        return self._given

    def give(self) -> None:
        """It is the right one."""
        self._settle(given=True, why_not=None)

    def suspend(self) -> None:
        """It will turn out soon."""
        self._given, self._why_not = False, None
        if self._settled.is_set():
            self._settled = trio.Event()

    def refuse(self, why: str) -> None:
        """It is another one."""
        self._settle(given=False, why_not=why)

    def _settle(self, *, given: bool, why_not: str | None) -> None:
        self._given, self._why_not = given, why_not
        self._settled.set()

    async def needed(self) -> None:
        """Return once it is given. Raises ExecutorUnreachable if it is refused, or if nobody answers."""
        if not self._given:
            await self._look_together()
        while not self._given:
            if self._why_not is not None:
                raise ExecutorUnreachable(self._why_not)
            await self._settled.wait()

    async def _look_together(self) -> None:
        """One look is enough for all who wait for it."""
        looks = self._looks
        async with self._turn:
            if self._looks == looks and not self._given and self.look is not None:
                self._failure = None
                try:
                    sure = await self.look()
                except ExecutorUnreachable as error:
                    self._failure, sure = error, False
                self._looks += 1
                if sure:
                    self.give()
            if not self._given and self._failure is not None:
                raise ExecutorUnreachable(self._failure.message)

"""Whether an executor may be asked to do something: not before it is sure that it is the one that we know."""

import trio

from poseidon.errors import ExecutorUnreachable


class Trust:
    """Given, until somebody has doubts. Who needs it waits while that isn't settled."""

    def __init__(self) -> None:
        self._given = True
        self._why_not: str | None = None
        self._settled = trio.Event()
        self._settled.set()

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
        """It isn't, or can't be found out at present."""
        self._settle(given=False, why_not=why)

    def _settle(self, *, given: bool, why_not: str | None) -> None:
        self._given, self._why_not = given, why_not
        self._settled.set()

    async def needed(self) -> None:
        """Return once it is given. Raises ExecutorUnreachable if it is refused."""
        while not self._given:
            if self._why_not is not None:
                raise ExecutorUnreachable(self._why_not)
            await self._settled.wait()

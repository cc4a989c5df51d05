"""A work on its way to the disk, as both the Trio thread and the writer's thread see it."""

from collections.abc import Callable
from typing import Generic, TypeVar

import trio
from sqlalchemy import Connection

from poseidon.errors import StoreError

T = TypeVar("T")
Work = Callable[[Connection], T]


class Ticket(Generic[T]):
    """Belongs to the Trio thread; the writer's thread only reads *work* and *kept*."""

    __slots__ = ("_error", "_refusal", "_result", "_waiters", "kept", "settled", "work")

    def __init__(self, work: Work[T], *, kept: bool) -> None:
        self.work = work
        self.kept = kept
        """While the disk refuses: tried again, for memory is ahead of it already; else given up."""
        self.settled = False
        self._result: list[T] = []
        self._error: Exception | None = None
        self._refusal = ""
        self._waiters = trio.lowlevel.ParkingLot()

    async def wait(self) -> T:
        """Wait until the work is durable. Cancelling this doesn't cancel the work.

        Raises what the work raised; StoreError while the disk refuses (a kept work is tried again all the same).
        """
        if self.settled:
            await trio.lowlevel.checkpoint()
        else:
            await self._waiters.park()
        if self._error is not None:
            raise self._error
        if not self.settled:  # woken all the same: refused
            raise StoreError(self._refusal)
        return self._result[0]

    def settle(self, result: T) -> None:
        """The work is durable."""
        self._result.append(result)
        self.settled = True
        self._waiters.unpark_all()

    def fail(self, error: Exception) -> bool:
        """The work is over without effect. Tells whether anybody hears it."""
        self._error = error
        self.settled = True
        return bool(self._waiters.unpark_all())

    def refuse(self, error: StoreError) -> None:
        """Not durable yet, and nobody knows when: those who wait now shall not wait longer."""
        self._refusal = error.message
        self._waiters.unpark_all()

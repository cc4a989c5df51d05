"""Makes sure that what answers is the executor that we know, before anything is believed of it or asked of it.

Behind a wrong address there may be a real cluster: by its listing all of our jobs would be gone.
"""

import trio

from poseidon.core.fleet import Fleet
from poseidon.core.model import Listing
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import Batch, Executor, HasAnAddress

LOOK_WITHIN = 5.0
MOST_HELD = 100_000
"""Values that are kept until the first listing; it takes a second or two."""


class Recognition:
    """Of one executor. One without an address is the right one at any time."""

    def __init__(self, executor: Executor, fleet: Fleet) -> None:
        self._executor = executor if isinstance(executor, HasAnAddress) else None
        self._fleet = fleet
        self._held: list[Batch] = []
        self._size = 0
        self.sure = self._executor is None
        """Whether what the stream tells may be believed."""
        if self._executor is not None and fleet.expected():
            self._executor.trust.suspend()

    async def begin(self) -> None:
        """The executor is followed anew. One look is mostly enough to know it; else its first listing tells."""
        self._held, self._size = [], 0
        if self._executor is None:
            return
        self.sure = not self._fleet.expected() or await self._has_one()
        if self.sure:
            self._executor.trust.give()
        elif self._executor.trust.given:
            self._executor.trust.suspend()

    async def lose(self, why: str) -> None:
        """It is no longer followed. If only its stream has broken, all else goes on."""
        if self._executor is None or not self._fleet.expected():
            return
        if self._executor.trust.given:
            self._executor.trust.suspend()
            if self.sure and await self._has_one():
                self._executor.trust.give()
                return
        self._executor.trust.refuse(why)

    async def _has_one(self) -> bool:
        witness = self._fleet.witness()
        if self._executor is None or witness is None:
            return False
        try:
            with trio.move_on_after(LOOK_WITHIN):
                return await self._executor.has(witness)
        except ExecutorUnreachable:
            pass  # whatever else is asked finds that too
        return False

    def hold(self, batch: Batch) -> None:
        """News that wait until it is sure whose they are. Raises ExecutorUnreachable."""
        self._held.append(batch)
        self._size += len(batch.values)
        if self._size > MOST_HELD:
            raise ExecutorUnreachable(f"more than {MOST_HELD} changes came before the first listing")

    def release(self) -> list[Batch]:
        """What was held, in its order."""
        held, self._held, self._size = self._held, [], 0
        return held

    def check(self, listing: Listing) -> None:
        """Raises ExecutorUnreachable for a listing of another executor."""
        if self._executor is None:
            return
        self.sure = self._fleet.recognises(listing)
        if not self.sure:
            raise ExecutorUnreachable(_stranger(self._executor.address, self._fleet.expected()))
        self._executor.trust.give()


def _stranger(address: str, expected: int) -> str:
    jobs = "job that is" if expected == 1 else f"{expected} jobs that are"
    return (
        f"{address} isn't the cluster that this database belongs to: it has nothing of the {jobs} known to be there. "
        "Nothing is started or stopped in it. Correct the address, or the namespace; if it is right and the cluster "
        "has lost everything, stop Poseidon, run `poseidon db forget-cluster`, and start it again"
    )

"""Makes sure that what answers is the executor that we know, before anything is believed of it or asked of it.

Behind a wrong address there may be a real cluster: by its listing all of our jobs would be gone.
"""

from contextlib import suppress

import trio

from poseidon.core.events import Asked
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
        self._is_stranger = False
        if self._executor is not None:
            self._executor.trust.look = self._has_one
            if fleet.expected():
                self._executor.trust.suspend()

    async def begin(self) -> None:
        """The executor is followed anew. One look is mostly enough to know it; else its first listing tells."""
        self._held, self._size = [], 0
        if self._executor is None:
            return
        self.sure = False
        with suppress(ExecutorUnreachable):  # the listing finds that too, and says so
            self.sure = await self._has_one()
        if self.sure:
            self._believe()
        elif self._executor.trust.given:
            self._executor.trust.suspend()

    def lose(self, why: str) -> None:
        """It is no longer followed. Where only its stream has broken, a look is enough to go on with all else."""
        if self._executor is None or not self._fleet.expected():
            return
        if self._is_stranger:
            self._executor.trust.refuse(why)
        else:
            self._executor.trust.suspend()

    def _believe(self) -> None:
        self._is_stranger = False
        if self._executor is not None:
            self._executor.trust.give()

    async def _has_one(self) -> bool:
        """Whether a job is there that must be there, or there is nothing to lose. Raises ExecutorUnreachable."""
        witness = self._fleet.witness()
        if self._executor is None or witness is None:
            return True
        with trio.move_on_after(LOOK_WITHIN):
            return await self._executor.has(witness)
        raise ExecutorUnreachable(f"{self._executor.address} doesn't tell whether it has job {witness}")

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

    def knows(self, listing: Listing, asked: Asked) -> bool:
        """Whether a listing is of the executor that we know. News of our jobs tell that as well: one that has never
        been placed leaves nothing else when it is stopped."""
        return self._fleet.recognises(listing, asked.jobs_version) or any(
            self._fleet.job(value.job) is not None for batch in self._held for value in batch.values
        )

    def check(self, listing: Listing, asked: Asked) -> None:
        """Raises ExecutorUnreachable for a listing of another executor."""
        if self._executor is None:
            return
        self.sure = self.knows(listing, asked)
        if not self.sure:
            self._is_stranger = True
            raise ExecutorUnreachable(_stranger(self._executor.address, self._fleet.expected()))
        self._believe()


def _stranger(address: str, expected: int) -> str:
    jobs = "job that is" if expected == 1 else f"{expected} jobs that are"
    return (
        f"{address} isn't the cluster that this database belongs to: it has nothing of the {jobs} known to be there. "
        "Nothing is started or stopped in it. Correct the address, or the namespace; if it is right and the cluster "
        "has lost everything, stop Poseidon, run `poseidon db forget-cluster`, and start it again"
    )

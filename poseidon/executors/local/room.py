"""How much of this machine its runners have been promised."""

from poseidon.errors import BudgetExhausted, Unsupported
from poseidon.executors.local.settings import LocalSettings


class Room:
    """A budget of memory and of runners. What is taken is given back only when the sandbox is proven gone."""

    def __init__(self, settings: LocalSettings) -> None:
        self._overhead = settings.overhead_mb
        self._memory = settings.budget()
        self._runners = settings.runners()
        self._promised = 0
        self._count = 0

    def check_size(self, memory_mb: int) -> None:
        """Raise Unsupported if a runner of this size couldn't even be the only one."""
        if memory_mb + self._overhead > self._memory:
            raise Unsupported(
                f"memoryLimit {memory_mb} is too large: all runners together have {self._memory} MB, "
                f"{self._overhead} MB of them for the helper of each"
            )

    def check(self, memory_mb: int) -> None:
        """Raise BudgetExhausted if a runner of this size doesn't fit in."""
        needed = memory_mb + self._overhead
        if self._promised + needed > self._memory:
            free = max(0, self._memory - self._promised)
            raise BudgetExhausted(f"memory exhausted: {needed} MB needed, {free} of {self._memory} MB free")
        if self._count >= self._runners:
            raise BudgetExhausted(f"runners exhausted: {self._runners} are running, as many as allowed")

    def take(self, memory_mb: int) -> None:
        """Promise; those found again are taken in even if the budget has become smaller."""
        self._promised += memory_mb + self._overhead
        self._count += 1

    def give_back(self, memory_mb: int) -> None:
        """Its runner is gone."""
        self._promised -= memory_mb + self._overhead
        self._count -= 1

"""How long each step of a run took."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Laps, each since the one before."""

    laps: list[tuple[str, float]] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """The step *name* is done."""
        now = time.perf_counter()
        self.laps.append((name, now - self.last))
        self.last = now

    def lines(self) -> list[str]:
        """For a person, with the total."""
        laps = [*self.laps, ("total", time.perf_counter() - self.begun)]
        return [f"{name:<13}{seconds * 1000:>10.1f} ms" for name, seconds in laps]

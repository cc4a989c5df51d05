"""Waits between attempts: doubling, with jitter, up to a most."""

import random
from dataclasses import dataclass


@dataclass(slots=True)
class Delays:
    """Seconds to wait, one after the other; a new value starts over."""

    first: float
    most: float
    made: int = 0

    def next(self) -> float:
        """The next wait, 75 to 125 % of its nominal length, so that many don't ask at once."""
        nominal = min(self.most, self.first * 2.0**self.made)
        self.made += 1
        return nominal * random.uniform(0.75, 1.25)  # noqa: S311

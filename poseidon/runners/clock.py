"""Dates that never run backwards: the wall clock at the start plus what has passed since."""

import time

import trio


class Clock:
    """*now* in seconds since the epoch; comparable across restarts, unmoved by corrections of the system's clock."""

    def __init__(self) -> None:
        self._offset = time.time() - trio.current_time()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._offset + trio.current_time()

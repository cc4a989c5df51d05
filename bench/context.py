"""What each measurement is given."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.report import Report

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Bench:
    """One run. *folder* is for its data; *wants* tells whether a figure is asked for."""

    report: Report
    folder: Path
    wants: Callable[[str], bool]

    def pick(self, full: T, quick: T) -> T:
        """How much to do."""
        return quick if self.report.quick else full


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measures the figures called *names*."""

    names: tuple[str, ...]
    run: Callable[[Bench], Awaitable[None]]

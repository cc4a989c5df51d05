"""What was measured: collected by name, printed as a table, written as JSON."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.catalogue import BY_NAME, FIGURES, MS, RATE, Figure

LATEST = Path(__file__).parent / "results" / "latest.json"
COLUMNS = (20, 44, 16, 10, 9, 34, 7, 15, 7)
HEADINGS = ("name", "what", "median", "p99", "reference", "which is", "ratio", "target", "verdict")


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of this run."""

    value: float
    p99: float | None
    samples: int
    reference: float | None


@dataclass(slots=True)
class Report:
    """*log*: tells progress on stderr."""

    quick: bool
    results: dict[str, Measured] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def note(self, name: str, samples: Sequence[float], reference: Sequence[float] = ()) -> None:
        """Medians count; a single value is its own. The slowest of times are told as well."""
        p99 = percentile(samples, 0.99) if len(samples) >= 20 and BY_NAME[name].unit == MS else None
        beside = statistics.median(reference) if reference else None
        self.results[name] = Measured(statistics.median(samples), p99, len(samples), beside)

    def failed(self, names: Sequence[str], error: BaseException) -> None:
        """These could not be measured."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = f"{type(error).__name__}: {error}"
        self.failures |= {name: reason for name in names if name not in self.results}
        self.progress(f"failed: {reason}")

    def progress(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    def table(self) -> str:
        """For people."""
        lines = [_line(HEADINGS), _line(tuple("-" * width for width in COLUMNS))]
        for figure in FIGURES:
            if figure.name in self.results:
                lines.append(_line(_cells(figure, self.results[figure.name])))
            elif figure.name in self.failures:
                lines.append(f"{figure.name:<{COLUMNS[0]}}  {self.failures[figure.name]}")
        return "\n".join(lines)

    def markdown(self) -> str:
        """For docs/bench.md."""
        rows = [_cells(figure, self.results[figure.name]) for figure in FIGURES if figure.name in self.results]
        return "\n".join(f"| {' | '.join(row)} |" for row in (HEADINGS, ("---",) * len(HEADINGS), *rows))

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        rows = [_row(figure, self.results[figure.name]) for figure in FIGURES if figure.name in self.results]
        machine = {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load": round(self.load, 2),
        }
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return {"at": at, "quick": self.quick, "machine": machine, "figures": rows, "failures": self.failures}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n")


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that *share* of all don't exceed."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def ratio_of(measured: Measured) -> float | None:
    """The figure in units of its reference."""
    return measured.value / measured.reference if measured.reference else None


def verdict(figure: Figure, measured: Measured) -> str:
    """ok, near, miss; empty where nothing is demanded."""
    return figure.target.verdict(measured.value, ratio_of(measured)) if figure.target else ""


def _row(figure: Figure, measured: Measured) -> dict[str, Any]:
    ratio = ratio_of(measured)
    return {
        "name": figure.name,
        "what": figure.what,
        "unit": figure.unit,
        "value": _rounded(measured.value),
        "p99": _rounded(measured.p99),
        "samples": measured.samples,
        "reference": _rounded(measured.reference),
        "reference_is": figure.reference,
        "ratio": _rounded(ratio),
        "target": str(figure.target) if figure.target else "",
        "verdict": verdict(figure, measured),
    }


def _cells(figure: Figure, measured: Measured) -> tuple[str, ...]:
    ratio = ratio_of(measured)
    beside = "" if measured.reference is None else figure.reference
    return (
        figure.name,
        figure.what,
        f"{_short(measured.value)} {figure.unit}" if figure.unit != RATE else f"{_short(measured.value)}{RATE}",
        _short(measured.p99),
        _short(measured.reference),
        beside,
        _short(ratio),
        str(figure.target) if figure.target else "",
        verdict(figure, measured),
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, COLUMNS, strict=True)).rstrip()


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

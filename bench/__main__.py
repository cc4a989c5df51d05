"""`python -m bench`, or `make bench`: measure, print a table, write bench/results/latest.json."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trio

from bench import claims, core, http, listings, pools, sandboxes, starts
from bench.catalogue import BY_NAME, chosen
from bench.context import Bench
from bench.report import LATEST, Report
from poseidon.telemetry.logging import setup_logging

MEASUREMENTS = (
    *core.MEASUREMENTS,
    *starts.MEASUREMENTS,
    *listings.MEASUREMENTS,
    *pools.MEASUREMENTS,
    *claims.MEASUREMENTS,
    *http.MEASUREMENTS,
    *sandboxes.MEASUREMENTS,
)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 however slow it was, 1 if something could not be measured."""
    options = _options(arguments)
    report = Report(options.quick)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))  # tidied up alike
    interrupted = False
    try:
        _run(report, chosen(options.only))
    except* KeyboardInterrupt:
        interrupted = True
    if interrupted:
        report.progress("interrupted; all that was started is stopped")
        return 130
    report.write(options.output)
    print(report.markdown() if options.markdown else report.table())
    report.progress(f"{time.monotonic() - began:.0f} s; load before: {report.load:.2f}; written to {options.output}")
    return 1 if report.failures else 0


def _run(report: Report, wanted: Callable[[str], bool]) -> None:
    # What runs in this process logs like the daemon does, so that this costs the same; but nobody reads it.
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory(prefix="poseidon-bench-") as folder:
        setup_logging("info", "json", stream=nowhere)
        trio.run(_measure, Bench(report, Path(folder), wanted))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds of each, to see that it works")
    parser.add_argument(
        "--only", metavar="NAME", help="one figure, or all whose names begin so: execution, pool.daemon"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as it stands in docs/bench.md")
    parser.add_argument("--output", type=Path, default=LATEST, help="where to write the figures as JSON")
    options = parser.parse_args(arguments)
    if options.only is not None and not any(map(chosen(options.only), BY_NAME)):
        parser.error(f"no figure is called {options.only!r}; there are {', '.join(BY_NAME)}")
    return options


async def _measure(bench: Bench) -> None:
    for measurement in MEASUREMENTS:
        wanted = [name for name in measurement.names if bench.wants(name)]
        if not wanted:
            continue
        bench.report.progress(f"{', '.join(wanted)} …")
        try:
            await measurement.run(bench)
        except Exception as error:
            bench.report.failed(wanted, error)


if __name__ == "__main__":
    sys.exit(main())

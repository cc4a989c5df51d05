"""The HTTP server by its cheapest request, beside plain Hypercorn with the same framework."""

import signal
from functools import partial

from bench.context import Bench, Measurement
from bench.daemons import INSTANT, PLAIN, Daemon, open_connections, open_daemon
from bench.timing import rush


async def measure(bench: Bench) -> None:
    """In turn, with one client and with sixteen."""
    async with open_daemon(bench.folder / "http", INSTANT) as ours, open_daemon(bench.folder / "plain", PLAIN) as plain:
        for name, clients in (("http.one", 1), ("http.sixteen", 16)):
            rates: list[float] = []
            beside: list[float] = []
            for _ in range(bench.pick(3, 1)):
                rates.append(await _rate(bench, ours, clients))
                beside.append(await _rate(bench, plain, clients))
            bench.report.note(name, rates, beside)
        await plain.end(signal.SIGKILL)


async def _rate(bench: Bench, daemon: Daemon, clients: int) -> float:
    async with open_connections(daemon, clients) as connections:
        steps = [partial(each.status, "/health") for each in connections]
        await rush(steps, seconds=bench.pick(0.2, 0.05))
        return (await rush(steps, seconds=bench.pick(1.0, 0.1))).rate


MEASUREMENTS = (Measurement(("http.one", "http.sixteen"), measure),)

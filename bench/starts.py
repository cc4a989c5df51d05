"""The daemon's own start, and its restart with many runners."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import trio

from bench.bare import python, run_process
from bench.claims import open_core
from bench.context import Bench, Measurement
from bench.daemons import INSTANT, TOP, Client, Daemon, open_clients
from bench.timing import milliseconds


async def measure_start(bench: Bench) -> None:
    """First with a new store, then again with that store; the bytecode is there in either case."""
    compile_all(TOP / "poseidon")
    times: dict[str, list[float]] = {"fresh": [], "health": [], "trio": [], "python": []}
    for number in range(bench.pick(7, 1)):
        daemon = Daemon(bench.folder / f"start-{number}")
        daemon.folder.mkdir()
        try:
            for name in ("fresh", "health"):
                times[name].append(await daemon.start())
                await daemon.end()
        finally:
            with trio.CancelScope(shield=True):
                await daemon.clear()
        times["trio"].append(await milliseconds(partial(run_process, python("import trio"))))
        times["python"].append(await milliseconds(partial(run_process, python("pass"))))
    bench.report.note("start.health", times["health"], times["trio"])
    bench.report.note("start.fresh", times["fresh"], times["python"])


def compile_all(folder: Path) -> None:
    """As an installation does."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True, stdout=subprocess.DEVNULL)


async def measure_restart(bench: Bench) -> None:
    """From exec to a claim, with many runners in the store and with one, in turn."""
    crowd = bench.pick(1000, 20)
    daemons = {size: Daemon(bench.folder / f"restart-{size}", INSTANT) for size in (crowd, 1)}
    times: dict[int, list[float]] = {size: [] for size in daemons}
    for size, daemon in daemons.items():
        async with open_core(daemon.folder, size):
            pass  # its store stays, with as many runners
    try:
        for _ in range(bench.pick(7, 1)):
            for size, daemon in daemons.items():
                times[size].append(await milliseconds(partial(_until_claimed, daemon)))
                async with open_clients(daemon) as (client,):
                    await client.full()
                await daemon.end()
    finally:
        with trio.CancelScope(shield=True):
            for daemon in daemons.values():
                await daemon.clear()
    bench.report.note("restart.claim", times[crowd], times[1])


async def _until_claimed(daemon: Daemon) -> None:
    daemon.spawn()
    connection = await daemon.connect()
    await Client(connection).claim()
    await connection.aclose()


MEASUREMENTS = (
    Measurement(("start.health", "start.fresh"), measure_start),
    Measurement(("restart.claim",), measure_restart),
)

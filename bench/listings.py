"""How long it takes to list a cluster whose runners are known, after its event stream has broken."""

import time
from collections.abc import Awaitable, Callable

import trio

from bench.context import Bench, Measurement
from poseidon.executors.nomad.executor import open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from tests.nomad.crowd import Crowd
from tests.runners.shell import open_rig, until

MS = 1000.0


async def measure(bench: Bench) -> None:
    """Two lists asked for, read and applied; the cluster is a loopback in this very process."""
    times: dict[int, list[float]] = {}
    crowd = bench.pick(1000, 50)
    for size in (crowd, 1):
        times[size] = await _times(bench, size)
    bench.report.note("nomad.listing", times[crowd], times[1])


async def _times(bench: Bench, size: int) -> list[float]:
    crowd, folder = Crowd(size), bench.folder / f"listing-{size}"
    folder.mkdir()
    await trio.to_thread.run_sync(crowd.remember, folder / "poseidon.db")
    async with crowd.serve() as nomad:
        settings = NomadSettings(address=nomad.url, list_interval=1000)
        async with open_nomad(settings) as executor, open_rig(folder, executor) as rig:  # type: ignore[arg-type]
            dispatcher = rig.shell.dispatchers["nomad"]
            await until(lambda: dispatcher.reachable, within=60)
            return [await _one(dispatcher.list_all) for _ in range(bench.pick(21, 2))]


async def _one(listing: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await listing()
    return (time.perf_counter() - began) * MS


MEASUREMENTS = (Measurement(("nomad.listing",), measure),)

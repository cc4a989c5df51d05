"""Runners from nothing, and the whole cycle of a client: claim, copy, run, delete."""

from functools import partial

import trio

from bench.bare import run_bubblewrap
from bench.conversations import run
from bench.daemons import Client, open_clients
from bench.site import Site
from bench.timing import in_turn, milliseconds, rush
from poseidon.core.model import Allocation

EMPTY = 2
"""An environment whose pool has size 0."""
FILES = {
    "main.sh": b". ./lib.sh\ngreet input.txt\n",
    "lib.sh": b'greet() { echo "Hello $(cat "$1")"; }\n',
    "input.txt": b"world\n",
}
COMMAND = "sh main.sh"
OUTPUT = "Hello world\n"


async def measure_starts(site: Site) -> None:
    """Runners from nothing."""
    await site.client.put(0, EMPTY)
    started: list[Allocation] = []
    claimed: list[str] = []

    async def start() -> None:
        started.append(await site.bare.start())

    async def claim() -> None:
        claimed.append(await site.client.claim(EMPTY))

    times: dict[str, list[float]] = {"ready": [], "bubblewrap": [], "claim": []}
    stopped: list[float] = []
    for _ in range(site.bench.pick(40, 3)):
        samples = await in_turn(1, {"ready": start, "bubblewrap": run_bubblewrap, "claim": claim}, warm_up=0)
        for name, found in samples.items():
            times[name] += found
        stopped.append(await milliseconds(partial(site.bare.stop, started.pop())))
        await site.client.release(claimed.pop())
        await trio.sleep(0.05)  # whatever goes on in the background is not to disturb the next round
    site.bench.report.note("runner.ready", times["ready"], times["bubblewrap"])
    site.bench.report.note("runner.stopped", stopped)
    site.bench.report.note("claim.empty", times["claim"], times["ready"])


async def measure_cycles(site: Site) -> None:
    """One client beside the bare executor, then ten and fifty at once."""
    pick, note = site.bench.pick, site.bench.report.note
    await site.client.put(pick(12, 3))
    cycles: list[float] = []
    beside: list[float] = []
    for _ in range(pick(40, 2)):
        samples = await in_turn(
            1, {"cycle": partial(cycle, site.client), "bare": partial(_bare_cycle, site)}, warm_up=0
        )
        cycles += samples["cycle"]
        beside += samples["bare"]
    note("cycle.one", cycles, beside)
    await site.client.full()
    alone = await rush([partial(cycle, site.client)], seconds=pick(4.0, 0.3))
    note("cycle.one.rate", [alone.rate])
    for name, clients, seconds in (("cycle.ten", pick(10, 2), 8.0), ("cycle.fifty", pick(50, 4), 15.0)):
        async with open_clients(site.daemon, clients) as several:
            await site.client.full()
            together = await rush([partial(cycle, each) for each in several], seconds=pick(seconds, 0.3))
        note(name, together.each)
        note(f"{name}.rate", [together.rate])


async def cycle(client: Client) -> None:
    """What a learning platform does for one click."""
    runner = await client.claim()
    await client.copy(runner, FILES)
    said = await run(client, runner, COMMAND, tty=False)
    if said != OUTPUT:
        raise RuntimeError(f"the program said {said!r}")
    await client.release(runner)


async def _bare_cycle(site: Site) -> None:
    allocation = await site.bare.start()
    await site.bare.run(allocation, "true", tty=False)
    await site.bare.stop(allocation)

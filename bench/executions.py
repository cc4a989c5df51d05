"""Executions: what a command costs beside the bare executor, and what those cost that only wait."""

from contextlib import AsyncExitStack
from functools import partial
from statistics import median

import trio
from websockets.trio.client import connect

from bench import processes
from bench.bare import run_true
from bench.conversations import converse
from bench.site import Site
from bench.timing import Step, in_turn, milliseconds


async def measure_commands(site: Site) -> None:
    """`true`, in sandboxes of the same make."""
    await site.client.put(1)
    runner = await site.client.claim()
    allocation = await site.bare.start()
    times: dict[str, list[float]] = {}
    for _ in range(site.bench.pick(150, 5)):
        for tty, kind in ((True, "tty"), (False, "pipes")):
            said = await converse(await site.client.create(runner, "true", tty=tty))
            said.output()
            times.setdefault(kind, []).append(said.took)
            bare = partial(site.bare.run, allocation, "true", tty=tty)
            times.setdefault(f"bare {kind}", []).append(await milliseconds(bare))
        small: dict[str, Step] = {
            "host": run_true,
            "version": site.client.version,
            "created": partial(site.client.create, runner, "true", tty=False),
        }
        for name, found in (await in_turn(1, small, warm_up=0)).items():
            times.setdefault(name, []).extend(found)
    await site.bare.stop(allocation)
    await site.client.release(runner)
    note = site.bench.report.note
    for kind in ("tty", "pipes"):
        note(f"execution.{kind}", times[kind], times[f"bare {kind}"])
        note(f"executor.{kind}", times[f"bare {kind}"], times["host"])
    note("execution.overhead", [median(times["tty"]) - median(times["bare tty"])])
    note("execution.created", times["created"], times["version"])


async def measure_idle(site: Site) -> None:
    """Executions that only wait, their WebSockets open."""
    runners, each = site.bench.pick(10, 2), site.bench.pick(10, 2)
    await site.client.put(runners)
    claimed = [await site.client.claim() for _ in range(runners)]
    await site.client.put(0)
    await trio.sleep(site.bench.pick(1.0, 0.1))
    before = processes.memory({site.daemon.pid})
    async with AsyncExitStack() as stack:
        for runner in claimed * each:
            url = await site.client.create(runner, "sleep 600", tty=True)
            channel = await stack.enter_async_context(connect(url, compression=None, proxy=None, ping_interval=None))
            await channel.recv()
        await trio.sleep(site.bench.pick(1.0, 0.1))
        after = processes.memory({site.daemon.pid})
        shares = await processes.cpu_share(
            {"all": lambda: {site.daemon.pid} | site.daemon.sandboxes()}, site.bench.pick(10.0, 0.3)
        )
    site.bench.report.note("websocket.memory", [(after - before) / processes.KIB / runners / each])
    site.bench.report.note("idle.cpu", [shares["all"]])
    for runner in claimed:
        await site.client.release(runner)

"""How quickly the daemon still answers while hostile clients of all kinds do what they can."""

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from bench import processes
from bench.daemons import TOP, open_connections
from bench.report import percentile
from bench.site import Site
from bench.timing import milliseconds

WITHIN = 60.0
INTERVAL = 0.01


async def measure_hostile(site: Site) -> None:
    """GET /health on one connection, before the attacks and meanwhile."""
    await site.client.put(1)
    runner = await site.client.claim()
    seconds = site.bench.pick(15.0, 0.5)
    calm = await _asked(site, seconds / 3)
    processes.forget_peak(site.daemon.pid)
    before = processes.resident(site.daemon.pid)
    async with _attacked(site, runner):
        meanwhile = await _asked(site, seconds)
        risen = processes.peak(site.daemon.pid) - before
    note = site.bench.report.note
    note("hostile.health", meanwhile, calm)
    note("hostile.health.p99", [percentile(meanwhile, 0.99)], [percentile(calm, 0.99)])
    note("hostile.memory", [risen / processes.MIB])
    await site.client.release(runner)


async def _asked(site: Site, seconds: float) -> list[float]:
    samples: list[float] = []
    until = time.perf_counter() + seconds
    async with open_connections(site.daemon, 1) as (connection,):

        async def ask() -> None:
            if await connection.status("/health") != 204:
                raise RuntimeError("the daemon isn't healthy")

        while time.perf_counter() < until:
            samples.append(await milliseconds(ask))
            await trio.sleep(INTERVAL)
    return samples


@asynccontextmanager
async def _attacked(site: Site, runner: str) -> AsyncIterator[None]:
    """By a process of their own, from when all of them are there."""
    strength = site.bench.pick(1.0, 0.05)
    attackers = subprocess.Popen(
        [sys.executable, "-m", "bench.attacks", str(site.daemon.port), runner, "--strength", str(strength)],
        cwd=TOP,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert attackers.stdout is not None
        with trio.fail_after(WITHIN):
            line = await trio.to_thread.run_sync(attackers.stdout.readline, abandon_on_cancel=True)
        if line != b"under way\n":
            raise RuntimeError(f"the attacks failed: {line!r}")
        yield
        if attackers.poll() is not None:
            raise RuntimeError("the attacks ended early")
    finally:
        attackers.kill()
        attackers.communicate()

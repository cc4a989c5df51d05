"""A pool that nobody uses: what fifty idle runners cost, and the daemon beside them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import trio

from bench import processes
from bench.bare import PYTHON_INSIDE, bubblewrap, python
from bench.context import Bench, Measurement
from bench.daemons import open_clients, open_daemon
from bench.timing import milliseconds

WAIT = "import sys; print(flush=True); sys.stdin.read()"


async def measure(bench: Bench) -> None:
    """A daemon that has done nothing but fill the pool."""
    size = bench.pick(50, 3)
    async with open_daemon(bench.folder / "pool") as daemon, open_clients(daemon) as (client,):
        filled = await milliseconds(partial(client.put, size))
        await trio.sleep(bench.pick(2.0, 0.2))
        shares = await processes.cpu_share(
            {"runners": daemon.sandboxes, "daemon": lambda: {daemon.pid}}, bench.pick(10.0, 0.3)
        )
        memory = processes.memory(daemon.sandboxes()) / processes.MIB
        own = processes.memory({daemon.pid}) / processes.MIB
    note = bench.report.note
    note("pool.filled", [filled])
    note("pool.memory", [memory], [await _memory_of([[*bubblewrap(), *PYTHON_INSIDE, WAIT]] * size)])
    note("pool.cpu", [shares["runners"]])
    note("pool.daemon.cpu", [shares["daemon"]])
    note("pool.daemon.memory", [own], [await _memory_of([python(f"import trio; {WAIT}")])])


async def _memory_of(commands: list[list[str]]) -> float:
    """MB of programs that run at the same time and wait for the end of their stdin."""
    await trio.lowlevel.checkpoint()
    with _running(commands) as pids:
        return processes.memory(processes.below(pids)) / processes.MIB


@contextmanager
def _running(commands: list[list[str]]) -> Iterator[set[int]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield {process.pid for process in started}
    finally:
        for process in started:
            process.communicate()


NAMES = ("pool.filled", "pool.memory", "pool.cpu", "pool.daemon.cpu", "pool.daemon.memory")
MEASUREMENTS = (Measurement(NAMES, measure),)

"""Output in bulk: how fast it comes through the WebSocket, and what it costs the daemon's memory meanwhile."""

from collections.abc import Awaitable, Callable
from functools import partial

from bench import processes
from bench.conversations import converse
from bench.site import Site
from bench.timing import milliseconds

LINE = "0123456789 abcdefghijklmnopqrstuvwxyz\n"


async def measure_output(site: Site) -> None:
    """Complete and in order, or it counts as failed."""
    lines = site.bench.pick(10, 1) * processes.MIB // len(LINE)
    await site.client.put(1)
    runner = await site.client.claim()
    allocation = await site.bare.start()
    note = site.bench.report.note
    for kind, tty in (("pipes", False), ("tty", True)):
        rates: list[float] = []
        beside: list[float] = []
        rises: list[float] = []
        through = partial(_through, site, runner, lines, rates, tty=tty)
        for _ in range(site.bench.pick(5, 1)):
            rises.append(await rise_of(site.daemon.pid, through))
            took = await milliseconds(partial(site.bare.run, allocation, command(lines), tty=tty))
            beside.append(_rate(lines, took))
        note(f"output.{kind}", rates, beside)
        if not tty:
            note("output.memory", [max(rises)])
    slowly = partial(_through, site, runner, lines, [], tty=False, pause=site.bench.pick(0.004, 0.001))
    note("output.slow", [await rise_of(site.daemon.pid, slowly)])
    await site.bare.stop(allocation)
    await site.client.release(runner)


def command(lines: int) -> str:
    return f"yes '{LINE.rstrip()}' | head -n {lines}"


async def _through(site: Site, runner: str, lines: int, rates: list[float], *, tty: bool, pause: float = 0) -> None:
    """Once, to the final message."""
    url = await site.client.create(runner, command(lines), tty=tty)
    said = []

    async def listen() -> None:
        said.append(await converse(url, pause=pause))

    rates.append(_rate(lines, await milliseconds(listen)))
    if said[0].output().replace("\r\n", "\n") != LINE * lines:
        raise RuntimeError("the output is not what the program wrote")


def _rate(lines: int, took: float) -> float:
    """MB/s of the program's own bytes."""
    return lines * len(LINE) / processes.MIB / (took / 1000)


async def rise_of(pid: int, step: Callable[[], Awaitable[None]]) -> float:
    """By how many MB the peak of a process is above what it had before *step*."""
    processes.forget_peak(pid)
    before = processes.resident(pid)
    await step()
    return (processes.peak(pid) - before) / processes.MIB

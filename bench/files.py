"""Files of a runner in bulk: listed, downloaded, copied; beside the same programs in the bare executor."""

from base64 import b64encode
from functools import partial

import trio

from bench import processes
from bench.conversations import run
from bench.daemons import open_connections
from bench.outputs import rise_of
from bench.site import Site
from bench.timing import Step, in_turn, milliseconds
from bench.wire import Connection
from poseidon.core.command import Command
from poseidon.core.listing import find_words
from poseidon.core.model import Allocation
from poseidon.runners.files_archive import File, archived

LARGE = 3
"""An environment whose workspace holds all this."""
MEMORY_MB = 640
FOLDER = "many"


async def measure_files(site: Site) -> None:
    """In one runner each."""
    await site.client.put(1, LARGE, memory_mb=MEMORY_MB)
    runner = await site.client.claim(LARGE)
    allocation = await site.bare.start(MEMORY_MB)
    try:
        await _measure_listing(site, runner, allocation)
        await _measure_download(site, runner, allocation)
        await _measure_copy(site, runner, allocation)
    finally:
        with trio.CancelScope(shield=True):
            await site.bare.stop(allocation)
    await site.client.remove(LARGE)


async def _measure_listing(site: Site, runner: str, allocation: Allocation) -> None:
    count = site.bench.pick(10_000, 100)
    line = f"mkdir {FOLDER} && cd {FOLDER} && seq -f 'file %06g' {count} | tr '\\n' '\\0' | xargs -0 touch"
    await site.bare.run(allocation, line, tty=False)
    await run(site.client, runner, line, tty=False)

    async def ours() -> None:
        if len((await site.client.http.call("GET", f"/runners/{runner}/files?path={FOLDER}"))["files"]) != count:
            raise RuntimeError("the listing is incomplete")

    words = find_words(FOLDER, recursive=True)
    steps: dict[str, Step] = {
        "ours": ours,
        "bare": partial(site.bare.feed, allocation, Command(argv=words, tty=False), b""),
    }
    times = await in_turn(site.bench.pick(10, 1), steps)
    site.bench.report.note("files.list", times["ours"], times["bare"])


async def _measure_download(site: Site, runner: str, allocation: Allocation) -> None:
    size = site.bench.pick(100, 1) * processes.MIB
    line = f"rm -rf {FOLDER} && head -c {size} /dev/zero >large"
    await site.bare.run(allocation, line, tty=False)
    await run(site.client, runner, line, tty=False)
    rises: list[float] = []

    async def ours() -> None:
        if await site.client.http.take(f"/runners/{runner}/files/raw?path=large") != size:
            raise RuntimeError("the download is incomplete")

    async def watched() -> None:
        rises.append(await rise_of(site.daemon.pid, ours))

    steps: dict[str, Step] = {"ours": watched, "bare": partial(site.bare.run, allocation, "cat large", tty=False)}
    times = await in_turn(site.bench.pick(5, 1), steps)
    rates = {name: [size / processes.MIB / (each / 1000) for each in found] for name, found in times.items()}
    site.bench.report.note("files.download", rates["ours"], rates["bare"])
    site.bench.report.note("files.download.memory", [max(rises)])


async def _measure_copy(site: Site, runner: str, allocation: Allocation) -> None:
    content = bytes(range(256)) * (site.bench.pick(45_000_000, 450_000) // 256)
    copied = {"path": "large", "content": b64encode(content).decode()}
    request = site.client.http.encoded("PATCH", f"/runners/{runner}/files", {"delete": ["./*"], "copy": [copied]})
    rises: list[float] = []
    waits: list[float] = []
    quiet: list[float] = []

    async def copy() -> None:
        async with open_connections(site.daemon, 1) as (watcher,):
            done = trio.Event()
            quiet.extend([await milliseconds(partial(watcher.status, "/health")) for _ in range(100)])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, watcher, waits, done)
                await site.client.http.send(request, expect=204)
                done.set()

    async def ours() -> None:
        rises.append(await rise_of(site.daemon.pid, copy))

    archive = b"".join(archived([File("large", content)], 0))
    unpack = Command(argv=("tar", "--extract", "--file=-"), privileged=True, tty=False)
    steps: dict[str, Step] = {"ours": ours, "bare": partial(site.bare.feed, allocation, unpack, archive)}
    times = await in_turn(site.bench.pick(5, 1), steps, warm_up=0)
    site.bench.report.note("files.copy", times["ours"], times["bare"])
    site.bench.report.note("files.copy.memory", [max(rises)])
    site.bench.report.note("files.copy.health", waits, quiet)


async def _watch(watcher: Connection, waits: list[float], done: trio.Event) -> None:
    """Ask for the health all the time."""
    while not done.is_set():
        waits.append(await milliseconds(partial(watcher.status, "/health")))
        await trio.sleep(0.002)

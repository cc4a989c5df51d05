"""Many cycles, of which some are broken off wherever a client may leave, and nothing piles up."""

import gc
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import trio
from websockets.exceptions import ConnectionClosed

from tests.api.service import Service, connected, open_service, until, vanish

CLIENTS, CYCLES = 4, 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?s).*ByteStream")  # httpx leaves a generator behind when a request is cancelled
async def test_cycles_that_are_broken_off_anywhere_leave_nothing(tmp_path: Path) -> None:
    async with open_service(tmp_path, claim_wait=30) as service:
        await service.put(3)
        await cycle(service, Random(0), leaves=False)
        await calm(service)
        before = tasks(), descriptors()
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                for seed in range(CLIENTS):
                    nursery.start_soon(cycles, service, Random(seed))
        for facts in service.shell.claims.list():
            if facts.phase == "used":  # what its client never gave back; its inactivity would end it
                await service.http.delete(f"/runners/{facts.id}")
        await calm(service)
        await until(lambda: tasks() <= before[0])
        await until(lambda: descriptors() <= before[1])
        service.executions.forget_stale()
        assert not service.executions._waiting
        gc.collect()
        assert (await service.run(await service.claim(), "echo well")).text() == "well\n"


async def calm(service: Service) -> None:
    await until(lambda: not service.executions._lives)
    await until(lambda: service.shell.environments.statistics()[1].idle == 3)  # type: ignore[index]


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def cycles(service: Service, random: Random) -> None:
    for _ in range(CYCLES):
        await cycle(service, random, leaves=True)


async def cycle(service: Service, random: Random, *, leaves: bool) -> None:
    """Claim, copy, run, delete; a client that *leaves* may hang up after any moment of any step."""
    found: list[str] = []

    async def claim() -> None:
        found.append(await service.claim())

    async def copy() -> None:
        assert (await service.patch(found[0], {"a.sh": b"cat", "large": bytes(300_000)})).status_code == 204

    async def run() -> None:
        url = await service.execute(found[0], "head -c 100; seq 2000", tty=False)
        with trio.CancelScope() as scope, suppress(ConnectionClosed):
            async with connected(url) as socket:
                await socket.send(b"x" * 5000)
                while not (leaves and random.random() < 0.1):
                    await socket.recv()
                vanish(socket)
                scope.cancel()

    async def delete() -> None:
        assert (await service.http.delete(f"/runners/{found[0]}")).status_code == 204

    steps: list[Callable[[], Awaitable[None]]] = [claim, copy, run, delete]
    for step in steps:
        with trio.move_on_after(random.random() * 0.02 if leaves and random.random() < 0.2 else 30) as patience:
            await step()
        if patience.cancelled_caught:
            return

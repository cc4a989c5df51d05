"""Hostile clients of all kinds at once cost bounded memory, keep nobody else waiting, and leave nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trio

from bench.attacks import Attacks
from tests.api.service import Service, open_service, until

RISE_MOST = 100 * 2**20
"""Bytes; of the clients in this process too."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def watch_memory(peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], resident())
        await trio.sleep(0.01)


async def is_as_before(measure: Callable[[], int], before: int) -> None:
    await until(lambda: measure() <= before, within=60)


@pytest.mark.slow
async def test_hostile_clients_keep_nobody_waiting_cost_little_and_leave_nothing(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        await service.put(2)
        runner, other = await service.claim(), await service.claim()
        assert (await service.http.get("/health")).status_code == 204
        await service.run(other, "true")
        before = tasks(), descriptors()
        await attacked(service, runner, other)
        await until(lambda: not service.executions._lives, within=60)
        await is_as_before(tasks, before[0])
        await is_as_before(descriptors, before[1])
        assert (await service.run(runner, "echo still here")).text() == "still here\n"


async def attacked(service: Service, runner: str, other: str) -> None:
    """Others are served meanwhile."""
    attacks = Attacks(int(httpx.URL(service.url).port or 0), runner)
    low = resident()
    peak = [low]
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            await nursery.start(attacks.all)
            nursery.start_soon(watch_memory, peak)
            for _ in range(10):
                assert (await service.http.get("/health")).status_code == 204
                assert (await service.run(other, "echo served")).text() == "served\n"
            await until(lambda: set(attacks.refused) == {"huge", "bomb"}, within=60)
            nursery.cancel_scope.cancel()
    assert attacks.refused == {"huge": 1009, "bomb": 1002}
    assert peak[0] - low < RISE_MOST

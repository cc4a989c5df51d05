"""No pool, however large it shall be, keeps the others from having any runner."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
import trio.testing

from poseidon.core.model import Environment, EnvironmentId, JobId, Phase
from poseidon.errors import BudgetExhausted
from poseidon.runners.assembly import CONCURRENT_STARTS
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, Rig, open_rig, until

TWO = EnvironmentId(2)


@dataclass
class Narrow(ScriptedExecutor):
    """A machine with room for *budget* jobs, on which a start takes until the test lets it go on if it's *slow*."""

    budget: int = 1000
    slow: bool = False
    asked: list[JobId] = field(default_factory=list)
    goes_on: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(0))

    async def start(self, job: JobId, environment: Environment) -> int:
        self.asked.append(job)
        if self.slow:
            await self.goes_on.acquire()
        if job not in self.jobs:
            if len(self.jobs) >= self.budget:
                raise BudgetExhausted("memory exhausted")
            self.register(job)
        return await super().start(job, environment)

    def asked_for(self, environment: EnvironmentId) -> int:
        return sum(job.startswith(f"{environment}-") for job in self.asked)


@asynccontextmanager
async def narrow(folder: Path, executor: Narrow) -> AsyncIterator[Rig]:
    async with open_rig(folder, executor, claim_wait=20) as rig:
        yield rig


def idle(rig: Rig, environment: EnvironmentId) -> int:
    return rig.shell.environments.statistics()[environment].idle


async def test_a_pool_far_above_the_budget_gives_up_a_runner_for_an_empty_one(tmp_path: Path) -> None:
    async with narrow(tmp_path, Narrow(budget=6)) as rig:
        await rig.put(50)
        await until(lambda: idle(rig, ONE) == 6)
        await rig.put(20, id=TWO)
        await until(lambda: idle(rig, TWO) >= 1, within=20)
        await until(lambda: idle(rig, ONE) + idle(rig, TWO) == 6, within=20)
        assert idle(rig, ONE) >= 3
        assert all(runner.phase is not Phase.USED for runner in rig.fleet.runners())


async def test_a_client_who_waits_gets_the_last_idle_runners_room(tmp_path: Path) -> None:
    async with narrow(tmp_path, Narrow(budget=1)) as rig:
        await rig.put(3)
        await until(lambda: idle(rig, ONE) == 1)
        await rig.put(0, id=TWO)
        assert (await rig.shell.claims.claim(TWO, timeout=60)).environment == TWO


async def test_who_gave_up_a_runner_doesnt_take_the_room_back_at_once(tmp_path: Path) -> None:
    executor = Narrow(budget=4)
    async with narrow(tmp_path, executor) as rig:
        await rig.put(50)
        await until(lambda: idle(rig, ONE) == 4)
        await rig.put(1, id=TWO)
        await until(lambda: len(executor.jobs) == 3)
        await rig.shell.claims.claim(ONE, timeout=60)  # such a success would make it start again
        before = executor.asked_for(ONE)
        await until(lambda: idle(rig, TWO) == 1)
        assert executor.asked_for(ONE) == before


async def test_two_single_runners_arent_taken_from_each_other(tmp_path: Path) -> None:
    executor = Narrow(budget=2)
    async with narrow(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.put(1, id=TWO)
        await until(lambda: idle(rig, ONE) == idle(rig, TWO) == 1)
        before = set(rig.executor.jobs)
        await rig.put(1, id=EnvironmentId(3))
        await until(lambda: executor.asked_for(EnvironmentId(3)) > 1)
        assert set(rig.executor.jobs) == before


async def test_a_large_pool_that_fills_slowly_leaves_others_their_turn(tmp_path: Path) -> None:
    executor = Narrow(slow=True)
    async with narrow(tmp_path, executor) as rig:
        await rig.put(200)
        await until(lambda: len(executor.asked) == CONCURRENT_STARTS)
        await rig.put(3, id=TWO)
        await trio.testing.wait_all_tasks_blocked(0.02)
        for released in range(1, 5):
            executor.goes_on.release()
            await until(lambda released=released: len(executor.asked) == CONCURRENT_STARTS + released)  # type: ignore[misc]
        assert executor.asked_for(TWO) == 3
        executor.slow = False
        for _ in range(CONCURRENT_STARTS):
            executor.goes_on.release()

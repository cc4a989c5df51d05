"""Environments whose runners end before they are ready: told, held back, and of no harm to others."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from poseidon.core.model import Environment, EnvironmentId, JobId
from poseidon.core.pool import BackOff
from poseidon.runners.facts import PoolStatus
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, Rig, open_rig, until

TWO = EnvironmentId(2)


@dataclass
class PullingExecutor(ScriptedExecutor):
    """Jobs with a missing image end before they ever run, a moment after they were answered."""

    missing: set[str] = field(default_factory=lambda: {"broken"})
    broken: set[JobId] = field(default_factory=set)
    trouble: str = "Failed to pull `broken`"

    async def start(self, job: JobId, environment: Environment) -> int:
        self.held = environment.image in self.missing
        if self.held:
            self.broken.add(job)
        return await super().start(job, environment)

    async def fail(self, rig: Rig) -> None:
        while True:
            for job in [each for each in self.broken if each in self.jobs]:
                known = rig.fleet.job(job)
                if known is not None and known.start is not None and known.start.answered is not None:
                    self.broken.discard(job)
                    self.change(job, trouble=self.trouble)
                    self.die(job)
            await trio.sleep(0.01)


@asynccontextmanager
async def open_pulling(folder: Path) -> AsyncIterator[Rig]:
    executor = PullingExecutor()
    async with open_rig(folder, executor) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(executor.fail, rig)
        yield rig
        nursery.cancel_scope.cancel()


async def test_a_broken_image_backs_off_says_why_and_leaves_others_alone(tmp_path: Path) -> None:
    async with open_pulling(tmp_path) as rig:
        pools = rig.shell.environments.statistics
        await rig.put(2, image="broken")
        await until(lambda: pools()[ONE].status is PoolStatus.FAILING)
        assert pools()[ONE].message == "a runner ended before it was ready: Failed to pull `broken`"
        await rig.put(2, id=TWO)
        await until(lambda: pools()[TWO].idle == 2)
        assert pools()[TWO].message == ""
        assert len(rig.executor.started) < 10  # without the back-off hundreds


async def test_a_new_image_is_tried_at_once_however_long_the_old_one_has_failed(tmp_path: Path) -> None:
    async with open_pulling(tmp_path) as rig:
        await rig.put(1, image="broken")
        refresher = rig.shell.environments._refreshers[ONE]
        await until(lambda: refresher.back_off.failures > 0)
        refresher.back_off = BackOff(failures=9, until=rig.shell.clock.now() + 1000)
        await rig.put(1, image="whole")
        await rig.full(1)
        assert rig.shell.environments.statistics()[ONE].message == ""


async def test_runners_of_the_same_image_stay_while_its_refresh_fails(tmp_path: Path) -> None:
    async with open_pulling(tmp_path) as rig:
        await rig.put(2)
        await rig.full(2)
        assert isinstance(rig.executor, PullingExecutor)
        rig.executor.missing.add("bare")
        await rig.put(2)
        await until(lambda: rig.shell.environments._refreshers[ONE].trouble != "")
        assert rig.idle() == 2

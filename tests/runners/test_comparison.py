"""Between two breaks of the stream only jobs are listed: that proves stops, and finds what the stream has lost."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from poseidon.core.events import Asked, Listed, Start, Started, StopJob
from poseidon.core.fleet import Fleet
from poseidon.core.model import ClientStatus, JobId, JobSeen, JobStatus, Listing, Reason, RunnerId
from poseidon.executors.base import JobsListed, LookedUp
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, open_rig, until


@dataclass
class CheapExecutor(ScriptedExecutor):
    """Listing everything is counted."""

    list_interval: float = 1000.0
    full: int = 0
    looked_up: int = 0

    async def snapshot(self) -> Listing:
        self.full += 1
        return await super().snapshot()

    async def list_jobs(self) -> JobsListed:
        await self._answer()
        running = {
            each.job for each in self.allocations.values() if each.client is ClientStatus.RUNNING and each.started
        }
        return JobsListed(Listing(tuple(self.jobs.values()), (), self.version, 0, jobs_only=True), frozenset(running))

    async def look_up(self, job: JobId) -> LookedUp:
        self.looked_up += 1
        return await super().look_up(job)


async def test_a_full_listing_is_taken_once_and_then_jobs_are_compared(tmp_path: Path) -> None:
    executor = CheapExecutor(list_interval=0.01)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(3)
        await rig.full(3)
        executor.looked_up = 0
        await until(lambda: rig.fleet.unproven_stops() == 0 and rig.idle() == 3)
        for _ in range(5):
            await rig.shell.dispatchers["local"].compare()
        assert executor.full == 1
        assert executor.looked_up == 0
        assert len(list(rig.fleet.runners())) == 3


async def test_the_list_of_jobs_proves_stops(tmp_path: Path) -> None:
    executor = CheapExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        await rig.full(1)
        await rig.shell.claims.release(runner.id)
        await until(lambda: runner.job in executor.stopped)
        await until(lambda: rig.fleet.job(runner.job) is not None and _answered(rig.fleet.job(runner.job)))
        await rig.shell.dispatchers["local"].compare()
        assert rig.fleet.job(runner.job) is None


def _answered(job: object) -> bool:
    return getattr(getattr(job, "stop", None), "answered", None) is not None


async def test_a_life_that_the_stream_has_lost_is_found(tmp_path: Path) -> None:
    executor = CheapExecutor(held=True)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await until(lambda: len(executor.jobs) == 1)
        executor.silent = True
        executor.run(next(iter(executor.jobs)))
        assert rig.idle() == 0
        await rig.shell.dispatchers["local"].compare()
        assert rig.idle() == 1
        assert (executor.full, executor.looked_up) == (1, 1)


async def test_an_end_that_the_stream_has_lost_is_found(tmp_path: Path) -> None:
    executor = CheapExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.full(1)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        executor.silent = True
        executor.die(runner.job)
        await rig.shell.dispatchers["local"].compare()
        assert rig.fleet.runner(runner.id) is None


async def test_a_job_that_has_vanished_unheard_is_gone(tmp_path: Path) -> None:
    executor = CheapExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.full(1)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        await rig.full(1)
        executor.silent = True
        executor.remove(runner.job)
        executor.version += 1
        await rig.shell.dispatchers["local"].compare()
        assert rig.fleet.runner(runner.id) is None
        assert rig.fleet.job(runner.job) is None


async def test_where_all_jobs_have_vanished_at_once_everything_is_listed_before_that_is_believed(
    tmp_path: Path,
) -> None:
    executor = CheapExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(2)
        await rig.full(2)
        jobs, executor.jobs = executor.jobs, {}
        executor.version += 1
        executor.silent = True
        await rig.shell.dispatchers["local"].compare()
        assert executor.full == 2
        executor.jobs = jobs


async def test_all_can_be_stopped_with_lists_of_jobs_alone(tmp_path: Path) -> None:
    executor = CheapExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(3)
        await rig.full(3)
        await rig.shell.stop_all_runners(Reason.SHUTDOWN)
        assert executor.full == 1
        assert not executor.jobs


async def test_a_list_of_jobs_does_not_mean_that_allocations_are_gone(tmp_path: Path) -> None:
    executor = CheapExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(2)
        await rig.full(2)
        jobs = tuple(executor.jobs.values())
        for _ in range(3):  # an old one, again and again: the cluster hasn't gone back
            rig.shell.dispatchers["local"].handle(Listed(Listing(jobs, (), 1, 0, jobs_only=True), later(rig.fleet)))
        assert rig.idle() == 2
        assert rig.fleet.position.epoch == 0


@pytest.mark.parametrize("jobs_only", [True, False])
def test_a_doubt_is_decided_by_a_list_of_allocations_alone(jobs_only: bool) -> None:
    fleet = Fleet(settle=3.0, mint=lambda _: RunnerId("minted"))
    fleet.know(ONE, 1)
    job = JobId("1-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
    fleet.handle(Start(job, ONE, 1), 1000.0)
    fleet.handle(Started(job, 5), 1000.0)
    fleet.handle(JobSeen(job, 6, JobStatus.DEAD), 1000.0)
    assert fleet.needs_look_up(job)
    listing = Listing((JobSeen(job, 6, JobStatus.DEAD),), (), 9, 0 if jobs_only else 9, jobs_only=jobs_only)
    decisions = fleet.handle(Listed(listing, later(fleet)), 2000.0)
    assert (StopJob(job) in decisions) is not jobs_only


def later(fleet: Fleet) -> Asked:
    """So late that every doubt has lasted long enough."""
    return fleet.ask(1e12)

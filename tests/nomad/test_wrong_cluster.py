"""Behind the address there is a real cluster, but another one: nothing of it is believed, nothing is asked of it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from poseidon.core.model import JobId, Phase, Reason, RunnerId
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.nomad.executor import open_nomad
from poseidon.runners.delays import Delays
from poseidon.runners.overview import Overview
from poseidon.store.forget import forget
from poseidon.store.queries import gone_runner
from tests.fakes.nomad import NomadFake, open_nomad_fake
from tests.nomad.test_cluster import WANTED, Scene, settings, staged
from tests.runners.shell import ONE
from tests.runners.shell import until as until_soon

THEIRS = JobId("1-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
"""A runner of somebody else's, in an environment with the same id."""


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that was refused is asked again sooner."""
    usual = Delays.next
    monkeypatch.setattr(Delays, "next", lambda delays: usual(delays) / 10)


async def until(holds: Callable[[], bool]) -> None:
    await until_soon(holds, within=30)


@asynccontextmanager
async def two_clusters() -> AsyncIterator[tuple[NomadFake, NomadFake]]:
    """Ours and theirs; a job of theirs looks like one of ours."""
    with trio.fail_after(60):
        async with open_nomad_fake(seed=1, speed=50) as ours, open_nomad_fake(seed=2, speed=50) as theirs:
            async with open_nomad(settings(theirs)) as executor:
                await executor.start(THEIRS, WANTED)
            await theirs.running(THEIRS)
            theirs.requests.clear()
            yield ours, theirs


async def put(stage: Scene) -> None:
    await stage.rig.put(2, executor="nomad", cpu_limit=20, memory_limit=100)


async def fill(ours: NomadFake, folder: Path) -> RunnerId:
    """A pool of two, and one in use."""
    async with staged(ours, folder) as stage:
        await put(stage)
        used = await stage.rig.shell.claims.claim(ONE, timeout=0)
        await until(lambda: stage.rig.idle() == 2)
        return used.id


def trouble(stage: Scene) -> str:
    return stage.rig.shell.dispatchers["nomad"].trouble or ""


def untouched(fake: NomadFake) -> bool:
    """Whether nothing was asked of it but what it has."""
    return set(fake.jobs) == {THEIRS} and all(method == "GET" for method, _ in fake.requests)


async def listed_again(fake: NomadFake) -> None:
    """Wait until it was asked once more what it has."""
    asked = fake.requests.count(("GET", "/v1/allocations"))
    await until(lambda: fake.requests.count(("GET", "/v1/allocations")) > asked)


async def test_another_cluster_loses_nothing_of_what_is_known_and_is_left_alone(tmp_path: Path) -> None:
    async with two_clusters() as (ours, theirs):
        used = await fill(ours, tmp_path)
        before = dict(ours.jobs)
        async with staged(theirs, tmp_path) as stage:
            await until(lambda: f"{theirs.url} isn't the cluster" in trouble(stage))
            assert "3 jobs" in trouble(stage)
            assert "poseidon db forget-cluster" in trouble(stage)
            ailment = Overview(stage.rig.shell, 0.0, 0.0).ailment()
            assert ailment is not None
            assert (ailment.code, trouble(stage) in ailment.message) == ("NOMAD_UNREACHABLE", True)
            theirs.restart(theirs.current(THEIRS)["ID"])
            with pytest.raises(ExecutorUnreachable, match="isn't the cluster"):
                await stage.rig.put(5, executor="nomad")
            with pytest.raises(ExecutorUnreachable, match="isn't the cluster"):
                await stage.rig.shell.environments.remove(ONE)
            with pytest.raises(ExecutorUnreachable, match="isn't the cluster"):
                await stage.rig.shell.environments.fetch()
            claimed = await stage.rig.shell.claims.claim(ONE, timeout=0)
            await stage.rig.shell.claims.release(claimed.id)
            await listed_again(theirs)
            assert stage.rig.fleet.runner(used) is not None
            assert stage.rig.fleet.job(THEIRS) is None
            assert not stage.rig.shell.dispatchers["nomad"].listed
        assert untouched(theirs)
        assert ours.jobs == before
        async with staged(ours, tmp_path) as stage:
            await until(lambda: claimed.job not in ours.jobs)
            await until(lambda: stage.rig.idle() == 2)
            await until(lambda: trouble(stage) == "")
            kept = stage.rig.fleet.runner(used)
            assert kept is not None
            assert kept.phase is Phase.USED


async def test_an_address_that_leads_elsewhere_for_a_while_is_noticed_and_all_goes_on_afterwards(
    tmp_path: Path,
) -> None:
    async with two_clusters() as (ours, theirs), staged(ours, tmp_path) as stage:
        await put(stage)
        used = await stage.rig.shell.claims.claim(ONE, timeout=0)
        await until(lambda: stage.rig.idle() == 2)
        ours.stop_server()
        theirs.stop_server()
        await until(lambda: ours.server.down and theirs.server.down)
        theirs.server.port, port = ours.server.port, theirs.server.port
        await theirs.start_server()
        await until(lambda: not stage.rig.shell.dispatchers["nomad"].reachable)
        await stage.rig.shell.claims.release(used.id)
        await until(lambda: "isn't the cluster" in trouble(stage))
        await listed_again(theirs)
        assert stage.rig.fleet.job(used.job) is not None
        assert untouched(theirs)
        theirs.stop_server()
        await until(lambda: theirs.server.down)
        theirs.server.port = port
        await ours.start_server()
        await until(lambda: used.job not in ours.jobs)
        await until(lambda: stage.rig.idle() == 2)
        await until(lambda: trouble(stage) == "")


async def test_a_cluster_that_has_lost_everything_is_used_once_the_operator_says_so(tmp_path: Path) -> None:
    async with two_clusters() as (ours, empty):
        used = await fill(ours, tmp_path)
        found = forget(tmp_path / "poseidon.db", "nomad")
        assert (found.jobs, found.runners) == (3, 3)
        async with staged(empty, tmp_path) as stage:
            await until(lambda: stage.rig.idle() == 2)
            assert "template-1" in empty.jobs
            assert stage.rig.fleet.runner(used) is None
            gone = await stage.rig.store.read(lambda connection: gone_runner(connection, used))
            assert gone is not None
            assert (gone.phase, gone.reason) == (Phase.GONE, Reason.LOST)


async def test_what_was_forgotten_and_turns_up_again_is_stopped_not_handed_out(tmp_path: Path) -> None:
    async with two_clusters() as (ours, _):
        await fill(ours, tmp_path)
        before = {job for job in ours.jobs if job != "template-1"}
        forget(tmp_path / "poseidon.db", "nomad")
        async with staged(ours, tmp_path) as stage:
            await until(lambda: not before & set(ours.jobs))
            await until(lambda: stage.rig.idle() == 2)
            assert {runner.job for runner in stage.rig.fleet.runners()} == set(ours.jobs) - {"template-1"}


async def test_a_cluster_from_which_all_jobs_were_purged_is_known_by_what_is_left_of_them(tmp_path: Path) -> None:
    async with two_clusters() as (ours, _):
        used = await fill(ours, tmp_path)
        async with httpx.AsyncClient(base_url=ours.url, trust_env=False) as http:
            for job in list(ours.jobs):
                await http.delete(f"/v1/job/{job}", params={"purge": "true"})
        async with staged(ours, tmp_path) as stage:
            await until(lambda: stage.rig.fleet.runner(used) is None)
            await until(lambda: stage.rig.idle() == 2)

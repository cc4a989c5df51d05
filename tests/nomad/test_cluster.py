"""The whole shell on a cluster: pools fill, runners are taken over, and whatever happens to Nomad passes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from poseidon.core.model import JobId, Phase, Reason, RunnerId
from poseidon.errors import ExecutorUnreachable, PlacementFailed
from poseidon.executors.nomad.executor import NomadExecutor, open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from tests.fakes.nomad import NomadFake, open_nomad_fake
from tests.runners.shell import ONE, Rig, environment, open_rig, until

FRESH = JobId("1-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
WANTED = environment(1, executor="nomad", cpu_limit=20, memory_limit=100)


@dataclass
class Scene:
    fake: NomadFake
    executor: NomadExecutor
    rig: Rig

    async def put(self, size: int) -> None:
        await self.rig.put(size, executor="nomad", cpu_limit=20, memory_limit=100)
        await self.rig.full(size)


def settings(fake: NomadFake, **changes: Any) -> NomadSettings:
    fast = {"settle": 0.1, "list_interval": 1.0, "evaluation_timeout": 1.0, "driver_retry": 0.01, "headers_within": 0.1}
    return NomadSettings(**{"address": fake.url, "request_timeout": 1.0, "stream_silence": 1.5, **fast, **changes})


@asynccontextmanager
async def staged(fake: NomadFake, folder: Path, **changes: Any) -> AsyncIterator[Scene]:
    folder.mkdir(exist_ok=True)
    async with (
        open_nomad(settings(fake, **changes)) as executor,
        open_rig(folder, executor) as rig,  # type: ignore[arg-type]
    ):
        yield Scene(fake, executor, rig)


@asynccontextmanager
async def scene(tmp_path: Path, **changes: Any) -> AsyncIterator[Scene]:
    with trio.fail_after(30):
        async with open_nomad_fake(nodes=2, seed=0, speed=50) as fake, staged(fake, tmp_path, **changes) as stage:
            yield stage


async def test_a_pool_fills_is_claimed_from_and_is_emptied(tmp_path: Path) -> None:
    async with scene(tmp_path) as stage:
        await stage.put(3)
        runner = await stage.rig.shell.claims.claim(ONE, timeout=60)
        assert str(runner.id) == runner.job
        assert runner.node_name == stage.fake.current(runner.job)["NodeName"]
        await until(lambda: _used(stage.fake, runner.job) == ("true", "60"))
        await stage.rig.shell.claims.release(runner.id)
        await until(lambda: stage.rig.fleet.job(runner.job) is None)
        await stage.rig.full(3)
        await stage.rig.shell.stop_all_runners(Reason.SHUTDOWN)
        assert set(stage.fake.jobs) == {"template-1"}


def _used(fake: NomadFake, job: str) -> tuple[str, str]:
    group = next(group for group in fake.jobs[job]["TaskGroups"] if group["Name"] == "config")
    return group["Meta"]["used"], group["Meta"].get("timeout", "")


async def test_a_cluster_is_taken_over_with_its_environments_and_its_used_runners(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with open_nomad_fake(nodes=2, seed=1, speed=50) as fake:
            async with staged(fake, tmp_path / "first") as stage:
                await stage.put(2)
                used = await stage.rig.shell.claims.claim(ONE, timeout=60)
                await until(lambda: _used(fake, used.job) == ("true", "60"))
                await stage.rig.full(2)
            before = {job: row["CreateIndex"] for job, row in fake.jobs.items()}
            async with staged(fake, tmp_path / "second") as stage:
                await until(lambda: stage.rig.shell.environments.find(ONE) is not None)
                await until(lambda: stage.rig.idle() == 2 and stage.rig.fleet.runner(used.id) is not None)
                found = stage.rig.fleet.runner(used.id)
                assert found is not None
                assert (found.phase, found.timeout) == (Phase.USED, 60)
                assert {job: row["CreateIndex"] for job, row in fake.jobs.items()} == before


async def test_a_node_is_drained_and_no_runner_is_lost(tmp_path: Path) -> None:
    async with scene(tmp_path) as stage:
        await stage.put(4)
        used = await stage.rig.shell.claims.claim(ONE, timeout=60)
        stage.fake.drain(stage.fake.node_of(used.job))
        await until(lambda: stage.rig.fleet.runner(used.id) is None)
        await stage.rig.full(4)
        nodes = {runner.node_name for runner in stage.rig.fleet.runners() if runner.phase is Phase.IDLE}
        assert len(nodes) == 1


async def test_a_stream_that_breaks_and_stays_silent_is_followed_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as stage:
        await stage.put(2)
        used = await stage.rig.shell.claims.claim(ONE, timeout=60)
        await stage.rig.full(2)
        stage.fake.cut_streams()
        stage.fake.end(stage.fake.current(used.job)["ID"])
        await until(lambda: stage.rig.fleet.runner(used.id) is None)
        await stage.rig.full(2)
        assert stage.executor.stream_health.breaks >= 1


async def test_without_a_leader_nothing_is_lost_and_all_goes_on_afterwards(tmp_path: Path) -> None:
    async with scene(tmp_path) as stage:
        await stage.put(2)
        stage.fake.lose_leader()
        claimed = await stage.rig.shell.claims.claim(ONE, timeout=60)
        await stage.rig.shell.claims.release(claimed.id)
        await trio.sleep(0.2)
        assert claimed.job in stage.fake.jobs
        stage.fake.elect_leader()
        await until(lambda: claimed.job not in stage.fake.jobs)
        await stage.rig.full(2)
        await until(lambda: set(stage.rig.jobs()) == {job for job in stage.fake.jobs if job != "template-1"})


async def test_a_cluster_that_is_restored_from_a_backup_is_believed(tmp_path: Path) -> None:
    async with scene(tmp_path, settle=0.02) as stage:
        await stage.put(1)
        backup = stage.fake.snapshot()
        await stage.put(3)
        await stage.rig.shell.claims.claim(ONE, timeout=60)
        await stage.rig.full(3)
        stage.fake.restore(backup)
        await until(lambda: stage.rig.fleet.position.epoch == 1)
        await stage.rig.full(3)
        await until(lambda: set(stage.rig.jobs()) == {job for job in stage.fake.jobs if job != "template-1"})


async def _register(fake: NomadFake, job: str, **changes: Any) -> None:
    """Somebody registers *job* as it is but for *changes* of the meta of its group `config`."""
    spec = deepcopy(fake.jobs.get(job) or next(row for id, row in fake.jobs.items() if id.startswith("template-")))
    for group in spec["TaskGroups"]:
        if group["Name"] == "config":
            group["Meta"] = group["Meta"] | changes
    async with httpx.AsyncClient(base_url=fake.url, trust_env=False) as http:
        answer = await http.put("/v1/jobs", json={"Job": spec | {"ID": job, "Name": job}})
        assert answer.status_code == httpx.codes.OK, answer.text


async def _purge(fake: NomadFake, job: str) -> None:
    async with httpx.AsyncClient(base_url=fake.url, trust_env=False) as http:
        await http.delete(f"/v1/job/{job}", params={"purge": "true"})


def _size(fake: NomadFake) -> str:
    groups = {group["Name"]: group for group in fake.jobs["template-1"]["TaskGroups"]}
    return str(groups["config"]["Meta"]["prewarmingPoolSize"])


async def test_a_template_that_vanishes_or_is_changed_is_put_right_at_the_next_comparison(tmp_path: Path) -> None:
    async with scene(tmp_path, list_interval=0.1) as stage:
        await stage.put(1)
        await _purge(stage.fake, "template-1")
        await until(lambda: "template-1" in stage.fake.jobs, within=20)
        await _register(stage.fake, "template-1", prewarmingPoolSize="7")
        assert _size(stage.fake) == "7"
        await until(lambda: _size(stage.fake) == "1", within=20)
        registrations = stage.fake.requests.count(("PUT", "/v1/jobs"))
        await _compared(stage.fake, 3)
        await stage.rig.shell.environments.fetch()
        assert stage.fake.requests.count(("PUT", "/v1/jobs")) == registrations


async def test_a_template_that_was_removed_on_purpose_stays_away(tmp_path: Path) -> None:
    async with scene(tmp_path, list_interval=0.1) as stage:
        await stage.put(1)
        await stage.rig.shell.environments.remove(ONE)
        await _compared(stage.fake, 3)
        assert "template-1" not in stage.fake.jobs


async def _compared(fake: NomadFake, times: int) -> None:
    asked = fake.requests.count(("GET", "/v1/jobs"))
    await until(lambda: fake.requests.count(("GET", "/v1/jobs")) >= asked + times, within=20)


async def test_runners_that_others_left_are_found_as_soon_as_their_environment_is_put(tmp_path: Path) -> None:
    async with scene(tmp_path, list_interval=1000) as stage:
        async with open_nomad(settings(stage.fake)) as others:
            await others.start(FRESH, WANTED)
            await stage.fake.running(FRESH)
            await others.mark(FRESH, used=True, timeout=60)
        await until(lambda: stage.rig.shell.dispatchers["nomad"].listed, within=20)
        assert stage.rig.fleet.runner(RunnerId(FRESH)) is None
        await stage.rig.put(1, executor="nomad", cpu_limit=20, memory_limit=100)
        await until(lambda: stage.rig.fleet.runner(RunnerId(FRESH)) is not None, within=20)
        found = stage.rig.fleet.runner(RunnerId(FRESH))
        assert found is not None
        assert (found.phase, found.timeout) == (Phase.USED, 60)


async def test_no_room_is_told_and_nothing_piles_up(tmp_path: Path) -> None:
    async with scene(tmp_path) as stage:
        stage.fake.refuse_placement(dimension="memory", jobs="1-*")
        await stage.rig.put(3, executor="nomad", cpu_limit=20, memory_limit=100)
        await until(lambda: "memory exhausted" in stage.rig.shell.environments.statistics()[ONE].message)
        await until(lambda: len([job for job in stage.fake.jobs if job != "template-1"]) <= 1)
        stage.fake.allow_placement()
        await stage.rig.full(3)


async def test_a_job_that_met_unhealthy_drivers_starts_once_they_are_healthy(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with open_nomad_fake(nodes=2, seed=0, speed=50) as fake:
            fake.set_driver("docker", healthy=False)
            async with open_nomad(settings(fake)) as executor:
                with pytest.raises(PlacementFailed, match="missing drivers"):
                    await executor.start(FRESH, WANTED)
            await _stop(fake)
            async with open_nomad(settings(fake, driver_retry=0.3)) as executor, trio.open_nursery() as nursery:
                nursery.start_soon(executor.start, FRESH, WANTED)
                await fake.until(lambda: FRESH in fake.jobs)
                await trio.sleep(0.1)
                fake.set_driver("docker", healthy=True)
            assert (await fake.running(FRESH))["ClientStatus"] == "running"


async def _stop(fake: NomadFake) -> None:
    async with open_nomad(settings(fake)) as executor:
        await executor.stop(FRESH)


async def test_an_unreachable_nomad_is_told_and_comes_back_by_itself(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with open_nomad_fake(nodes=1, seed=0, speed=50) as fake, staged(fake, tmp_path) as stage:
            stage.fake.stop_server()
            dispatcher = stage.rig.shell.dispatchers["nomad"]
            await until(lambda: "can't be reached" in (dispatcher.trouble or ""))
            with pytest.raises(ExecutorUnreachable):
                await stage.rig.put(1, executor="nomad")
            await fake.start_server()
            await until(lambda: dispatcher.reachable)
            await stage.put(1)


async def test_a_wrong_token_is_told_as_that(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with open_nomad_fake(nodes=1, seed=0, speed=50, tokens=["right"]) as fake:
            async with staged(fake, tmp_path, token="wrong") as stage:
                dispatcher = stage.rig.shell.dispatchers["nomad"]
                await until(lambda: "refuses the token" in (dispatcher.trouble or ""))
                assert "wrong" not in (dispatcher.trouble or "")
            async with staged(fake, tmp_path, token="right") as stage:
                await stage.put(1)

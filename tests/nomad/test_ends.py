"""A used runner's end behind our back, as its client sees it over HTTP and WebSocket: it has a reason, and is final."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from websockets.exceptions import InvalidStatus

from poseidon.core.model import JobId, RunnerId
from poseidon.errors import RunnerGone
from poseidon.executors.nomad.executor import open_nomad
from tests.api.service import Ended, Service, connected, next_of, open_service, read, until
from tests.fakes.nomad import NomadFake, open_nomad_fake
from tests.nomad.test_cluster import settings
from tests.runners.shell import ONE


@dataclass
class Scene:
    fake: NomadFake
    service: Service

    def job(self, runner: str) -> JobId:
        found = self.service.shell.dispatchers["nomad"].fleet.runner(RunnerId(runner))
        assert found is not None
        return found.job

    async def tell(self, runner: str) -> httpx.Response:
        return await self.service.http.get(f"/runners/{runner}")

    async def full(self, size: int = 2) -> None:
        await until(lambda: self.service.shell.environments.statistics()[ONE].idle == size, within=30)


@asynccontextmanager
async def scene(folder: Path, *, size: int = 2, nodes: int = 2) -> AsyncIterator[Scene]:
    with trio.fail_after(120):
        async with (
            open_nomad_fake(nodes=nodes, seed=0, speed=50, buffer=2000) as fake,
            open_nomad(settings(fake, set_user="")) as executor,
            open_service(folder, executor=executor, claim_wait=20) as service,  # type: ignore[arg-type]
        ):
            body = {"image": "x", "prewarmingPoolSize": size, "cpuLimit": 20, "memoryLimit": 64}
            assert (await service.http.put("/execution-environments/1", json=body)).status_code == 201
            stage = Scene(fake, service)
            await stage.full(size)
            yield stage


async def purge(fake: NomadFake, job: str) -> None:
    async with httpx.AsyncClient(base_url=fake.url, trust_env=False) as http:
        await http.delete(f"/v1/job/{job}", params={"purge": "true"})


async def drain(fake: NomadFake, job: str) -> None:
    fake.drain(fake.node_of(job))


async def lose(fake: NomadFake, job: str) -> None:
    fake.kill_agent(fake.node_of(job))


def allocation(end: Callable[[NomadFake, str], Any]) -> Callable[[NomadFake, str], Any]:
    """Something that happens to the job's allocation."""

    async def happens(fake: NomadFake, job: str) -> None:
        end(fake, fake.current(job)["ID"])

    return happens


ENDS: dict[str, tuple[Callable[[NomadFake, str], Any], str]] = {
    "alloc stop": (allocation(NomadFake.stop_allocation), "migrated"),
    "drain": (drain, "migrated"),
    "restart at once": (allocation(NomadFake.restart), "restarted"),
    "restart with a delay": (allocation(lambda fake, id: fake.restart(id, delay=0.5)), "restarted"),
    "out of memory": (allocation(lambda fake, id: fake.out_of_memory(id, delay=0.5)), "out_of_memory"),
    "failed": (allocation(NomadFake.fail), "failed"),
    "agent killed": (lose, "lost"),
    "purged by others": (purge, "stopped"),
}
WORDS = {"out_of_memory": "OOM Killed", "stopped": "the allocation stopped as expected"}


@pytest.mark.parametrize("how", ENDS)
async def test_an_end_is_told_with_its_reason_and_nothing_of_the_old_client_reaches_another(
    how: str, tmp_path: Path
) -> None:
    end, reason = ENDS[how]
    async with scene(tmp_path) as stage:
        service, http = stage.service, stage.service.http
        old = await service.claim()
        job, place = stage.job(old), service.allocation(old).id
        assert (await service.patch(old, {"secret": b"mine"})).status_code == 204
        waiting = await service.execute(old, "touch leaked; echo leaked", tty=False)
        async with connected(await service.execute(old, "echo begun; exec sleep 300", tty=False)) as socket:
            await next_of(socket, "stdout")
            await end(stage.fake, job)
            ended = await read(socket, within=30)
        assert ended.final["type"] == "error"
        assert WORDS.get(reason, "") in ended.final["data"]
        assert ended.code == 1000

        told = await stage.tell(old)
        assert told.status_code == 410 or told.json()["phase"] == "gone"
        assert told.json()["reason"] == reason
        refused = [
            await http.post(f"/runners/{old}/execute", json={"command": "true"}),
            await service.patch(old, {"leaked": b"x"}),
            await http.delete(f"/runners/{old}"),
        ]
        assert [answer.status_code for answer in refused] == [410, 410, 410]
        assert all(reason in answer.json()["message"] for answer in refused)

        await stage.full()
        others = [await service.claim() for _ in range(2)]
        assert old not in others
        assert place not in {service.allocation(other).id for other in others}
        with pytest.raises(Exception, match="HTTP 4"):
            async with connected(waiting):
                pass
        for other in others:
            found = await service.run(other, "ls -A")
            assert (found.text(), found.final) == ("", {"type": "exit", "data": 0})
        assert not leftovers(stage)


def leftovers(stage: Scene) -> list[str]:
    """Files that only the old client could have made in a workspace of others."""
    return [
        name
        for box in stage.fake.rooms.boxes.values()
        for _, _, names in os.walk(box.folder)
        for name in names
        if name == "leaked"
    ]


@dataclass
class Load:
    """Twenty clients that claim, run and delete until all is over, and what they were given."""

    stage: Scene
    over: trio.Event = field(default_factory=trio.Event)
    given: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    well: int = 0
    """Executions that came to their end."""

    async def live(self, number: int) -> None:
        while not self.over.is_set():
            body = {"executionEnvironmentId": 1, "inactivityTimeout": 0}
            answer = await self.stage.service.http.post("/runners", json=body)
            if answer.status_code == 200:
                await self._use(str(answer.json()["runnerId"]), f"{number}-{len(self.given)}")
            elif answer.json().get("errorCode") != "NOMAD_OVERLOAD":
                self.wrongs.append(f"a claim answers {answer.text}")

    async def _converse(self, url: str) -> Ended:
        try:
            async with connected(url) as socket:
                return await read(socket, within=60)
        except InvalidStatus as refused:  # its runner has gone meanwhile
            if refused.response.status_code not in {404, 410}:
                self.wrongs.append(f"a WebSocket answers {refused.response.status_code}")
            return Ended([{"type": "error"}])

    async def _use(self, runner: str, mark: str) -> None:
        self.given.append(runner)
        with suppress(RunnerGone):
            self.places.append(self.stage.service.allocation(runner).id)
        line = f"test -e taken && exit 77; echo {mark} > taken; sleep 0.05; cat taken"
        service = self.stage.service
        answer = await service.http.post(f"/runners/{runner}/execute", json={"command": line})
        if answer.status_code == 200:
            ended = await self._converse(answer.json()["websocketUrl"])
            if ended.final == {"type": "exit", "data": 0}:
                self.well += 1
                if ended.text().strip() != mark:
                    self.wrongs.append(f"{mark} got {ended.text()!r}")
            elif ended.final.get("data") == 77:
                self.wrongs.append(f"{runner} had been used before {mark}")
        elif answer.status_code != 410:
            self.wrongs.append(f"an execution answers {answer.text}")
        gone = await service.http.delete(f"/runners/{runner}")
        if gone.status_code not in {204, 410}:
            self.wrongs.append(f"a deletion answers {gone.text}")


@pytest.mark.slow
async def test_a_drain_and_a_killed_agent_under_the_load_of_twenty_clients_share_no_runner(tmp_path: Path) -> None:
    async with scene(tmp_path, size=6, nodes=3) as stage:
        load, fake = Load(stage), stage.fake
        first, second, _ = fake.nodes

        def runs_on(node: str) -> bool:
            return any(row["NodeID"] == node and row["ClientStatus"] == "running" for row in fake.allocations.values())

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(load.live, number)
            await until(lambda: load.well >= 5, within=60)
            fake.drain(first)
            await until(lambda: not runs_on(first), within=60)
            fake.end_drain(first)
            fake.kill_agent(second)
            await until(lambda: not runs_on(second), within=60)
            await fake.revive_agent(second)
            reached = load.well
            await until(lambda: load.well >= reached + 10, within=60)
            load.over.set()
        assert load.wrongs == []
        assert len(set(load.given)) == len(load.given)
        assert len(set(load.places)) == len(load.places)
        fleet, pool = stage.service.shell.dispatchers["nomad"].fleet, stage.service.shell.environments.statistics
        await until(lambda: pool()[ONE].idle == 6 and pool()[ONE].used == 0 and not fleet.unproven_stops(), within=60)
        await until(lambda: set(fake.jobs) - {"template-1"} == {job.id for job, _, _ in fleet.jobs(ONE)}, within=60)

"""A real daemon on a small cluster whose containers are folders, but where everything is said as Nomad says it."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tests.e2e.daemons import Client, Daemon, open_client, open_daemon
from tests.fakes.nomad import NomadFake, open_nomad_fake

PATIENCE = 90
SOON = 10


@asynccontextmanager
async def cluster(**options: Any) -> AsyncIterator[NomadFake]:
    with trio.fail_after(PATIENCE):
        async with open_nomad_fake(nodes=2, seed=0, speed=50, **options) as fake:
            yield fake


def on(fake: NomadFake) -> dict[str, str]:
    """The settings of a daemon that uses it. Its containers have no setuser."""
    return {"NOMAD_ADDRESS": fake.url, "NOMAD_SETUSER": "", "NOMAD_LISTINTERVAL": "5"}


@asynccontextmanager
async def scene(tmp_path: Path, **settings: str) -> AsyncIterator[tuple[NomadFake, Daemon, Client]]:
    async with cluster() as fake:
        async with open_daemon(tmp_path, **on(fake) | settings) as daemon, open_client(daemon) as client:
            yield fake, daemon, client
        assert [job for job in fake.jobs if not job.startswith("template-")] == []


async def crash(daemon: Daemon) -> None:
    """kill -9. The cluster lives in our process, so nothing may block it."""
    assert daemon.process is not None
    daemon.process.kill()
    await trio.to_thread.run_sync(daemon.process.wait)


async def until_gone(client: Client, runner: str) -> dict[str, Any]:
    """Wait until *runner* is gone, and tell of it."""
    with trio.fail_after(SOON):
        while True:
            told: dict[str, Any] = (await client.http.get(f"/runners/{runner}")).json()
            if told["phase"] == "gone":
                return told
            await trio.sleep(0.02)


async def executor_of(client: Client) -> dict[str, Any]:
    told: dict[str, Any]
    [told] = (await client.http.get("/status")).json()["executors"]
    return told


async def test_claim_copy_run_and_delete(tmp_path: Path) -> None:
    async with scene(tmp_path) as (fake, daemon, client):
        assert await client.put() == 201
        assert "template-1" in fake.jobs
        await client.full()
        runner = await client.claim()
        await client.copy(runner, {"hello.sh": b"read name; echo Hello $name; echo oops >&2; exit 3\n"})
        outcome = await client.run(runner, "bash hello.sh", stdin="Ada\n")
        assert outcome.messages[0] == {"type": "start"}
        assert "Hello Ada\r\n" in outcome.stdout
        assert outcome.stderr.replace("\r", "") == "oops\n"
        assert (outcome.last, outcome.close_code) == ({"type": "exit", "data": 3}, 1000)
        outcome = await client.run(runner, "echo out; echo err >&2", tty=False)
        assert (outcome.stdout, outcome.stderr, outcome.last["data"]) == ("out\n", "err\n", 0)
        assert (await client.http.delete(f"/runners/{runner}")).status_code == 204
        assert (await client.http.delete(f"/runners/{runner}")).status_code == 410
        await fake.until(lambda: runner not in fake.jobs)
        await client.full()
        assert (await client.http.delete("/execution-environments/1")).status_code == 204
        await fake.until(lambda: not fake.jobs)
        assert "Traceback" not in daemon.log


async def test_a_cycle_costs_just_the_requests_that_the_documentation_counts(tmp_path: Path) -> None:
    async with scene(tmp_path, NOMAD_LISTINTERVAL="300") as (fake, _, client):
        await client.put()
        for _ in range(4):  # from then on the addresses of both nodes are known
            await client.run(await client.claim(), "true")
        await client.full()
        await fake.settled()
        await trio.sleep(0.3)
        before = len(fake.requests)
        runner = await client.claim()
        await client.copy(runner, {"x": b"y"})
        await client.run(runner, "cat x", tty=False)
        await client.http.delete(f"/runners/{runner}")
        await fake.until(lambda: runner not in fake.jobs)
        await client.full()
        await trio.sleep(0.3)
        asked = Counter(_shown(method, path, runner) for method, path in fake.requests[before:])
        start, mark = {"PUT /v1/jobs": 1}, {"GET the job": 1, "PUT /v1/jobs": 1}
        stop, executions = {"DELETE the job": 1, "GET /v1/jobs": 1}, {"exec": 2}
        expected = Counter(start) + Counter(mark) + Counter(stop) + Counter(executions)
        assert {what: count for what, count in asked.items() if what not in ("evaluation", "node")} == expected
        assert asked["evaluation"] + asked["node"] <= 2


def _shown(method: str, path: str, runner: str) -> str:
    """Evaluations are looked up only where the stream is slow, nodes only where they aren't known."""
    if path.endswith("/exec"):
        return "exec"
    for what in ("evaluation", "node"):
        if path.startswith(f"/v1/{what}/"):
            return what
    return f"{method} the job" if path == f"/v1/job/{runner}" else f"{method} {path}"


async def test_a_restart_of_the_daemon_loses_no_runner_and_touches_no_container(tmp_path: Path) -> None:
    async with scene(tmp_path) as (fake, daemon, client):
        await client.put()
        runner = await client.claim()
        await client.copy(runner, {"x": b"still here"})
        await client.full()
        running = {job: fake.current(job)["ID"] for job in fake.jobs}
        await crash(daemon)
        await daemon.start()
        assert (await client.run(runner, "cat x", tty=False)).stdout == "still here"
        await client.full()
        assert {job: fake.current(job)["ID"] for job in fake.jobs} == running
        with trio.fail_after(SOON):
            while runner in fake.jobs:
                await client.http.delete(f"/runners/{runner}")
                await trio.sleep(0.02)


async def test_a_daemon_that_lost_its_data_takes_the_cluster_over(tmp_path: Path) -> None:
    async with scene(tmp_path) as (fake, daemon, client):
        await client.put()
        runner = await client.claim()
        await client.full()
        await fake.until(lambda: _used(fake, runner))
        before = set(fake.jobs)
        await crash(daemon)
        for file in tmp_path.glob("poseidon.db*"):
            file.unlink()
        await daemon.start()
        assert (await client.http.get("/execution-environments/1?fetch=true")).status_code == 200
        await client.full()
        assert (await client.run(runner, "echo mine", tty=False)).stdout == "mine\n"
        assert await client.claim() != runner
        assert before <= set(fake.jobs)


def _used(fake: NomadFake, job: str) -> bool:
    groups = {group["Name"]: group for group in fake.jobs[job]["TaskGroups"]}
    return bool(groups["config"]["Meta"].get("used") == "true")


async def test_without_a_cluster_the_api_is_up_and_says_why_and_all_comes_back_by_itself(tmp_path: Path) -> None:
    async with cluster() as fake:
        fake.stop_server()
        daemon = Daemon(tmp_path, on(fake), arguments=("--stop-runners",))
        await daemon.spawn()
        try:
            await daemon.until_health(503)
            async with open_client(daemon) as client:
                await _says_why(client, fake)
                refused = await client.http.put("/execution-environments/1", json={"image": "x"})
                assert (refused.status_code, refused.json()["errorCode"]) == (500, "NOMAD_UNREACHABLE")
                assert (await client.http.get("/execution-environments")).json() == {"executionEnvironments": []}
                await fake.start_server()
                await daemon.until_health(204)
                assert (await executor_of(client))["reachable"]
                assert await client.put() == 201
                await client.full()
        finally:
            with trio.CancelScope(shield=True):
                assert await daemon.end() == 0, daemon.log


async def _says_why(client: Client, fake: NomadFake) -> None:
    with trio.fail_after(SOON):
        while (told := (await client.http.get("/health")).json())["errorCode"] != "NOMAD_UNREACHABLE":
            await trio.sleep(0.02)
    assert told["message"].startswith(f"executor nomad: nomad at {fake.url} can't be reached: ")
    status = await executor_of(client)
    assert (status["name"], status["reachable"], status["stream"]["connected"]) == ("nomad", False, False)


async def test_a_runner_whose_task_ends_is_gone_with_the_reason_and_its_execution_too(tmp_path: Path) -> None:
    async with scene(tmp_path) as (fake, _, client):
        await client.put()
        runner = await client.claim()
        url = await client.create(runner, "sleep 60")
        async with trio.open_nursery() as nursery:
            ended: list[dict[str, Any]] = []

            async def converse() -> None:
                ended.append((await client.converse(url)).last)

            nursery.start_soon(converse)
            await fake.until(lambda: fake.rooms.sessions > 0)
            await trio.sleep(0.1)
            fake.restart(fake.current(runner)["ID"])
            told = await until_gone(client, runner)
        assert told["reason"] == "restarted"
        assert ended[0]["type"] == "error"
        answer = await client.http.post(f"/runners/{runner}/execute", json={"command": "true"})
        assert answer.status_code == 410
        assert "restarted" in answer.json()["message"]
        await client.full()

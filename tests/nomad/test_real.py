"""A real daemon on a real cluster: `NOMAD_ADDR=http://127.0.0.1:4646 pytest -m nomad`.

Of a cluster of our own, or with `NOMAD_NAMESPACE` of an empty namespace: whatever Poseidon finds there, it takes over.
`NOMAD_TOKEN` is used if it is set. Runners are processes of the node by the driver raw_exec, or with
`POSEIDON_TEST_IMAGE` Docker containers of that image, which the nodes must have already, as nothing is pulled.
`POSEIDON_TEST_DRAIN=1` allows to drain nodes, for a moment.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import trio

from poseidon.core.model import environment_of
from poseidon.executors.nomad.job import template_id
from tests.e2e.daemons import Client, Daemon, Outcome, open_client, open_daemon

ADDRESS = os.environ.get("NOMAD_ADDR", "")
TOKEN = os.environ.get("NOMAD_TOKEN", "")
NAMESPACE = os.environ.get("NOMAD_NAMESPACE", "default")
IMAGE = os.environ.get("POSEIDON_TEST_IMAGE", "")
TEMPLATE = Path(__file__).with_name("raw_exec_template.hcl")
ENVIRONMENT = 900_001
SIZE = 2
PATIENCE = 110
SOON = 60

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif(not ADDRESS, reason="NOMAD_ADDR isn't set"),
]


@dataclass
class Site:
    """A daemon, its client, and the cluster as its operator sees it."""

    daemon: Daemon
    client: Client
    nomad: httpx.AsyncClient

    async def jobs(self) -> set[str]:
        """Ours that aren't over."""
        return {job["ID"] for job in await self._get("jobs") if is_ours(job["ID"]) and not job["Stop"]}

    async def allocation(self, runner: str) -> dict[str, Any]:
        """Where *runner* is, as Nomad tells it."""
        told = (await self.client.http.get(f"/runners/{runner}")).json()
        found: dict[str, Any] = await self._get(f"allocation/{told['allocation']}")
        return found

    async def order(self, path: str, **body: object) -> None:
        """What an operator does."""
        (await self.nomad.put(f"/v1/{path}", json=body)).raise_for_status()

    async def gone(self, runner: str) -> str:
        """Wait until *runner* is gone; why it is."""
        with trio.fail_after(SOON):
            while True:
                told = (await self.client.http.get(f"/runners/{runner}")).json()
                if told["phase"] == "gone":
                    return str(told["reason"])
                await trio.sleep(0.05)

    async def settled(self) -> None:
        """Wait until the pool is full, and Nomad runs just what we know of."""
        await self.client.full(ENVIRONMENT)
        with trio.fail_after(SOON):
            while True:
                runners = (await self.client.http.get("/runners")).json()["runners"]
                allocations = {(await self.allocation(each["id"]))["JobID"] for each in runners}
                if await self.jobs() == allocations | {f"template-{ENVIRONMENT}"}:
                    return
                await trio.sleep(0.1)

    async def run(self, runner: str, command: str, stdin: str = "", **options: object) -> Outcome:
        return await self.client.run(runner, command, stdin, **options)

    async def _get(self, path: str) -> Any:
        answer = await self.nomad.get(f"/v1/{path}")
        answer.raise_for_status()
        return answer.json()


def is_ours(job: str) -> bool:
    return template_id(job) is not None or environment_of(job) is not None


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    headers = {"X-Nomad-Token": TOKEN} if TOKEN else {}
    scope = {"namespace": NAMESPACE}
    with trio.fail_after(PATIENCE):
        async with httpx.AsyncClient(base_url=ADDRESS, headers=headers, params=scope, timeout=30) as nomad:
            listed = (await nomad.get("/v1/jobs")).json()
            found = [job["ID"] for job in listed if is_ours(job["ID"]) and not job["Stop"]]
            assert not found, f"the namespace {NAMESPACE} is in use, and would be taken over: {found[:3]}"
            async with open_daemon(folder, **settings(folder)) as daemon, open_client(daemon) as client:
                site = Site(daemon, client, nomad)
                try:
                    yield site
                finally:
                    with trio.move_on_after(10, shield=True):
                        await client.http.delete(f"/execution-environments/{ENVIRONMENT}")
            assert await site.jobs() == set()


def settings(folder: Path) -> dict[str, str]:
    """The daemon's. Processes of a node have no setuser."""
    driver = "docker" if IMAGE else "raw_exec"
    template = folder / "template.hcl"
    template.write_text(TEMPLATE.read_text().replace('"raw_exec"', f'"{driver}"'))
    own = {"NOMAD_DISABLEFORCEPULL": "true"} if IMAGE else {"NOMAD_SETUSER": ""}
    token = {"NOMAD_TOKEN": TOKEN} if TOKEN else {}
    return {
        "NOMAD_ADDRESS": ADDRESS,
        "NOMAD_NAMESPACE": NAMESPACE,
        "NOMAD_TEMPLATEJOBFILE": str(template),
        "NOMAD_LISTINTERVAL": "10",
        **own,
        **token,
    }


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Site]:
    """With an environment whose pool is full."""
    async with open_site(folder) as site:
        assert await put(site) == 201
        await site.settled()
        yield site


async def put(site: Site) -> int:
    limits = {"prewarmingPoolSize": SIZE, "cpuLimit": 20, "memoryLimit": 64 if IMAGE else 0}
    return await site.client.put(ENVIRONMENT, image=IMAGE or "unused", **limits)


async def test_claim_copy_run_and_delete(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        http = site.client.http
        runner = await site.client.claim(ENVIRONMENT)
        folder = f"/tmp/poseidon-test-{uuid4()}"  # never the working folder: that of raw_exec is the node's root
        script = "cmVhZCBuYW1lOyBlY2hvIEhlbGxvICRuYW1lOyBlY2hvIG9vcHMgPiYyOyBleGl0IDMK"
        copied = [{"path": f"{folder}/hello.sh", "content": script}]
        answer = await http.patch(f"/runners/{runner}/files", json={"copy": copied})
        assert answer.status_code == 204, answer.text
        outcome = await site.run(runner, f"bash {folder}/hello.sh", stdin="Ada\n")
        assert outcome.messages[0] == {"type": "start"}
        assert "Hello Ada\r\n" in outcome.stdout
        assert outcome.stderr.replace("\r", "") == "oops\n"
        assert (outcome.last, outcome.close_code) == ({"type": "exit", "data": 3}, 1000)
        outcome = await site.run(runner, "echo out; echo err >&2; exit 4", tty=False)
        assert (outcome.stdout, outcome.stderr, outcome.last["data"]) == ("out\n", "err\n", 4)
        outcome = await site.run(runner, "head -c 3000000 /dev/zero | tr '\\0' x", tty=False)
        assert outcome.stdout == "x" * 3_000_000
        outcome = await site.run(runner, "trap '' QUIT; while :; do sleep 0.1; done", timeLimit=1)
        assert outcome.last == {"type": "timeout"}
        other = await site.client.claim(ENVIRONMENT)
        assert (await site.run(other, f"rm -rf {folder}; env | grep -c NOMAD_", tty=False)).stdout == "0\n"
        assert (await http.delete(f"/runners/{other}")).status_code == 204
        assert (await http.delete(f"/runners/{other}")).status_code == 410
        await site.settled()


async def test_a_burst_of_executions_loses_no_exit_code_and_no_output(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)

        async def one(number: int) -> None:
            outcome = await site.run(runner, f"echo {number}; exit {number}", tty=number % 2 == 0)
            assert outcome.stdout.split() == [str(number)]
            assert outcome.last == {"type": "exit", "data": number}

        for start in range(0, 60, 10):
            async with trio.open_nursery() as nursery:
                for number in range(start, start + 10):
                    nursery.start_soon(one, number)


@pytest.mark.parametrize("what", ["stop", "restart", "kill"])
async def test_what_an_operator_does_to_used_and_idle_runners_is_told_and_made_good(tmp_path: Path, what: str) -> None:
    async with scene(tmp_path) as site:
        used = await site.client.claim(ENVIRONMENT)
        await site.settled()
        idle = next(each for each in (await site.client.http.get("/runners")).json()["runners"] if each["id"] != used)
        url = await site.client.create(used, "sleep 60")
        ended: list[Outcome] = []
        async with trio.open_nursery() as nursery:

            async def converse() -> None:
                ended.append(await site.client.converse(url))

            nursery.start_soon(converse)
            await trio.sleep(0.5)
            for runner in (used, idle["id"]):
                await order(site, what, (await site.allocation(runner))["ID"])
            reasons = {await site.gone(used), await site.gone(idle["id"])}
        assert reasons <= {"migrated" if what == "stop" else "restarted"}
        assert ended[0].last["type"] in ("error", "exit")
        answer = await site.client.http.post(f"/runners/{used}/execute", json={"command": "true"})
        assert answer.status_code == 410
        await site.settled()
        fresh = [await site.client.claim(ENVIRONMENT) for _ in range(SIZE)]
        assert not {used, idle["id"]} & set(fresh)
        for runner in fresh:
            assert (await site.run(runner, "echo fine", tty=False)).stdout == "fine\n"


async def order(site: Site, what: str, allocation: str) -> None:
    match what:
        case "stop":
            await site.order(f"allocation/{allocation}/stop")
        case "restart":
            await site.order(f"client/allocation/{allocation}/restart")
        case _:
            await site.order(f"client/allocation/{allocation}/signal", Signal="SIGKILL", Task="default-task")


async def test_the_daemon_takes_the_cluster_over_after_it_lost_its_data(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        await site.settled()
        before = await site.jobs()
        await trio.sleep(1)  # the mark is written in the background
        assert site.daemon.process is not None
        site.daemon.process.kill()
        site.daemon.process.wait()
        for file in tmp_path.glob("poseidon.db*"):
            file.unlink()
        await site.daemon.start()
        path = f"/execution-environments/{ENVIRONMENT}?fetch=true"
        assert (await site.client.http.get(path)).json()["prewarmingPoolSize"] == SIZE
        await site.settled()
        assert await site.jobs() == before
        assert (await site.run(runner, "echo mine", tty=False)).stdout == "mine\n"


@pytest.mark.skipif(os.environ.get("POSEIDON_TEST_DRAIN") != "1", reason="POSEIDON_TEST_DRAIN isn't 1")
async def test_a_drained_node_loses_its_runners_and_gets_new_ones_when_it_is_back(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        used = await site.client.claim(ENVIRONMENT)
        await site.settled()
        node = (await site.allocation(used))["NodeID"]
        try:
            await site.order(f"node/{node}/drain", DrainSpec={"Deadline": -1, "IgnoreSystemJobs": True})
            assert await site.gone(used) == "migrated"
            assert (await site.client.http.get(f"/runners/{used}/websocket")).status_code in (400, 410)
        finally:
            with trio.CancelScope(shield=True):
                await site.order(f"node/{node}/drain", DrainSpec=None, MarkEligible=True)
        await site.settled()

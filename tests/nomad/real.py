"""A real daemon on a real cluster: `NOMAD_ADDR=http://127.0.0.1:4646 pytest -m nomad`.

Of a cluster of our own, or with `NOMAD_NAMESPACE` of an empty namespace: whatever Poseidon finds there, it takes over.
`NOMAD_TOKEN` is used if it is set. Runners are processes of the node by the driver raw_exec, or with
`POSEIDON_TEST_IMAGE` Docker containers of that image, which the nodes must have already, as nothing is pulled.
`POSEIDON_TEST_DRAIN=1` allows to drain nodes, for a moment; `POSEIDON_TEST_NETWORK=1` says that they have bridges for
containers, whose ports are reachable from here; `POSEIDON_TEST_RESTART` is a command that kills an agent and
starts it again (with the driver raw_exec and version 1 of cgroups that may leave frozen processes behind).
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
TEMPLATE = Path(__file__).with_name("real_template.hcl")
ENVIRONMENT = 900_001
SIZE = 2
PATIENCE = 110
SOON = 60

needs_cluster = [pytest.mark.nomad, pytest.mark.skipif(not ADDRESS, reason="NOMAD_ADDR isn't set")]
needs_docker = [*needs_cluster, pytest.mark.skipif(not IMAGE, reason="POSEIDON_TEST_IMAGE isn't set")]
needs_drain = pytest.mark.skipif(os.environ.get("POSEIDON_TEST_DRAIN") != "1", reason="POSEIDON_TEST_DRAIN isn't 1")
needs_network = pytest.mark.skipif(
    os.environ.get("POSEIDON_TEST_NETWORK") != "1", reason="POSEIDON_TEST_NETWORK isn't 1"
)


@dataclass
class Site:
    """A daemon, its client, and the cluster as its operator sees it."""

    daemon: Daemon
    client: Client
    nomad: httpx.AsyncClient

    async def jobs(self) -> set[str]:
        """Ours that aren't over."""
        return {job["ID"] for job in await self.get("jobs") if is_ours(job["ID"]) and not job["Stop"]}

    async def runners(self) -> list[dict[str, Any]]:
        """All that live, as the daemon tells them."""
        found: list[dict[str, Any]] = (await self.client.http.get("/runners")).json()["runners"]
        return found

    async def allocation(self, runner: str) -> dict[str, Any]:
        """Where *runner* is, as Nomad tells it."""
        told = (await self.client.http.get(f"/runners/{runner}")).json()
        found: dict[str, Any] = await self.get(f"allocation/{told['allocation']}")
        return found

    async def mark(self, job: str) -> dict[str, str]:
        """What is kept in the meta of a job, for whoever takes it over."""
        groups = (await self.get(f"job/{job}"))["TaskGroups"]
        return dict(next(group["Meta"] for group in groups if group["Name"] == "config"))

    async def order(self, path: str, **body: object) -> None:
        """What an operator does."""
        (await self.nomad.put(f"/v1/{path}", json=body)).raise_for_status()

    async def operate(self, what: str, allocation: str) -> None:
        """Stop, restart or kill an allocation."""
        match what:
            case "stop":
                await self.order(f"allocation/{allocation}/stop")
            case "restart":
                await self.order(f"client/allocation/{allocation}/restart")
            case _:
                await self.order(f"client/allocation/{allocation}/signal", Signal="SIGKILL", Task="default-task")

    @asynccontextmanager
    async def drained(self, node: str) -> AsyncIterator[None]:
        """A node that loses all that it runs, and is eligible again afterwards."""
        try:
            await self.order(f"node/{node}/drain", DrainSpec={"Deadline": -1, "IgnoreSystemJobs": True})
            yield
        finally:
            with trio.CancelScope(shield=True):
                await self.order(f"node/{node}/drain", DrainSpec=None, MarkEligible=True)

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
        with trio.fail_after(SOON):
            while not await self._is_settled():
                await trio.sleep(0.1)

    async def _is_settled(self) -> bool:
        statistics = await self.client.statistics(ENVIRONMENT)
        if statistics["idleRunners"] != statistics["prewarmingPoolSize"]:
            return False
        known = {(await self.allocation(each["id"]))["JobID"] for each in await self.runners()}
        return await self.jobs() == known | {f"template-{ENVIRONMENT}"}

    async def run(self, runner: str, command: str, stdin: str = "", **options: object) -> Outcome:
        return await self.client.run(runner, command, stdin, **options)

    async def get(self, path: str) -> Any:
        answer = await self.nomad.get(f"/v1/{path}")
        answer.raise_for_status()
        return answer.json()


def is_ours(job: str) -> bool:
    return template_id(job) is not None or environment_of(job) is not None


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    headers = {"X-Nomad-Token": TOKEN} if TOKEN else {}
    scope = {"namespace": NAMESPACE}
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
    template = folder / "template.hcl"
    template.write_text(TEMPLATE.read_text().replace('"raw_exec"', '"docker"' if IMAGE else '"raw_exec"'))
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
async def scene(folder: Path, *, patience: float = PATIENCE, **changes: object) -> AsyncIterator[Site]:
    """With an environment whose pool is full."""
    with trio.fail_after(patience):
        async with open_site(folder) as site:
            limits = {"prewarmingPoolSize": SIZE, "cpuLimit": 20, "memoryLimit": 64 if IMAGE else 0}
            assert await site.client.put(ENVIRONMENT, image=IMAGE or "unused", **limits | changes) == 201
            await site.settled()
            yield site

"""Twenty clients on a real cluster while a node is drained or an agent restarts. (real.py tells how to run these.)"""

import os
import shlex
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from websockets.exceptions import WebSocketException

from tests.nomad.real import ENVIRONMENT, IMAGE, SOON, Site, needs_cluster, needs_drain, scene

pytestmark = [*needs_cluster, pytest.mark.timeout(400)]

CLIENTS = 20
POOL = 8
CYCLES = 15
"""Between two disturbances."""
RESTART = os.environ.get("POSEIDON_TEST_RESTART", "")
FOREIGN = 77
"""The exit code of a command that finds another client's traces."""

OWN = f"[ ! -e /tmp/owner ] || exit {FOREIGN}; echo {{name}} >/tmp/owner; " if IMAGE else ""
"""Processes of a node share its files, so they can't tell."""


@dataclass
class Crowd:
    """The clients, and all that they were ever given; *stop* ends them after the cycle that they are in."""

    site: Site
    runners: Counter[str] = field(default_factory=Counter)
    allocations: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stop: bool = False

    async def cycles(self, done: int) -> None:
        """Wait until so many more have run to their end."""
        wanted = self.ends["exit"] + done
        with trio.fail_after(3 * SOON):
            while self.ends["exit"] < wanted:
                await trio.sleep(0.05)

    async def client(self, number: int) -> None:
        cycle = 0
        while not self.stop:
            cycle += 1
            self.ends[await self._cycle(f"{number}-{cycle}")] += 1

    async def _cycle(self, name: str) -> str:
        """Claim, copy, run, delete. How it ended: whatever befalls the runner, nothing else may go wrong."""
        http = self.site.client.http
        request = {"executionEnvironmentId": ENVIRONMENT, "inactivityTimeout": 300}
        claimed = await http.post("/runners", json=request)
        if claimed.status_code == 500:
            await trio.sleep(0.2)
            return str(claimed.json()["errorCode"])
        runner = claimed.json()["runnerId"]
        self.runners[runner] += 1
        self.allocations[(await http.get(f"/runners/{runner}")).json()["allocation"]] += 1
        try:
            return await self._use(runner, name)
        finally:
            answer = await http.delete(f"/runners/{runner}")  # noqa: ASYNC102 - a cancelled test deletes all
            if answer.status_code not in (204, 410):
                self.wrong.append(f"DELETE: {answer.status_code} {answer.text}")

    async def _use(self, runner: str, name: str) -> str:
        http = self.site.client.http
        folder = f"/tmp/poseidon-load-{runner}"
        copied = [{"path": f"{folder}/name", "content": ""}]
        answer = await http.patch(f"/runners/{runner}/files", json={"copy": copied})
        if answer.status_code != 204:
            return f"copy {answer.status_code}"
        command = f"{OWN.format(name=name)}test -e {folder}/name && rm -r {folder} && echo {name}"
        asked = {"command": command, "tty": False, "privilegedExecution": True}  # or it couldn't remove the files
        answer = await http.post(f"/runners/{runner}/execute", json=asked)
        if answer.status_code != 200:
            return f"execute {answer.status_code}"
        try:
            outcome = await self.site.client.converse(answer.json()["websocketUrl"])
        except WebSocketException as error:
            return f"websocket {error}"
        last = outcome.last
        if last["type"] == "exit" and (last["data"], outcome.stdout) != (0, f"{name}\n"):
            self.wrong.append(f"{runner}: {outcome.messages}")
        return str(last["type"])

    def check(self) -> None:
        assert self.wrong == []
        assert [runner for runner, times in self.runners.items() if times > 1] == []
        assert [allocation for allocation, times in self.allocations.items() if times > 1] == []


async def node_of(site: Site) -> str:
    """One that runs something of ours."""
    return str((await site.allocation((await site.runners())[0]["id"]))["NodeID"])


@needs_drain
async def test_a_drain_under_load_shares_and_loses_no_runner(tmp_path: Path) -> None:
    async with scene(tmp_path, patience=300, prewarmingPoolSize=POOL) as site:
        crowd, node = Crowd(site), await node_of(site)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(crowd.client, number)
            for _ in range(3):
                await crowd.cycles(CYCLES)
                async with site.drained(node):
                    await until_empty(site)
            await crowd.cycles(CYCLES)
            crowd.stop = True
        await site.settled()
        print(dict(crowd.ends))  # shown by -s
        crowd.check()


async def until_empty(site: Site) -> None:
    with trio.fail_after(SOON):
        while (await site.client.statistics(ENVIRONMENT))["idleRunners"]:
            await trio.sleep(0.05)


@pytest.mark.skipif(not RESTART, reason="POSEIDON_TEST_RESTART isn't set")
async def test_an_agent_that_restarts_under_load_shares_and_loses_no_runner(tmp_path: Path) -> None:
    async with scene(tmp_path, patience=300, prewarmingPoolSize=POOL) as site:
        crowd = Crowd(site)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(crowd.client, number)
            for _ in range(3):
                await crowd.cycles(CYCLES)
                await trio.to_thread.run_sync(restart)
            await crowd.cycles(CYCLES)
            crowd.stop = True
        await site.settled()
        print(dict(crowd.ends))  # shown by -s
        crowd.check()


def restart() -> None:
    subprocess.run(shlex.split(RESTART), check=True, timeout=SOON, stdin=subprocess.DEVNULL)

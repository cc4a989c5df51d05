"""The main job on a real cluster, and what its operator may do to it. (real.py tells how to run these.)"""

from base64 import b64decode
from pathlib import Path
from uuid import uuid4

import pytest
import trio

from tests.e2e.daemons import Outcome
from tests.nomad.real import ENVIRONMENT, IMAGE, SIZE, SOON, Site, needs_cluster, needs_drain, scene

pytestmark = needs_cluster

MARK = {} if IMAGE else {"image": "unused"}
"""What is kept beside the mark: drivers without images have no other place for theirs."""


async def test_claim_copy_run_and_delete(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        http = site.client.http
        runner = await site.client.claim(ENVIRONMENT)
        folder = f"/tmp/poseidon-test-{uuid4()}"  # never the working folder: that of raw_exec is the node's root
        script = "cmVhZCBuYW1lOyBlY2hvIEhlbGxvICRuYW1lOyBlY2hvIG9vcHMgPiYyOyBleGl0IDMK"
        copied = [{"path": f"{folder}/hello.sh", "content": script}]
        answer = await http.patch(f"/runners/{runner}/files", json={"copy": copied})
        assert answer.status_code == 204, answer.text
        listed = (await http.get(f"/runners/{runner}/files", params={"path": folder})).json()["files"]
        assert [(each["name"], each["size"]) for each in listed] == [(f"{folder}/hello.sh", 51)]
        raw = await http.get(f"/runners/{runner}/files/raw", params={"path": f"{folder}/hello.sh"})
        assert (raw.status_code, raw.content) == (200, b64decode(script))
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
        idle = next(each for each in await site.runners() if each["id"] != used)
        url = await site.client.create(used, "sleep 60")
        ended: list[Outcome] = []
        async with trio.open_nursery() as nursery:

            async def converse() -> None:
                ended.append(await site.client.converse(url))

            nursery.start_soon(converse)
            await trio.sleep(0.5)
            for runner in (used, idle["id"]):
                await site.operate(what, (await site.allocation(runner))["ID"])
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


async def test_a_second_daemon_without_data_takes_over_what_the_first_one_left(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        await site.settled()
        await until_marked(site, runner, used="true", timeout="60")
        before = await site.jobs()
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
        fresh = [await site.client.claim(ENVIRONMENT) for _ in range(SIZE)]
        assert runner not in fresh


async def until_marked(site: Site, job: str, **wanted: str) -> None:
    """Marks are written in the background."""
    with trio.fail_after(SOON):
        while await site.mark(job) != MARK | wanted:
            await trio.sleep(0.05)


async def test_what_nomad_holds_is_what_the_original_reads_when_it_takes_over(tmp_path: Path) -> None:
    """Templates that run, a mark on each runner, one allocation of each that isn't over, and nobody's id changed."""
    async with scene(tmp_path) as site:
        used, moved = await site.client.claim(ENVIRONMENT), await site.client.claim(ENVIRONMENT)
        await until_marked(site, moved, used="true", timeout="60")
        await site.operate("stop", (await site.allocation(moved))["ID"])
        assert await site.gone(moved) == "migrated"
        await until_marked(site, used, used="true", timeout="60")
        await site.settled()
        template = f"template-{ENVIRONMENT}"
        assert (await site.get(f"job/{template}"))["Status"] == "running"
        assert await site.mark(template) == MARK | {"used": "false", "prewarmingPoolSize": str(SIZE)}
        for job in await site.jobs() - {template}:
            groups = {group["Name"]: group["Count"] for group in (await site.get(f"job/{job}"))["TaskGroups"]}
            assert groups == {"default-group": 1, "config": 0}
            allocations = await site.get(f"job/{job}/allocations")
            assert [each["ClientStatus"] for each in allocations if each["DesiredStatus"] == "run"] == ["running"]
            if job == used:
                assert await site.mark(job) == MARK | {"used": "true", "timeout": "60"}
            else:
                await until_unused(site, job)


async def until_unused(site: Site, job: str) -> None:
    """What was used once may have kept its timeout; it doesn't count there."""
    with trio.fail_after(SOON):
        while (await site.mark(job))["used"] != "false":
            await trio.sleep(0.05)


@needs_drain
async def test_a_drained_node_loses_its_runners_and_gets_new_ones_when_it_is_back(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        used = await site.client.claim(ENVIRONMENT)
        await site.settled()
        node = (await site.allocation(used))["NodeID"]
        async with site.drained(node):
            assert await site.gone(used) == "migrated"
            assert (await site.client.http.get(f"/runners/{used}/websocket")).status_code in (400, 410)
        await site.settled()

"""What Docker does its own way: lost exit codes, memory, terminals, networks. (real.py tells how to run these.)"""

import json
import shlex
from pathlib import Path

import httpx
import pytest
import trio

from tests.api.service import TERMINAL, connected, next_of, read
from tests.nomad.real import ENVIRONMENT, SOON, needs_docker, needs_network, scene

pytestmark = needs_docker

AT_ONCE = 10
HOG = "head -c 300000000 /dev/zero | tail"
"""`tail` keeps the last line, however long: more than the runner's 64 MB."""
MANY_HOGS = "for ((i = 0; i < 60; i++)); do { head -c 3000000 /dev/zero; sleep 30; } | tail >/dev/null & done; wait"
"""None of them is worth being killed, compared with a process that offers itself."""
ANSWERER = """
import socket
while True:
    with socket.create_server(("", 8080)) as server, server.accept()[0] as peer:
        peer.recv(4096)
        peer.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nreached")
"""
OUT_OF_MEMORY = {"type": "error", "data": "the allocation was OOM Killed"}


@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipes"])
async def test_no_exit_code_of_200_executions_is_lost(tmp_path: Path, tty: bool) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        ends: list[tuple[int, object]] = []

        async def executes(number: int) -> None:
            outcome = await site.run(runner, "exit 3" if number % 2 else "true", tty=tty)
            ends.append((number % 2 * 3, outcome.last.get("data")))

        for _ in range(200 // AT_ONCE):
            async with trio.open_nursery() as nursery:
                for number in range(AT_ONCE):
                    nursery.start_soon(executes, number)
        assert len(ends) == 200
        assert [each for each in ends if each[0] != each[1]] == []


async def test_input_arrives_whole_and_its_end_is_told(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        url = await site.client.create(runner, "wc -c; echo done >&2; exit 5", tty=False)
        async with connected(url, subprotocol=TERMINAL) as channel:
            for _ in range(20):
                await channel.send(b"x" * 50_000)
            await channel.send(json.dumps({"type": "eof"}))
            ended = await read(channel, within=SOON)
        assert (ended.text(), ended.text("stderr")) == ("1000000\n", "done\n")
        assert ended.final == {"type": "exit", "data": 5}


async def test_a_terminal_has_the_size_that_its_client_says_from_the_start(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        outcome = await site.run(runner, "stty size; tty >/dev/null && echo terminal", rows=40, columns=123)
        assert outcome.stdout == "40 123\r\nterminal\r\n"
        command = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done"
        async with connected(await site.client.create(runner, command), subprotocol=TERMINAL) as channel:
            await next_of(channel, "stdout", within=SOON)
            await channel.send(json.dumps({"type": "resize", "rows": 24, "columns": 80}))
            assert (await read(channel, within=SOON)).text() == "24 80\r\n"


async def test_users_are_who_the_image_and_the_client_say(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        assert (await site.run(runner, "id -un; echo $HOME", tty=False)).stdout == "user\n/home/user\n"
        assert (await site.run(runner, "id -un", privilegedExecution=True, tty=False)).stdout == "root\n"


@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipes"])
async def test_a_command_that_exceeds_the_memory_says_so_and_its_runner_lives_on(tmp_path: Path, tty: bool) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        assert (await site.run(runner, HOG, tty=tty)).last == OUT_OF_MEMORY
        assert (await site.run(runner, "echo alive", tty=tty)).stdout.strip() == "alive"
        await site.operate("restart", (await site.allocation(runner))["ID"])
        assert await site.gone(runner) in ("restarted", "out_of_memory")  # Docker remembers it for the container
        await site.settled()


async def test_a_runner_that_is_killed_for_its_memory_ends_with_that_reason(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        command = f"echo 1000 >/proc/1/oom_score_adj; {MANY_HOGS}"
        outcome = await site.run(runner, command, privilegedExecution=True, tty=False)
        assert outcome.last == OUT_OF_MEMORY
        assert await site.gone(runner) == "out_of_memory"
        answer = await site.client.http.post(f"/runners/{runner}/execute", json={"command": "true"})
        assert (answer.status_code, "out_of_memory" in answer.text) == (410, True)
        await site.settled()


async def test_an_image_that_isnt_there_is_told_of_with_its_reason(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        image = "poseidon-test.invalid/nothing:1"
        assert await site.client.put(ENVIRONMENT + 1, image=image, prewarmingPoolSize=1) == 201
        try:
            with trio.fail_after(SOON):
                while image not in site.daemon.log:
                    await trio.sleep(0.1)
            told = (await site.client.http.get(f"/execution-environments/{ENVIRONMENT + 1}")).json()
            assert image in told["message"]
        finally:
            with trio.move_on_after(10, shield=True):
                await site.client.http.delete(f"/execution-environments/{ENVIRONMENT + 1}")


async def test_without_a_network_there_is_none(tmp_path: Path) -> None:
    async with scene(tmp_path) as site:
        runner = await site.client.claim(ENVIRONMENT)
        assert (await site.run(runner, "ls /sys/class/net", tty=False)).stdout == "lo\n"


@needs_network
async def test_a_port_in_the_runner_is_reached_by_the_address_that_its_client_is_told(tmp_path: Path) -> None:
    async with scene(tmp_path, networkAccess=True, exposedPorts=[8080]) as site:
        request = {"executionEnvironmentId": ENVIRONMENT, "inactivityTimeout": 60}
        claimed = (await site.client.http.post("/runners", json=request)).json()
        [port] = claimed["mappedPorts"]
        assert port["exposedPort"] == 8080
        runner = claimed["runnerId"]
        url = await site.client.create(runner, f"exec python3 -c {shlex.quote(ANSWERER)}", tty=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(site.client.converse, url)
            assert await fetch(f"http://{port['hostAddress']}/") == "reached"
            nursery.cancel_scope.cancel()


async def fetch(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False) as http:
        with trio.fail_after(SOON):
            while True:
                try:
                    return (await http.get(url)).text
                except httpx.TransportError:  # not listening yet, or between two connections
                    await trio.sleep(0.05)

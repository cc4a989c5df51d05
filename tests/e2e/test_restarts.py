"""Restarts and crashes of a real daemon lose nothing that was answered."""

import os
import signal
import sqlite3
from pathlib import Path

import httpx
import pytest
import trio
from websockets.exceptions import WebSocketException

from tests.e2e.daemons import Client, Daemon, open_client, open_daemon


async def test_after_a_restart_claims_files_and_waiting_executions_are_there(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon:
        async with open_client(daemon) as client:
            await client.put()
            runner = await client.claim()
            await client.copy(runner, {"x": b"still here"})
            url = await client.create(runner, "cat x")
            await client.full()
            idle = {each["id"] for each in (await client.http.get("/runners")).json()["runners"]} - {runner}
        assert daemon.process is not None
        daemon.process.kill()
        daemon.process.wait()
        await daemon.start()
        async with open_client(daemon) as client:
            assert (await client.converse(url)).stdout == "still here"
            assert await client.claim() in idle
            await client.full()


async def test_running_executions_are_told_of_a_stop_and_others_may_end(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, SERVER_DRAINTIMEOUT="3") as daemon, open_client(daemon) as client:
        await client.put()
        quick, slow = await client.claim(), await client.claim()
        urls = {
            "quick": await client.create(quick, "sleep 1; echo done"),
            "slow": await client.create(slow, "sleep 60"),
        }
        ended = {}

        async def converse(name: str) -> None:
            ended[name] = await client.converse(urls[name])

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for name in urls:
                    nursery.start_soon(converse, name)
                await trio.sleep(0.5)
                assert daemon.process is not None
                daemon.process.send_signal(signal.SIGTERM)
                await trio.sleep(0.3)
                refused = await client.http.post("/runners", json={"executionEnvironmentId": 1})
                assert (refused.status_code, refused.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
                assert "Retry-After" in refused.headers
            assert await trio.to_thread.run_sync(daemon.process.wait) == 0
        assert ended["quick"].last == {"type": "exit", "data": 0}
        assert ended["slow"].last["type"] == "error"
        assert ended["slow"].close_code == 1001


async def test_a_second_signal_hurries(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, SERVER_DRAINTIMEOUT="60") as daemon, open_client(daemon) as client:
        await client.put()
        url = await client.create(await client.claim(), "sleep 60")
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.converse, url)
                await trio.sleep(0.5)
                assert daemon.process is not None
                daemon.process.send_signal(signal.SIGINT)
                await trio.sleep(0.3)
                assert daemon.process.poll() is None
                daemon.process.send_signal(signal.SIGINT)
            assert await trio.to_thread.run_sync(daemon.process.wait) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
# httpx leaves the body of a request whose server died to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_killed_at_any_moment_under_load_it_keeps_every_claim_that_was_answered(tmp_path: Path) -> None:
    """Rounds of load, kill -9, start: answered claims are there, usable or 410; pools fill again; no stray sandbox."""
    rounds, answered = 8, set[str]()
    async with open_daemon(tmp_path) as daemon:
        async with open_client(daemon) as client:
            await client.put(prewarmingPoolSize=4)
            await client.full()
        for number in range(rounds):
            await _load_and_kill(daemon, answered, 0.15 + 0.1 * number)
            await daemon.start()
            async with open_client(daemon) as client:
                for runner in list(answered):
                    told = await client.http.post(f"/runners/{runner}/execute", json={"command": "true"})
                    assert told.status_code in (200, 410), told.text
                    if told.status_code == 410:
                        answered.discard(runner)
                    elif number % 3 == 0:
                        assert (await client.converse(told.json()["websocketUrl"])).last["type"] in ("exit", "error")
                with trio.fail_after(30):
                    await client.full()
                await _no_stray_sandboxes(client, tmp_path)
                for runner in list(answered)[4:]:
                    await client.http.delete(f"/runners/{runner}")
                    answered.discard(runner)


async def _load_and_kill(daemon: Daemon, answered: set[str], after: float) -> None:
    async with open_client(daemon) as client:

        async def work() -> None:
            try:
                while True:
                    runner = await client.claim(timeout=600)
                    answered.add(runner)
                    await client.copy(runner, {"x": b"x"})
                    await client.run(runner, "cat x")
                    if len(answered) > 6:
                        answered.discard(runner)
                        await client.http.delete(f"/runners/{runner}")
            except (httpx.TransportError, WebSocketException, OSError):
                return

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(work)
            await trio.sleep(after)
            assert daemon.process is not None
            daemon.process.kill()
            daemon.process.wait()


async def _no_stray_sandboxes(client: Client, folder: Path) -> None:
    """The sandboxes with processes in them are those that the store knows, once stops under way have ended."""
    living: set[str] = set()
    known: set[str] = set()
    with trio.move_on_after(15):
        while True:
            with sqlite3.connect(folder / "poseidon.db") as database:
                (instance,) = database.execute("SELECT value FROM meta WHERE key = 'instance'").fetchone()
                known = {row[0] for row in database.execute("SELECT allocation FROM sandboxes WHERE state = 'running'")}
            living = {group.parent.name for group in _groups(instance) if group.read_text().strip()}
            if living == known:
                return
            await trio.sleep(0.1)
    raise AssertionError(f"not known: {living - known}, not there: {known - living}")


def _groups(instance: str) -> list[Path]:
    """The files that list the processes of each sandbox of this store, in whichever hierarchy counts processes."""
    roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    return [
        Path(folder, "cgroup.procs")
        for root in roots
        for folder, _, files in os.walk(root)  # others' groups may go meanwhile
        if Path(folder).parent.name == f"poseidon-{instance}" and "cgroup.procs" in files
    ]

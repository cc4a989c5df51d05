"""A platform's way through a real daemon and real sandboxes."""

import json
import signal
import sqlite3
import subprocess
from pathlib import Path

import httpx
import pytest
import trio
from websockets.exceptions import InvalidStatus
from websockets.trio.client import connect

from tests.e2e.daemons import open_client, open_daemon


async def test_claim_copy_run_and_delete(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        assert await client.put() == 201
        assert await client.put(prewarmingPoolSize=3) == 204
        runner = await client.claim()
        await client.copy(runner, {"hello.py": b"print('Hello', input())\n", "data/x": b"\x00\xff"})
        outcome = await client.run(runner, "python3 hello.py && wc -c < data/x", stdin="Ada\n")
        assert outcome.messages[0] == {"type": "start"}
        assert outcome.stdout == "Ada\r\nHello Ada\r\n2\r\n"
        assert outcome.last == {"type": "exit", "data": 0}
        assert outcome.close_code == 1000
        outcome = await client.run(runner, "echo out; echo err >&2; exit 3", tty=False)
        assert (outcome.stdout, outcome.stderr, outcome.last["data"]) == ("out\n", "err\n", 3)
        assert (await client.http.delete(f"/runners/{runner}")).status_code == 204
        gone = await client.http.delete(f"/runners/{runner}")
        assert gone.status_code == 410
        assert "released" in gone.json()["message"]
        await client.full()
        assert await client.statistics() == {"id": 1, "prewarmingPoolSize": 3, "idleRunners": 3, "usedRunners": 0}


async def test_a_time_limit_ends_a_program_that_will_not(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        await client.put()
        runner = await client.claim()
        began = trio.current_time()
        outcome = await client.run(runner, "trap '' QUIT TERM INT; echo on; while :; do sleep 1; done", timeLimit=1)
        assert outcome.last == {"type": "timeout"}
        assert trio.current_time() - began < 20
        assert "on" in outcome.stdout


async def test_a_claim_tells_where_exposed_ports_are_reached_also_after_a_restart(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        await client.put(exposedPorts=[8080])
        await client.full()
        await daemon.end(signal.SIGKILL)
        await daemon.start()
        claimed = await client.http.post("/runners", json={"executionEnvironmentId": 1, "inactivityTimeout": 60})
        (port,) = claimed.json()["mappedPorts"]
        assert port["exposedPort"] == 8080
        host, number = port["hostAddress"].split(":")
        script = "import http.server as h; h.HTTPServer(('', 8080), h.SimpleHTTPRequestHandler).handle_request()"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run, claimed.json()["runnerId"], f'python3 -c "{script}"')
            answer = b""
            with trio.fail_after(20):
                while not answer:  # connections before the server listens are turned away
                    async with await trio.open_tcp_stream(host, int(number)) as stream:
                        try:
                            await stream.send_all(b"HEAD / HTTP/1.0\r\n\r\n")
                            answer = await stream.receive_some()
                        except trio.BrokenResourceError:
                            await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        assert answer.startswith(b"HTTP/1.0 200")


async def test_two_runners_do_not_see_each_other(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        await client.put()
        first, second = await client.claim(), await client.claim()
        await client.copy(first, {"secret": b"mine"})
        outcome = await client.run(second, "ls -A; cat /workspace/secret; ps ax 2>/dev/null | wc -l", tty=False)
        assert "secret" not in outcome.stdout
        assert "No such file" in outcome.stderr


async def test_a_killed_runner_ends_its_execution_and_is_410_with_the_reason(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        await client.put()
        runner = await client.claim()
        url = await client.create(runner, "sleep 60")
        with trio.fail_after(30):
            async with connect(url, compression=None, proxy=None) as channel:
                assert json.loads(await channel.recv()) == {"type": "start"}
                await trio.sleep(0.2)
                with sqlite3.connect(tmp_path / "poseidon.db") as database:
                    (pid,) = database.execute("SELECT pid FROM sandboxes WHERE job = ?", [runner]).fetchone()
                subprocess.run(["kill", "-9", str(pid)], check=True)
                assert json.loads(await channel.recv())["type"] == "error"
        answer = await client.http.post(f"/runners/{runner}/execute", json={"command": "true"})
        assert answer.status_code == 410
        told = (await client.http.get(f"/runners/{runner}")).json()
        assert told["phase"] == "gone"
        assert told["reason"] in ("failed", "complete", "lost")
        await client.full()


async def test_every_route_but_health_and_version_wants_the_token(tmp_path: Path) -> None:
    secret = "a-token-of-some-length"
    async with open_daemon(tmp_path, SERVER_TOKEN=secret) as daemon:
        async with open_client(daemon) as stranger, open_client(daemon, secret) as friend:
            assert await friend.put() == 201
            runner = await friend.claim()
            for method, path in [
                ("GET", "/status"),
                ("GET", "/statistics/execution-environments"),
                ("GET", "/execution-environments"),
                ("PUT", "/execution-environments/1"),
                ("POST", "/runners"),
                ("GET", f"/runners/{runner}"),
                ("PATCH", f"/runners/{runner}/files"),
                ("POST", f"/runners/{runner}/execute"),
                ("DELETE", f"/runners/{runner}"),
            ]:
                answer = await stranger.http.request(method, path, content=b"{}")
                assert (answer.status_code, answer.content) == (401, b""), path
            url = await friend.create(runner, "true")
            with pytest.raises(InvalidStatus, match="401"):
                await stranger.converse(url)
            assert (await friend.converse(url)).last == {"type": "exit", "data": 0}
            assert (await stranger.http.get("/health")).status_code == 204
            assert (await stranger.http.get("/version")).status_code == 200
        assert secret not in daemon.log


async def test_an_operator_reads_the_database_while_the_daemon_works(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        await client.put()
        runner = await client.claim()
        query = "SELECT id, phase, node_name FROM runners WHERE phase = 'used'"
        printed = subprocess.run(
            ["sqlite3", str(tmp_path / "poseidon.db"), query], capture_output=True, text=True, check=True
        )
        assert printed.stdout.startswith(f"{runner}|used|")
        reader = sqlite3.connect(tmp_path / "poseidon.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runners").fetchone()
        with trio.fail_after(30):
            await client.claim()
        reader.close()


async def test_bad_requests_are_told_apart(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, SERVER_MAXBODYMB="1") as daemon, open_client(daemon) as client:
        http = client.http
        await client.put()
        runner = await client.claim()

        async def status(method: str, path: str, content: bytes = b"") -> int:
            answer = await http.request(method, path, content=content)
            if answer.status_code == 400:
                assert answer.json()["message"]
            return answer.status_code

        assert await status("POST", "/runners", b"{nonsense") == 400
        assert await status("POST", "/runners", b"") == 400
        assert await status("POST", "/runners", b'{"executionEnvironmentId": "1"}') == 400
        assert await status("POST", "/runners", b'{"executionEnvironmentId": 9999}') == 404
        assert await status("PUT", "/execution-environments/1", b'{"prewarmingPoolSize": -1}') == 400
        assert await status("PUT", "/execution-environments/abc", b"{}") == 404
        assert await status("PUT", "/execution-environments/99999999999999999999", b"{}") == 400
        too_small = json.dumps({"image": "x", "memoryLimit": 1}).encode()
        assert await status("PUT", "/execution-environments/2", too_small) == 400
        assert await status("DELETE", "/execution-environments/77") == 404
        assert await status("GET", "/runners/n0n-3x1st1ng-1d/websocket") in (400, 410)
        assert await status("DELETE", "/runners/n0n-3x1st1ng-1d") == 410
        assert await status("PATCH", f"/runners/{runner}/files", b'{"copy": [{"path": "x", "content": "?"}]}') == 400
        assert await status("PATCH", f"/runners/{runner}/files", b"x" * 2_000_000) == 413
        assert await status("POST", "/health") == 405
        assert await status("GET", "/nowhere") == 404
        assert await status("POST", f"/runners/{runner}/execute", b'{"command": "' + b"x" * 140_000 + b'"}') == 400
        assert (await client.run(runner, "true")).last == {"type": "exit", "data": 0}


async def test_a_hundred_cycles_leave_nothing(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        await client.put(prewarmingPoolSize=5)

        async def cycles() -> None:
            for _ in range(10):
                runner = await client.claim()
                await client.copy(runner, {"main.py": b"print(6 * 7)"})
                assert "42" in (await client.run(runner, "python3 main.py")).stdout
                assert (await client.http.delete(f"/runners/{runner}")).status_code == 204

        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(cycles)
        await client.full()
        listed = (await client.http.get("/runners")).json()["runners"]
        assert len(listed) == 5
        assert (await client.http.get("/health")).status_code == httpx.codes.NO_CONTENT

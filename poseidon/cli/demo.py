"""`make run`: a daemon of its own, a first program in it, what each step took, and a clean stop.

Also an example of a client: plain HTTP and a WebSocket, nothing of Poseidon's.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import trio
from websockets.trio.client import connect

PROGRAM = """\
import time

name = input("What is your name? ")
print(f"Hello {name}! Counting the squares:")
for number in range(1, 6):
    print(f"  {number} x {number} = {number * number}", flush=True)
    time.sleep(0.2)
"""
ANSWER = "Ada\n"
START_WITHIN = 30.0
STOP_WITHIN = 60.0
ENVIRONMENT = 1


class DemoFailed(Exception):
    """Something went wrong; the message says what."""


class Steps:
    """Prints what is done, and how long it took."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step; the time is printed behind it."""
        begun = time.perf_counter()
        yield
        print(f"  {what:<58} {1000 * (time.perf_counter() - begun):8.1f} ms", flush=True)


async def demo() -> None:
    """All steps, the stop included."""
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="poseidon-demo-") as folder:
        port = _free_port()
        print("A first program in Poseidon:")
        async with _daemon(Path(folder), port, steps):
            url = f"http://127.0.0.1:{port}/api/v1"
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                await _run_program(http, steps)
    print(f"Done in {time.perf_counter() - steps.begun:.1f} s. Now: `{_poseidon()} serve`, and in another terminal")
    print(f"`{_poseidon()} run -- python3 -c 'print(6 * 7)'`. README.md shows the same by curl.")


async def _run_program(http: httpx.AsyncClient, steps: Steps) -> None:
    wanted = {"image": "default", "prewarmingPoolSize": 2, "cpuLimit": 20, "memoryLimit": 128}
    wanted |= {"networkAccess": False, "exposedPorts": []}
    with steps.step("PUT an environment with two runners in its pool"):
        await _call(http, "PUT", f"/execution-environments/{ENVIRONMENT}", wanted)
    with steps.step("POST /runners: claim one (the first has to start)"):
        claim = {"executionEnvironmentId": ENVIRONMENT, "inactivityTimeout": 60}
        runner = (await _call(http, "POST", "/runners", claim))["runnerId"]
    with steps.step("PATCH its files: copy hello.py into it"):
        copied = [{"path": "hello.py", "content": b64encode(PROGRAM.encode()).decode()}]
        await _call(http, "PATCH", f"/runners/{runner}/files", {"copy": copied})
    with steps.step("POST an execution"):
        command = {"command": "python3 hello.py", "timeLimit": 30}
        address = (await _call(http, "POST", f"/runners/{runner}/execute", command))["websocketUrl"]
    with steps.step("Run it over the WebSocket, its question answered"):
        await _converse(address)
    with steps.step("DELETE the runner"):
        await _call(http, "DELETE", f"/runners/{runner}")
    with steps.step("POST /runners again: claim a pre-warmed one"):
        runner = (await _call(http, "POST", "/runners", claim))["runnerId"]
    with steps.step("POST an execution of `true`, and run it"):
        address = (await _call(http, "POST", f"/runners/{runner}/execute", {"command": "true"}))["websocketUrl"]
        await _converse(address)


async def _converse(address: str) -> None:
    """Print output as it comes, answer the first question, and wait for the end."""
    answered = False
    async with connect(address, compression=None, proxy=None) as channel:
        async for frame in channel:
            message = json.loads(frame)
            match message["type"]:
                case "stdout" | "stderr":
                    print("".join(f"    | {line}\n" for line in message["data"].splitlines()), end="", flush=True)
                    if "?" in message["data"] and not answered:
                        answered = True
                        await channel.send(ANSWER)
                case "exit" if message["data"] != 0:
                    raise DemoFailed(f"the program ended with exit code {message['data']}")
                case "error" | "timeout":
                    raise DemoFailed(f"the execution ended with {frame!r}")


@asynccontextmanager
async def _daemon(folder: Path, port: int, steps: Steps) -> AsyncIterator[None]:
    """A daemon with data of its own, stopped with all its runners at the end."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("POSEIDON_")}
    environ |= {"POSEIDON_STORE_PATH": str(folder / "poseidon.db"), "POSEIDON_SERVER_PORT": str(port)}
    environ |= {"POSEIDON_LOGGING_FORMAT": "console"}
    log = folder / "log"
    command = [sys.executable, "-m", "poseidon", "serve", "--stop-runners"]
    with log.open("wb") as output:
        start = partial(
            subprocess.Popen, command, env=environ, cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        with steps.step("Start the daemon until it answers"):
            daemon = await trio.to_thread.run_sync(start)
            try:
                await _until_healthy(daemon, port, log)
            except BaseException:
                daemon.kill()
                raise
        try:
            yield
        finally:
            with steps.step("Stop the daemon and all its runners"), trio.CancelScope(shield=True):
                daemon.send_signal(signal.SIGTERM)
                status = await trio.to_thread.run_sync(partial(daemon.wait, STOP_WITHIN))
        if status != 0:
            raise DemoFailed(f"the daemon ended with status {status}:\n{_tail(log)}")


async def _until_healthy(daemon: "subprocess.Popen[str]", port: int, log: Path) -> None:
    with trio.move_on_after(START_WITHIN):
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            while daemon.poll() is None:
                try:
                    if (await http.get(f"http://127.0.0.1:{port}/api/v1/health")).status_code == httpx.codes.NO_CONTENT:
                        return
                except httpx.TransportError:
                    pass
                await trio.sleep(0.02)
    raise DemoFailed(f"the daemon didn't start:\n{_tail(log)}")


async def _call(http: httpx.AsyncClient, method: str, path: str, body: object = None) -> dict[str, str]:
    answer = await http.request(method, path, json=body)
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise DemoFailed(f"{method} {path} was answered with {answer.status_code}: {answer.text}")
    return dict(answer.json()) if answer.content else {}


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _poseidon() -> str:
    beside = Path(sys.executable).with_name("poseidon")
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)


def main() -> int:
    """The exit status."""
    status = 0
    try:
        trio.run(demo)
    except* DemoFailed as failed:
        print(f"poseidon: {failed.exceptions[0]}", file=sys.stderr)
        status = 1
    except* KeyboardInterrupt:
        status = 130
    return status


if __name__ == "__main__":
    sys.exit(main())

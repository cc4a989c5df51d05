"""A real daemon as a process of its own, with data in a test's folder, and a client of its API."""

import json
import os
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
from websockets.trio.client import connect

ENVIRONMENT = {
    "image": "default",
    "prewarmingPoolSize": 2,
    "cpuLimit": 20,
    "memoryLimit": 64,
    "networkAccess": False,
    "exposedPorts": [],
}


def environ(folder: Path, port: int, **settings: str) -> dict[str, str]:
    """The variables of a daemon that keeps its data in *folder*."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("POSEIDON_")}
    own = {
        "POSEIDON_STORE_PATH": str(folder / "poseidon.db"),
        "POSEIDON_SERVER_PORT": str(port),
        "POSEIDON_LOCAL_MAXRUNNERS": "200",
    }
    return kept | own | {f"POSEIDON_{key}": value for key, value in settings.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Daemon:
    """Started by `start`; it may be started again on the same data."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[str] | None" = None
    arguments: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api/v1"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    async def spawn(self) -> None:
        """Begin, without waiting for anything."""
        with (self.folder / "log").open("ab") as log:
            self.process = await trio.to_thread.run_sync(
                partial(
                    subprocess.Popen,
                    [sys.executable, "-m", "poseidon", "serve", *self.arguments],
                    env=environ(self.folder, self.port, **self.settings),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                )
            )

    async def start(self) -> None:
        """Begin, and wait until it is healthy."""
        await self.spawn()
        await self.until_health(httpx.codes.NO_CONTENT)

    async def until_health(self, status: int) -> None:
        assert self.process is not None
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            with trio.fail_after(60):
                while True:
                    assert self.process.poll() is None, self.log
                    try:
                        if (await http.get(f"{self.url}/health")).status_code == status:
                            return
                    except httpx.TransportError:
                        pass
                    await trio.sleep(0.02)

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        with trio.fail_after(60):
            return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    async def clear(self) -> None:
        """Destroy all runners, whatever state the daemon was left in."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.arguments = ("--stop-runners",)
        await self.start()
        assert await self.end() == 0, self.log


@asynccontextmanager
async def open_daemon(folder: Path, **settings: str) -> AsyncIterator[Daemon]:
    """A healthy daemon; at the end nothing is left of it and of its runners."""
    daemon = Daemon(folder, settings, arguments=("--stop-runners",))
    await daemon.start()
    try:
        yield daemon
    finally:
        with trio.CancelScope(shield=True):
            if daemon.process is not None and daemon.process.poll() is None:
                status = await daemon.end()
                assert status == 0, daemon.log
            else:
                await daemon.clear()


@dataclass
class Client:
    """What a learning platform does."""

    http: httpx.AsyncClient
    token: str = ""

    async def put(self, environment: int = 1, **changes: object) -> int:
        answer = await self.http.put(f"/execution-environments/{environment}", json=ENVIRONMENT | changes)
        return answer.status_code

    async def claim(self, environment: int = 1, timeout: int = 60) -> str:
        answer = await self.http.post(
            "/runners", json={"executionEnvironmentId": environment, "inactivityTimeout": timeout}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["runnerId"])

    async def copy(self, runner: str, files: Mapping[str, bytes]) -> None:
        copied = [{"path": path, "content": b64encode(content).decode()} for path, content in files.items()]
        answer = await self.http.patch(f"/runners/{runner}/files", json={"copy": copied, "delete": ["./*"]})
        assert answer.status_code == 204, answer.text

    async def create(self, runner: str, command: str, **options: object) -> str:
        answer = await self.http.post(f"/runners/{runner}/execute", json={"command": command, **options})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["websocketUrl"])

    async def run(self, runner: str, command: str, stdin: str = "", **options: object) -> "Outcome":
        url = await self.create(runner, command, **options)
        return await self.converse(url, stdin)

    async def converse(self, url: str, stdin: str = "") -> "Outcome":
        outcome = Outcome()
        headers = {"Poseidon-Token": self.token} if self.token else {}
        async with connect(url, compression=None, proxy=None, additional_headers=headers) as channel:
            if stdin:
                await channel.send(stdin)
            async for frame in channel:
                outcome.add(json.loads(frame))
        outcome.close_code = channel.close_code
        return outcome

    async def statistics(self, environment: int = 1) -> dict[str, int]:
        answer = await self.http.get("/statistics/execution-environments")
        return dict(answer.json()[str(environment)])

    async def full(self, environment: int = 1) -> None:
        with trio.fail_after(30):
            while True:
                now = await self.statistics(environment)
                if now["idleRunners"] == now["prewarmingPoolSize"]:
                    return
                await trio.sleep(0.02)


@dataclass
class Outcome:
    """All that a WebSocket said."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    close_code: int | None = None

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def stdout(self) -> str:
        return "".join(message["data"] for message in self.messages if message["type"] == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(message["data"] for message in self.messages if message["type"] == "stderr")

    @property
    def last(self) -> dict[str, Any]:
        return self.messages[-1]


@asynccontextmanager
async def open_client(daemon: Daemon, token: str = "") -> AsyncIterator[Client]:
    headers = {"Poseidon-Token": token} if token else {}
    async with httpx.AsyncClient(base_url=daemon.url, timeout=60, trust_env=False, headers=headers) as http:
        yield Client(http, token)

"""Daemons as processes of their own, and what a client of them does. Nothing of them stays when a block is left."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from bench import processes, wire

TOP = Path(__file__).parent.parent
REAL = ("-m", "poseidon", "serve")
INSTANT = ("-m", "bench.served")
PLAIN = ("-m", "bench.plain")
ENVIRONMENT = 1
MEMORY_MB = 64
START_WITHIN, STOP_WITHIN, FULL_WITHIN = 30.0, 60.0, 60.0
POLL = 0.001


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Daemon:
    """One with its data in *folder*; it may be started again."""

    folder: Path
    program: Sequence[str] = REAL
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def spawn(self, *arguments: str) -> None:
        """Begin, without waiting for anything."""
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith(("POSEIDON_", "PYTHON", "COV"))
        }
        environ |= {"POSEIDON_STORE_PATH": str(self.folder / "poseidon.db"), "POSEIDON_SERVER_PORT": str(self.port)}
        environ |= {"POSEIDON_LOCAL_MAXRUNNERS": "200", "POSEIDON_SERVER_CLAIMWAIT": "60", "PYTHONPATH": str(TOP)}
        environ |= {"POSEIDON_SERVER_MAXEXECUTIONSPERRUNNER": "1000"}  # one runner is given all that are measured
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, *arguments],
                env=environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def start(self, *arguments: str, path: str = "/health", status: int = 204) -> float:
        """Begin, and wait until *path* is answered with *status*: milliseconds since the exec."""
        began = time.perf_counter()
        self.spawn(*arguments)
        with trio.fail_after(START_WITHIN):
            connection = await self.connect()
            while await connection.status(path) != status:
                await trio.sleep(POLL)
            passed = time.perf_counter() - began
            await connection.aclose()
        return 1000 * passed

    async def connect(self) -> wire.Connection:
        """A connection to it, as soon as it listens."""
        assert self.process is not None
        while self.process.poll() is None:
            with suppress(OSError):
                return await wire.connect(self.port)
            await trio.sleep(POLL)
        raise RuntimeError(f"the daemon has ended: {self.last_words()}")

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            with trio.move_on_after(STOP_WITHIN, shield=True):
                await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def clear(self) -> None:
        """Whatever state it is in: end it, and all its runners with it."""
        await self.end()
        if self.program is REAL and self.helpers():
            await self.start("--stop-runners")
            await self.end()

    def last_words(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-500:]

    def helpers(self) -> list[int]:
        """The pids of its sandboxes' helpers, as its store knows them."""
        with suppress(sqlite3.Error), closing(sqlite3.connect(self.folder / "poseidon.db")) as store:
            return [pid for (pid,) in store.execute("SELECT pid FROM sandboxes") if pid]
        return []

    def sandboxes(self) -> set[int]:
        """All processes of its sandboxes."""
        return {pid for helper in self.helpers() for pid in processes.sandbox_of(helper)}


@asynccontextmanager
async def open_daemon(folder: Path, program: Sequence[str] = REAL) -> AsyncIterator[Daemon]:
    """A healthy one; at the end nothing of it and its runners is left."""
    folder.mkdir(parents=True, exist_ok=True)
    daemon = Daemon(folder, program)
    try:
        await daemon.start(*(("--stop-runners",) if program is REAL else ()))
        yield daemon
    finally:
        with trio.CancelScope(shield=True):
            await daemon.clear()


@asynccontextmanager
async def open_connections(daemon: Daemon, count: int) -> AsyncIterator[list[wire.Connection]]:
    """So many clients."""
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(count):
            connections.append(await wire.connect(daemon.port))
            stack.push_async_callback(connections[-1].aclose)
        yield connections


@dataclass(frozen=True, slots=True)
class Client:
    """What a learning platform does, on a connection of its own."""

    http: wire.Connection

    async def put(self, size: int, environment: int = ENVIRONMENT, memory_mb: int = MEMORY_MB) -> None:
        """An environment with a pool of *size*, and wait until it is full."""
        body = {"image": "default", "prewarmingPoolSize": size, "cpuLimit": 20, "memoryLimit": memory_mb}
        body |= {"networkAccess": False, "exposedPorts": []}
        known = await self.http.call("GET", "/execution-environments")
        new = all(each["id"] != environment for each in known["executionEnvironments"])
        await self.http.call("PUT", f"/execution-environments/{environment}", body, expect=201 if new else 204)
        await self.full(environment)

    async def full(self, environment: int = ENVIRONMENT) -> None:
        """Wait until the pool is as large as wanted, and nothing more of it is on its way."""
        with trio.fail_after(FULL_WITHIN):
            while not await self._is_full(environment):
                await trio.sleep(0.005)

    async def _is_full(self, environment: int) -> bool:
        pool = (await self.http.call("GET", "/statistics/execution-environments"))[str(environment)]
        return bool(pool["idleRunners"] == pool["prewarmingPoolSize"])

    async def remove(self, environment: int = ENVIRONMENT) -> None:
        """With all its runners."""
        await self.http.call("DELETE", f"/execution-environments/{environment}", expect=204)

    async def claim(self, environment: int = ENVIRONMENT) -> str:
        body = {"executionEnvironmentId": environment, "inactivityTimeout": 300}
        return str((await self.http.call("POST", "/runners", body))["runnerId"])

    async def release(self, runner: str) -> None:
        await self.http.call("DELETE", f"/runners/{runner}", expect=204)

    async def copy(self, runner: str, files: dict[str, bytes]) -> None:
        copied = [{"path": path, "content": b64encode(content).decode()} for path, content in files.items()]
        await self.http.call("PATCH", f"/runners/{runner}/files", {"copy": copied}, expect=204)

    async def create(self, runner: str, command: str, *, tty: bool) -> str:
        """The address of the execution's WebSocket."""
        body = {"command": command, "tty": tty, "timeLimit": 120}
        return str((await self.http.call("POST", f"/runners/{runner}/execute", body))["websocketUrl"])

    async def version(self) -> None:
        await self.http.call("GET", "/version")


@asynccontextmanager
async def open_clients(daemon: Daemon, count: int = 1) -> AsyncIterator[list[Client]]:
    async with open_connections(daemon, count) as connections:
        yield [Client(connection) for connection in connections]

"""The real application on the real server, shell and store, with an executor that runs plain processes."""

import json
import socket
import ssl
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import trio
from jsonschema import Draft202012Validator
from websockets.exceptions import ConnectionClosed
from websockets.trio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from poseidon.api.app import create_app
from poseidon.api.auth import Key, Keyring
from poseidon.api.openapi import websocket_schema
from poseidon.api.pace import Pace
from poseidon.api.parts import ApiSettings, Parts
from poseidon.api.server import ServerLimits, serve
from poseidon.api.surroundings import Surroundings
from poseidon.api.tls import Tls
from poseidon.core.model import Allocation, EnvironmentId, RunnerId
from poseidon.executors.base import Ability
from poseidon.runners.assembly import Shell, open_shell
from poseidon.runners.executions import Caps, Executions, open_executions
from poseidon.runners.facts import Ailment, ExecutorFacts
from poseidon.runners.files import Files
from poseidon.store.store import Store, open_store
from poseidon.supervisor import ServiceStatus, Supervisor, open_supervisor
from tests.fakes.plain import PlainExecutor
from tests.runners import shell

VERSION = "1.2.3-test"
PUBLISHED = Draft202012Validator(websocket_schema() | {"$ref": "#/$defs/ToClient"})
TERMINAL = "poseidon.terminal.v1"


@dataclass
class FakeOverview:
    """The daemon as a whole, as far as a test wants it."""

    supervisor: Supervisor
    started_at: float = 1_800_000_000.5
    draining: bool = False
    ails: Ailment | None = None
    runs_by: tuple[ExecutorFacts, ...] = (
        ExecutorFacts("local", True, None, True, (Ability("memory", True, "by the test"),)),
    )

    def ailment(self) -> Ailment | None:
        return self.ails

    def services(self) -> tuple[ServiceStatus, ...]:
        return self.supervisor.status()

    def executors(self) -> tuple[ExecutorFacts, ...]:
        return self.runs_by

    def store(self) -> dict[str, object]:
        return {"queueDepth": 0}


@dataclass
class Ended:
    """Everything that a WebSocket brought, and how it was closed."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None

    @property
    def final(self) -> dict[str, Any]:
        return self.messages[-1]

    def text(self, stream: str = "stdout") -> str:
        return "".join(message["data"] for message in self.messages if message["type"] == stream)


@dataclass
class Service:
    """What a test works with."""

    url: str
    http: httpx.AsyncClient
    executor: PlainExecutor
    store: Store
    shell: Shell
    executions: Executions
    overview: FakeOverview
    shutdown: trio.Event

    async def put(self, size: int = 2, identity: int = 1) -> None:
        body = {"image": "plain", "prewarmingPoolSize": size}
        answer = await self.http.put(f"/execution-environments/{identity}", json=body)
        assert answer.status_code in {201, 204}, answer.text

    async def claim(self, *, timeout: int = 0) -> str:
        body = {"executionEnvironmentId": 1, "inactivityTimeout": timeout}
        answer = await self.http.post("/runners", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["runnerId"])

    async def execute(self, runner: str, command: str, **more: object) -> str:
        answer = await self.http.post(f"/runners/{runner}/execute", json={"command": command, **more})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["websocketUrl"])

    async def run(self, runner: str, command: str, stdin: bytes = b"", **more: object) -> Ended:
        """Run *command*, without a terminal unless told otherwise, and read until the close."""
        url = await self.execute(runner, command, **({"tty": False} | more))
        async with connected(url, subprotocol=TERMINAL) as socket:
            with suppress(ConnectionClosed):  # it may be over already
                if stdin:
                    await socket.send(stdin)
                await socket.send(json.dumps({"type": "eof"}))
            return await read(socket)

    async def patch(
        self, runner: str, copy: Mapping[str, bytes | None] | None = None, delete: tuple[str, ...] = ()
    ) -> httpx.Response:
        files = [
            {"path": path} | ({} if content is None else {"content": b64encode(content).decode()})
            for path, content in (copy or {}).items()
        ]
        return await self.http.patch(f"/runners/{runner}/files", json={"copy": files, "delete": list(delete)})

    def allocation(self, runner: str) -> Allocation:
        return self.shell.claims.place(self.shell.claims.used(RunnerId(runner)))[1]

    def workspace(self, runner: str) -> Path:
        return self.executor.workspace(self.allocation(runner).id)

    def used(self) -> int:
        return self.shell.environments.statistics()[EnvironmentId(1)].used


@asynccontextmanager
async def open_service(
    folder: Path,
    *,
    executor: PlainExecutor | None = None,
    token: str = "",
    keys: Sequence[Key] = (),
    tls: Tls | None = None,
    trust: ssl.SSLContext | None = None,
    surroundings: Surroundings | None = None,
    pace: Pace | None = None,
    limits: ServerLimits | None = None,
    claim_wait: float = 5.0,
    expiry: float = 300.0,
    grace: float = 1.0,
    fill_wait: float = 20.0,
) -> AsyncIterator[Service]:
    """Opened again on the same folder, with the same executor, it is one that was restarted."""
    executor = executor or PlainExecutor(root=folder / "workspaces")
    shutdown = trio.Event()
    async with open_store(folder / "poseidon.db") as store, open_supervisor() as supervisor:
        opened = await open_shell([executor], store, supervisor, claim_wait=claim_wait)
        await opened.run()
        overview = FakeOverview(supervisor)
        async with (
            open_executions(
                opened.claims, store, opened.clock.now, expiry=expiry, caps=Caps(per_runner=0)
            ) as executions,
            trio.open_nursery() as nursery,
        ):
            parts = Parts(opened.environments, opened.claims, executions, Files(opened.claims), overview)
            single = [Key("test", "admin", sha256(token.encode()).digest())] if token else []
            settings = ApiSettings(
                Keyring([*single, *keys]),
                VERSION,
                executor.name,
                surroundings or Surroundings(),
                pace or Pace(0, 1),
                fill_wait,
            )
            app = create_app(parts, settings)
            listener = socket.create_server(("127.0.0.1", 0))
            url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}/api/v1"
            await nursery.start(
                partial(serve, app, [listener], limits or ServerLimits(), shutdown=shutdown, grace=grace, tls=tls)
            )
            headers = {b"Poseidon-Token": token.encode()} if token else {}
            async with httpx.AsyncClient(
                base_url=url, headers=headers, timeout=20, trust_env=False, verify=trust or True
            ) as http:
                yield Service(url, http, executor, store, opened, executions, overview, shutdown)
            shutdown.set()
    if isinstance(executor, PlainExecutor):  # another one is its opener's to clean up
        executor.clean()


async def until(holds: Callable[[], bool], *, within: float = 40.0) -> None:
    """Wait until *holds*, also on a busy machine; the message of a failure names it."""
    await shell.until(holds, within=within)


@asynccontextmanager
async def connected(
    url: str,
    *,
    subprotocol: str | None = None,
    token: str = "",
    queue: int | None = 16,
    trust: ssl.SSLContext | None = None,
    **headers: str,
) -> AsyncIterator[ClientConnection]:
    """A WebSocket client. A small *queue* makes it a slow reader when nobody reads."""
    async with connect(
        url,
        subprotocols=[Subprotocol(subprotocol)] if subprotocol else None,
        additional_headers=({"Poseidon-Token": token} if token else {}) | headers,
        ssl=trust,
        compression=None,
        proxy=None,
        ping_interval=None,
        close_timeout=5,
        max_size=64 * 1024 * 1024,
        max_queue=queue,
    ) as opened:
        yield opened


@asynccontextmanager
async def stalled(url: str) -> AsyncIterator[ClientConnection]:
    """A client that doesn't read, and leaves without a word."""
    with trio.CancelScope() as scope:
        async with connected(url, queue=1) as opened:
            yield opened
            vanish(opened)
            scope.cancel()


def vanish(connection: ClientConnection) -> None:
    """Reset the connection."""
    raw = connection.stream.socket  # type: ignore[attr-defined]
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


async def read(connection: ClientConnection, *, within: float = 20.0) -> Ended:
    """All messages until the close, each held against the schema."""
    ended = Ended()
    with trio.fail_after(within):
        try:
            while True:
                frame = await connection.recv()
                ended.messages.append(checked(frame))
        except ConnectionClosed:
            ended.code = connection.close_code
    return ended


async def next_of(connection: ClientConnection, kind: str, *, within: float = 10.0) -> dict[str, Any]:
    """The next message of this type; those before it are dropped."""
    with trio.fail_after(within):
        while True:
            message = checked(await connection.recv())
            if message["type"] == kind:
                return message


def checked(frame: str | bytes) -> dict[str, Any]:
    """A message, if it is one by the clients' schema, and by the one that we publish."""
    message = json.loads(frame)
    assert isinstance(message, dict), message
    PUBLISHED.validate(message)
    match message:
        case {"type": "start" | "timeout", **rest}:
            assert not rest, message
        case {"type": "stdout" | "stderr" | "error", "data": str(text), **rest}:
            assert not rest, message
            text.encode()  # no half characters
        case {"type": "exit", "data": int(code), **rest}:
            assert not rest, message
            assert not isinstance(code, bool), message
            assert 0 <= code <= 255, message
        case _:
            raise AssertionError(f"no valid message: {message}")
    return message

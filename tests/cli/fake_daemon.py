"""A small daemon that speaks the contract and really runs commands, as processes in folders of the test.

No pools, no isolation, no store: what the command line sees of a daemon, with knobs for what may go wrong.
"""

import json
import os
import pty
import re
import signal
import subprocess
import termios
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import hypercorn.trio
import trio
from hypercorn.config import Config
from quart import Response, abort, jsonify, request, websocket
from quart_trio import QuartTrio

STARTED = "2026-11-30T08:00:00.000Z"
STREAM = {"connected": False, "age": 12.5, "lag": 0.25, "index": 7, "lines": 3, "events": 2, "breaks": 1}
PROTOCOL = "poseidon.terminal.v1"


@dataclass
class FakeDaemon:
    """What it has, what it was told, and how it is to misbehave."""

    folder: Path
    url: str = ""
    token: str = ""
    environments: dict[int, dict[str, Any]] = field(default_factory=dict)
    runners: dict[str, dict[str, Any]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    executions: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    controls: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    health: str = ""
    instead: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """By "METHOD /path": the status, content type and body to answer with instead."""
    slow_claim: float = 0
    slow_release: float = 0
    final: str | None = None
    """A text frame to send in place of what happened."""
    abandons: bool = False
    """Leaves an execution without a final message."""
    terminal: bool = True
    """Knows the subprotocol."""

    def add_environment(self, identifier: int, image: str = "default", **more: Any) -> None:
        """An environment as the API tells it."""
        self.environments[identifier] = {
            "id": identifier,
            "image": image,
            "prewarmingPoolSize": 1,
            "cpuLimit": 0,
            "memoryLimit": 0,
            "networkAccess": False,
            "exposedPorts": None,
            **more,
        }

    def add_runner(self, environment: int, phase: str = "used") -> str:
        """A runner with a workspace."""
        runner = f"{environment}-{uuid4()}"
        (self.folder / runner).mkdir()
        self.runners[runner] = {"environmentId": environment, "phase": phase, "node": "here", "readyAt": STARTED}
        return runner


def application(fake: FakeDaemon) -> QuartTrio:
    """The HTTP API and the WebSocket."""
    app = QuartTrio("fake")
    app.config["MAX_CONTENT_LENGTH"] = 64 * 1024 * 1024

    @app.before_request
    async def misbehave() -> Response | None:
        fake.events.append(f"{request.method} {request.path}")
        if fake.token and request.headers.get("Poseidon-Token") != fake.token and request.path != "/api/v1/health":
            return Response("", status=401)
        status, kind, body = fake.instead.get(f"{request.method} {request.path}", (0, "", ""))
        return Response(body, status, content_type=kind) if status else None

    @app.get("/api/v1/health")
    async def health() -> Response:
        if not fake.health:
            return Response("", status=204)
        return refusal(503, fake.health, "PREWARMING_POOL_DEPLETING")

    @app.get("/api/v1/status")
    async def status() -> Response:
        return jsonify(state(fake))

    @app.get("/api/v1/execution-environments")
    async def environments() -> Response:
        return jsonify({"executionEnvironments": list(fake.environments.values())})

    @app.put("/api/v1/execution-environments/<int:identifier>")
    async def put(identifier: int) -> Response:
        new = identifier not in fake.environments
        fake.environments[identifier] = await request.get_json() | {"id": identifier}
        return Response("", status=201 if new else 204)

    @app.delete("/api/v1/execution-environments/<int:identifier>")
    async def remove(identifier: int) -> Response:
        return Response("", status=204 if fake.environments.pop(identifier, None) else 404)

    @app.get("/api/v1/runners")
    async def runners() -> Response:
        return jsonify({"runners": [{"id": name} | runner for name, runner in fake.runners.items()]})

    @app.post("/api/v1/runners")
    async def claim() -> Response:
        wish = await request.get_json()
        fake.claims.append(wish)
        if wish["executionEnvironmentId"] not in fake.environments:
            return refusal(404, "execution environment not found")
        with trio.CancelScope(shield=True):  # the worst case: claimed, though the client has hung up
            await trio.sleep(fake.slow_claim)
        return jsonify({"runnerId": fake.add_runner(wish["executionEnvironmentId"]), "mappedPorts": []})

    @app.delete("/api/v1/runners/<runner>")
    async def release(runner: str) -> Response:
        await trio.sleep(fake.slow_release)
        known = fake.runners.get(runner)
        if known is None or (known["phase"] != "used" and request.args.get("any") != "true"):
            return refusal(410, "no runner found with this id")
        del fake.runners[runner]
        fake.released.append(runner)
        return Response("", status=204)

    @app.patch("/api/v1/runners/<runner>/files")
    async def files(runner: str) -> Response:
        for entry in (await request.get_json())["copy"]:
            path = fake.folder / runner / entry["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b64decode(entry["content"]))
        return Response("", status=204)

    @app.post("/api/v1/runners/<runner>/execute")
    async def execute(runner: str) -> Response:
        body = await request.get_json()
        fake.executed.append(body)
        identifier = str(uuid4())
        fake.executions[identifier] = body
        where = f"/api/v1/runners/{runner}/websocket?executionID={identifier}"
        return jsonify({"websocketUrl": fake.url.replace("http", "ws", 1) + where})

    @app.websocket("/api/v1/runners/<runner>/websocket")
    async def talk(runner: str) -> None:
        if fake.token and websocket.headers.get("Poseidon-Token") != fake.token:
            abort(401)
        body = fake.executions.pop(websocket.args["executionID"])
        await websocket.accept(subprotocol=PROTOCOL if fake.terminal else None)
        try:
            await Execution(fake, fake.folder / runner, body).run()
        finally:
            fake.events.append("conversation over")

    return app


def refusal(status: int, message: str, code: str = "") -> Response:
    """An error with the contract's body."""
    answer: Response = jsonify({"message": message} | ({"errorCode": code} if code else {}))
    answer.status_code = status
    return answer


def state(fake: FakeDaemon) -> dict[str, Any]:
    """GET /status."""
    phases = [runner["phase"] for runner in fake.runners.values()]
    pools = [
        {"id": it["id"], "image": it["image"], "wanted": it["prewarmingPoolSize"], "idle": 1, "starting": 0, "used": 0}
        for it in fake.environments.values()
    ]
    return {
        "version": "9.9.9",
        "started_at": STARTED,
        "draining": False,
        "services": [
            {"name": "deadlines", "state": "running", "since": STARTED, "crashes": 2, "error": "Oops: \x1b[31m"}
        ],
        "environments": pools,
        "runners": {"idle": phases.count("idle"), "used": phases.count("used"), "starting": 0},
        "executors": [
            {"name": "local", "reachable": True, "trouble": None, "listed": True, "stream": None},
            {"name": "nomad", "reachable": False, "trouble": "nobody answers", "listed": True, "stream": STREAM},
        ],
        "abilities": [{"executor": "local", "name": "memory", "holds": False, "how": "no cgroup can be written"}],
        "store": {"queue": 0},
    }


class Execution:
    """One command, with a terminal or with pipes."""

    def __init__(self, fake: FakeDaemon, folder: Path, body: dict[str, Any]) -> None:
        self.fake, self.folder, self.body = fake, folder, body
        self.sending = trio.Lock()

    async def run(self) -> None:
        """Start, talk, end by one final message."""
        await self.say(type="start")
        if self.fake.abandons:
            return
        final = self.fake.final
        if final is None:
            final = self.encode(await self.converse())
        await websocket.send(final)

    async def converse(self) -> dict[str, Any]:
        environment = {**os.environ, "TERM": "dumb", **self.body["environment"]}
        command = ["/bin/bash", "-c", self.body["command"]]
        options: dict[str, Any] = {"cwd": self.folder, "env": environment, "stderr": subprocess.PIPE}
        start = partial(trio.lowlevel.open_process, start_new_session=not self.body["tty"])
        if not self.body["tty"]:
            process = await start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
            return await self.supervise(process, process.stdin, process.stdout, None)
        master, slave = pty.openpty()
        termios.tcsetwinsize(master, (self.body["rows"], self.body["columns"]))
        process = await start(["setsid", "--ctty", *command], stdin=slave, stdout=slave, **options)
        os.close(slave)
        async with trio.lowlevel.FdStream(master) as terminal:
            return await self.supervise(process, terminal, terminal, master)

    async def supervise(self, process: Any, stdin: Any, stdout: Any, master: int | None) -> dict[str, Any]:
        limit = self.body["timeLimit"]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.listen, process, stdin, master)
                with trio.move_on_after(limit or 3600) as scope:
                    async with trio.open_nursery() as readers:
                        readers.start_soon(self.pump, "stdout", stdout)
                        readers.start_soon(self.pump, "stderr", process.stderr)
                        await process.wait()
                        readers.cancel_scope.deadline = trio.current_time() + 0.2  # background children hold the pipes
                nursery.cancel_scope.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await process.wait()
        if scope.cancelled_caught:
            return {"type": "timeout"}
        return {
            "type": "exit",
            "data": process.returncode % 256 if process.returncode >= 0 else 128 - process.returncode,
        }

    async def pump(self, name: str, source: Any) -> None:
        with suppress(OSError, trio.BrokenResourceError):  # EIO: the terminal's last user has left
            while chunk := await source.receive_some(4096):
                await self.say(type=name, data=chunk.decode(errors="replace"))

    async def listen(self, process: Any, stdin: Any, master: int | None) -> None:
        while True:
            frame = await websocket.receive()
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, ProcessLookupError):
                if isinstance(frame, bytes):
                    await stdin.send_all(frame)
                else:
                    await self.control(frame, process, stdin, master)

    async def control(self, frame: str, process: Any, stdin: Any, master: int | None) -> None:
        message = json.loads(frame)
        self.fake.controls.append(message)
        match message:
            case {"type": "resize", "rows": rows, "columns": columns} if master is not None:
                termios.tcsetwinsize(master, (rows, columns))
            case {"type": "eof"} if master is None:
                await stdin.aclose()
            case {"type": "eof"}:
                await stdin.send_all(b"\x04")
            case {"type": "signal", "signal": "INT"}:
                os.killpg(process.pid, signal.SIGINT)

    async def say(self, **message: Any) -> None:
        async with self.sending:
            await websocket.send(self.encode(message))

    @staticmethod
    def encode(message: dict[str, Any]) -> str:
        return json.dumps(message)


@contextmanager
def serving(folder: Path) -> Iterator[FakeDaemon]:
    """The fake in a thread of its own, so that tests needn't be asynchronous."""
    fake = FakeDaemon(folder)
    ready, stop = threading.Event(), trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        config = Config.from_mapping(bind=["127.0.0.1:0"], graceful_timeout=0.1, errorlog=None, accesslog=None)
        async with trio.open_nursery() as nursery:
            serve = partial(hypercorn.trio.serve, application(fake), config, shutdown_trigger=stop.wait)
            (fake.url,) = await nursery.start(serve)
            ready.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert ready.wait(10)
        assert re.match(r"http://127.0.0.1:\d+$", fake.url), fake.url
        yield fake
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=tokens[0])
        thread.join(10)
        assert not thread.is_alive()

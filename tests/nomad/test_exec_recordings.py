"""What a real Nomad sent, told again by a real server: output, exit codes and ends of connections are understood."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from websockets.utils import accept_key

from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError, ExecutorUnreachable
from poseidon.executors.base import Stream
from poseidon.executors.nomad.exec_session import open_session
from poseidon.executors.nomad.exec_target import ExecTarget
from tests.fakes.nomad_exec import Wire, read_head
from tests.nomad.exec_site import PATIENCE, allocation_of

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings" / "exec").glob("*.jsonl"))

ENDS: dict[str, type[ExecutorError]] = {
    "Unknown allocation": AllocationGone,
    "is not running": AllocationGone,
    "not started yet": AllocationGone,
    "No path to node": ExecutorUnreachable,
    "Permission denied": ExecutorUnreachable,
    "ACL token not found": ExecutorUnreachable,
    "failed to start command": ExecutorError,
    "task not found": ExecutorError,
}


def lines_of(recording: Path) -> list[dict[str, Any]]:
    """What was received; lines without `op` are remarks of the recorder."""
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    return [line for line in lines if line.get("dir") == "recv" and "op" in line]


@asynccontextmanager
async def retold(lines: list[dict[str, Any]]) -> AsyncIterator[str]:
    """A server that says all this to whoever comes, without the pauses."""

    async def tell(stream: trio.SocketStream) -> None:
        async with stream:
            head = await read_head(stream)
            assert head
            wire = Wire(stream)
            for line in lines:
                await say(stream, wire, line, head.headers["sec-websocket-key"])

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, tell, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def say(stream: trio.SocketStream, wire: Wire, line: dict[str, Any], key: str) -> None:
    match line["op"]:
        case "http":
            first = line["text"].split("\r\n")[0]
            rest = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept_key(key)}"
            if " 101 " not in first:
                rest = f"Content-Length: {line.get('length', 0)}"
            await stream.send_all(f"{first}\r\n{rest}\r\n\r\n".encode())
        case "text":
            await wire.send_text(line["text"].encode())
        case "close":
            await wire.close(line["code"], line["reason"])


def expected(lines: list[dict[str, Any]]) -> tuple[bytes, bytes, int | type[ExecutorError]]:
    """Both streams, and the exit code or the error."""
    found = {"stdout": b"", "stderr": b""}
    end: int | type[ExecutorError] = ConnectionLost
    for line in lines:
        if line["op"] == "http" and " 101 " not in line["text"]:
            end = ExecutorUnreachable
        if line["op"] == "close":
            end = next((error for reason, error in ENDS.items() if reason in line["reason"]), ConnectionLost)
        frame = json.loads(line["text"]) if line["op"] == "text" else {}
        for name in found:
            found[name] += base64.b64decode(frame.get(name, {}).get("data", ""))
        if frame.get("exited"):
            return found["stdout"], found["stderr"], frame["result"].get("exit_code", 0)
    return found["stdout"], found["stderr"], end


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
async def test_a_recorded_session_is_understood(recording: Path) -> None:
    lines = lines_of(recording)
    found = {Stream.STDOUT: b"", Stream.STDERR: b""}
    end: int | type[ExecutorError] | None = None
    with trio.fail_after(PATIENCE):
        async with retold(lines) as url:
            try:
                async with open_session(ExecTarget(url), url, allocation_of("x"), ("true",), tty=False) as session:
                    while piece := await session.receive():
                        found[piece[0]] += piece[1]
                    end = session.code
            except ExecutorError as error:
                end = type(error)
    assert (found[Stream.STDOUT], found[Stream.STDERR], end) == expected(lines)


def test_there_are_recordings_of_each_kind() -> None:
    ends = [expected(lines_of(recording))[2] for recording in RECORDINGS]
    assert len(RECORDINGS) > 60
    assert {0, 3, 126, 130, 131, 137, 143} <= set(ends)
    assert {AllocationGone, ConnectionLost, ExecutorError, ExecutorUnreachable} <= set(ends)

"""Whatever a client sends on an execution's WebSocket, it costs its own execution only, and all that comes is valid."""

import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.raw import frame, handshake
from tests.api.raw import frames as raw_frames
from tests.api.service import TERMINAL, Service, checked, open_service, until

PATIENCE = 60
CODES = {1000, 1001, 1002, 1003, 1007, 1009}
"""Close codes of the server."""
FAULT = b"\x03\xf3"
"""1011: of ours."""
ENDINGS = ["leave", "half", "reset", "close", "wait"]
COMMANDS = ["cat", "true", "sleep 60", "head -c 300000 /dev/zero | tr '\\0' x", "read -r x; echo $x >&2; exit 7"]


payloads = st.binary(max_size=300) | st.just(b"x" * 70_000) | st.text(max_size=20).map(str.encode)
whole = st.builds(frame, st.sampled_from([0x81, 0x82]), payloads)
parts = st.builds(frame, st.sampled_from([0x01, 0x02, 0x00, 0x80]), payloads)
control = st.builds(frame, st.sampled_from([0x89, 0x8A]), st.binary(max_size=125))
closing = st.builds(
    frame, st.just(0x88), st.binary(max_size=10) | st.integers(0, 65535).map(lambda n: struct.pack("!H", n))
)
odd = st.builds(
    frame, st.integers(0, 255), payloads, masked=st.booleans(), claims=st.none() | st.integers(0, 2**63 - 1)
)
values = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["INT", "KILL", "STOP", "WINCH"])
)
said = st.fixed_dictionaries(
    {"type": st.sampled_from(["eof", "resize", "signal", "exit"]) | values},
    optional={"rows": values, "columns": values, "signal": values},
)
orders = said.map(lambda value: frame(0x81, json.dumps(value).encode()))
words = st.builds(frame, st.just(0x81), st.text(max_size=10).map(str.encode))
good = whole | words | words | orders | orders | parts | control
sent = st.lists(good, max_size=12) | st.lists(good | closing | odd | st.binary(max_size=50), max_size=12)


@dataclass(frozen=True)
class Plan:
    """What one client does."""

    command: str
    frames: list[bytes]
    ending: str
    subprotocol: str
    tty: bool


plans = st.builds(
    Plan,
    command=st.sampled_from(COMMANDS),
    frames=sent,
    ending=st.sampled_from(ENDINGS),
    subprotocol=st.sampled_from(["", TERMINAL]),
    tty=st.booleans(),
)


@settings(
    max_examples=max(12, settings.default.max_examples // 8) if settings.default else 12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(plans, min_size=3, max_size=8))
def test_any_frames_in_any_order_cost_their_own_execution_only(clients: list[Plan]) -> None:
    trio.run(_try, clients)


async def _try(clients: list[Plan]) -> None:
    with tempfile.TemporaryDirectory() as folder, trio.fail_after(PATIENCE):
        async with open_service(Path(folder)) as service:
            await service.put(1)
            runner = await service.claim()
            assert (await service.run(runner, "echo before")).text() == "before\n"
            before = trio.lowlevel.current_statistics().tasks_living
            urls = [await service.execute(runner, client.command, tty=client.tty) for client in clients]
            async with trio.open_nursery() as nursery:
                for client, url in zip(clients, urls, strict=True):
                    nursery.start_soon(_converse, service, url, client)
            await until(lambda: not service.executions._lives)
            await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)
            assert (await service.run(runner, "echo after")).text() == "after\n"


async def _converse(service: Service, url: str, plan: Plan) -> None:
    received = bytearray()
    async with await trio.open_tcp_stream("127.0.0.1", httpx.URL(service.url).port or 0) as stream:
        await _say(stream, received, handshake(url, plan.subprotocol), plan.frames, plan.ending)
    head, found, rest = bytes(received).partition(b"\r\n\r\n")
    if found:
        assert head.startswith(b"HTTP/1.1 101 "), head
        _check(rest, echoes=any(each[:1] == b"\x88" for each in plan.frames))


async def _say(stream: trio.SocketStream, received: bytearray, hello: bytes, frames: list[bytes], ending: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_collect, stream, received)
        await stream.send_all(hello)
        try:
            for each in frames:
                await stream.send_all(each)
            await _end(stream, ending)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the server has had enough
        with trio.move_on_after(0.2 if ending == "leave" else 3):
            while nursery.child_tasks:
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()


async def _collect(stream: trio.SocketStream, received: bytearray) -> None:
    try:
        while data := await stream.receive_some(65536):
            received += data
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def _end(stream: trio.SocketStream, ending: str) -> None:
    match ending:
        case "half":
            await stream.send_eof()
        case "reset":
            stream.setsockopt(*_LINGER)
            stream.socket.close()
        case "close":
            await stream.send_all(frame(0x88, b"\x03\xe8"))


_LINGER = (1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER


def _check(data: bytes, *, echoes: bool) -> None:
    """Start first, at most one final message and nothing after it but a close, which is the last frame.

    *echoes*: the client has sent something like a close itself, whose code may come back.
    """
    kinds: list[str] = []
    for opcode, payload in raw_frames(data):
        assert "close" not in kinds, "something came after the close"
        match opcode:
            case 0x1:
                assert not {"exit", "timeout", "error"} & set(kinds)
                kinds.append(checked(payload)["type"])
            case 0x8:
                assert payload[:2] != FAULT
                assert echoes or struct.unpack("!H", payload[:2])[0] in CODES, payload
                kinds.append("close")
            case _:
                assert opcode in {0x9, 0xA}, opcode
    if kinds:
        assert kinds[0] in {"start", "close"}, kinds

"""The server against real clients that stall, vanish, flood and talk nonsense."""

import json
import logging
import os
import resource
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from quart import abort, request, websocket
from quart_trio import QuartTrio
from wsproto import ConnectionType
from wsproto.connection import Connection
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from poseidon.api import inbox, server
from poseidon.api.server import ServerLimits, configure, serve
from poseidon.api.tls import Tls
from poseidon.errors import ConfigError

LIMITS = ServerLimits(ping=None)
LISTEN = 100


@dataclass
class Served:
    """A server under test."""

    address: tuple[str, int] | str
    shutdown: trio.Event = field(default_factory=trio.Event)
    stopped: trio.Event = field(default_factory=trio.Event)
    clients: "list[Client]" = field(default_factory=list)

    async def connect(self) -> "Client":
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        sock = trio.socket.socket(family)
        client = Client(trio.SocketStream(sock))
        self.clients.append(client)
        await sock.connect(self.address)
        return client

    async def open(self, path: str = "/ws", *headers: str) -> "WsClient":
        client = await self.connect()
        await client.send(handshake(path, *headers))
        head = await client.head()
        assert head.startswith("HTTP/1.1 101 "), head
        return WsClient(client, head)

    async def stop(self, *, within: float) -> None:
        self.shutdown.set()
        with trio.fail_after(within):
            await self.stopped.wait()


@dataclass
class Client:
    """A raw client that hides nothing."""

    stream: trio.SocketStream
    buffer: bytes = b""

    async def send(self, data: bytes | str) -> None:
        await self.stream.send_all(data.encode() if isinstance(data, str) else data)

    async def talk(self) -> None:
        """Send for ever."""
        while True:
            await self.send(b"x" * 1000)
            await trio.sleep(0.001)

    async def more(self) -> bool:
        data = bytes(await self.stream.receive_some(65536))
        self.buffer += data
        return bool(data)

    async def head(self) -> str:
        while b"\r\n\r\n" not in self.buffer:
            assert await self.more(), f"no answer, only {self.buffer!r}"
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        return head.decode()

    async def answer(self) -> tuple[str, bytes]:
        """Head and body of an answer with a length."""
        head = await self.head()
        lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        length = int(lengths[0])
        while len(self.buffer) < length:
            assert await self.more()
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return head, body

    async def rest(self) -> bytes:
        """All up to the server's end; a reset raises."""
        while await self.more():
            pass
        return self.buffer

    async def get(self, path: str) -> tuple[str, bytes]:
        await self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")
        return await self.answer()

    def reset(self) -> None:
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()

    async def aclose(self) -> None:
        await self.stream.aclose()


class WsClient:
    """A WebSocket client whose frames are in the test's hands."""

    def __init__(self, client: Client, head: str) -> None:
        self.client = client
        self.head = head
        self.proto = Connection(ConnectionType.CLIENT)
        self.proto.receive_data(client.buffer)
        self.pending: list[Event] = list(self.proto.events())

    async def send(self, event: Event) -> None:
        await self.client.send(self.proto.send(event))

    async def event(self) -> Event:
        while not self.pending:
            data = bytes(await self.client.stream.receive_some(65536))
            assert data, "the server has ended the connection without a close frame"
            self.proto.receive_data(data)
            self.pending = list(self.proto.events())
        return self.pending.pop(0)

    async def text(self) -> str:
        """The next text message, however it is split."""
        parts = ""
        while True:
            if isinstance(event := await self.event(), Pong):
                continue
            assert isinstance(event, TextMessage), event
            parts += event.data
            if event.message_finished:
                return parts

    async def closed(self, *, answered: bool = False) -> int:
        """Skip to the close frame, answer it unless it is an answer itself, see the server's end."""
        while not isinstance(event := await self.event(), CloseConnection):
            pass
        if not answered:
            await self.send(event.response())
        assert not await self.client.stream.receive_some(1)
        return int(event.code)


def handshake(path: str, *headers: str) -> str:
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version: 13",
        *headers,
    ]
    return "\r\n".join(lines) + "\r\n\r\n"


def tcp() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0), backlog=LISTEN)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)  # so that little fits into the kernel
    return sock


@asynccontextmanager
async def serving(
    app: QuartTrio,
    limits: ServerLimits = LIMITS,
    *,
    sockets: list[socket.socket] | None = None,
    grace: float = 50,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Served]:
    sockets = sockets or [tcp()]
    served = Served(sockets[0].getsockname())

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await serve(
            app,
            sockets,
            limits,
            shutdown=served.shutdown,
            grace=grace,
            tls=Tls(tls) if tls else None,
            task_status=task_status,
        )
        served.stopped.set()

    try:
        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                await nursery.start(run)
                yield served
                nursery.cancel_scope.cancel()
    finally:
        for client in served.clients:
            client.stream.socket.close()


class Watched:
    """What becomes of a handler."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.ended = trio.Event()
        self.cancelled = False

    @asynccontextmanager
    async def handler(self) -> AsyncIterator[None]:
        self.started.set()
        try:
            yield
        except (trio.Cancelled, GeneratorExit):
            self.cancelled = True
            raise
        finally:
            self.ended.set()

    async def is_cancelled(self, *, within: float) -> None:
        with trio.fail_after(within):
            await self.ended.wait()
        assert self.cancelled


Handler = Callable[[], Awaitable[None]]


def with_websocket(handler: Handler) -> QuartTrio:
    app = QuartTrio(__name__)
    app.websocket("/ws")(handler)
    return app


@pytest.fixture
def plain() -> QuartTrio:
    app = QuartTrio(__name__)

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"hello": "world"}

    @app.post("/early")
    async def early() -> tuple[dict[str, str], int]:
        return {"message": "who are you?"}, 401

    @app.post("/length")
    async def length() -> str:
        return str(len(await request.get_data()))

    return app


# HTTP


async def test_requests_share_a_connection_and_tell_no_versions(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        for _ in range(3):
            head, body = await client.get("/")
            assert body == b'{"hello":"world"}\n'
            assert {line.split(":")[0] for line in head.lower().split("\r\n")[1:]} == {"content-type", "content-length"}


async def test_an_answer_that_has_no_body_by_its_status_tells_no_length(plain: QuartTrio) -> None:
    @plain.get("/nothing")
    async def nothing() -> tuple[str, int]:
        return "", 204

    async with serving(plain) as served:
        client = await served.connect()
        for _ in range(2):
            await client.send("GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await client.head()
            assert head.startswith("HTTP/1.1 204")
            assert "content-length" not in head.lower()
        assert (await client.get("/"))[1] == b'{"hello":"world"}\n'


@pytest.mark.parametrize("line", ["HTTP/1.1\r\nConnection: close", "HTTP/1.0"])
async def test_a_connection_that_is_to_be_closed_is_closed_at_once(plain: QuartTrio, line: str) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        await client.send(f"GET / {line}\r\nHost: x\r\n\r\n")
        with trio.fail_after(20):
            assert (await client.rest()).endswith(b'{"hello":"world"}\n')


async def test_pipelined_requests_are_answered_in_order(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        await client.send(
            "".join(f"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: {n}\r\n\r\n{'a' * n}" for n in range(5))
        )
        assert [await client.answer() for _ in range(5)] == [numbered(n) for n in range(5)]


def numbered(n: int) -> tuple[str, bytes]:
    return "HTTP/1.1 200 \r\ncontent-type: text/html; charset=utf-8\r\ncontent-length: 1", str(n).encode()


async def test_a_large_body_arrives(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        size = 5_000_000
        await client.send(f"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n")
        await client.send(bytes(size))
        assert (await client.answer())[1] == str(size).encode()
        assert (await client.get("/"))[0].startswith("HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/early", "/length"])
async def test_an_early_answer_arrives_whole_and_ends_the_connection(plain: QuartTrio, path: str) -> None:
    async with serving(plain, ServerLimits(body=1_000_000)) as served:
        client = await served.connect()
        size = 8_000_000
        await client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n")
        for _ in range(size // 80_000):  # as a client that doesn't look at the answer before all is sent
            await client.send(bytes(80_000))
        head, _ = await client.answer()
        assert head.startswith("HTTP/1.1 401" if path == "/early" else "HTTP/1.1 413")
        assert "connection: close" in head
        assert await client.rest() == b""


async def test_a_small_body_that_nobody_reads_keeps_the_connection(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        for _ in range(3):
            await client.send("POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + "a" * 1000)
            head, _ = await client.answer()
            assert head.startswith("HTTP/1.1 401")
            assert "connection: close" not in head


async def test_a_body_that_does_not_come_is_not_awaited_for_ever(plain: QuartTrio) -> None:
    async with serving(plain, ServerLimits(body_timeout=0.05)) as served:
        client = await served.connect()
        await client.send("POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
        head, _ = await client.answer()
        assert head.startswith("HTTP/1.1 408")


NONSENSE = {
    "no http": (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "no path": (b"GET ?a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "connect": (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http/3": (b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505),
    "bad length": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "length and coding": (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "unknown coding": (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: zip\r\n\r\n", 501),
    "bad chunk": (b"POST /length HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "header too large": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000, 431),
    "complete, but too large": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 33_000 + b"\r\n\r\n", 431),
    "websocket, no key": (b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_is_refused_quietly(
    plain: QuartTrio, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    words, status = NONSENSE[name]
    async with serving(plain) as served:
        client = await served.connect()
        await client.send(words)
        head = await client.head()
        assert head.startswith(f"HTTP/1.1 {status}"), head
        said = json.loads(await client.rest())
        assert list(said) == ["message"] and said["message"]
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


async def test_a_whole_address_as_target_is_understood(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        for target in ("http://x/", "http://x", "HTTP://x?a=/b"):
            assert (await client.get(target))[0].startswith("HTTP/1.1 200"), target


async def test_an_offer_of_http2_is_ignored(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = await served.connect()
        await client.send("GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert (await client.answer())[1] == b'{"hello":"world"}\n'


async def test_a_quiet_connection_is_closed_in_the_end(plain: QuartTrio) -> None:
    async with serving(plain, ServerLimits(keep_alive=0.05)) as served:
        quiet, hesitant, served_before = [await served.connect() for _ in range(3)]
        await hesitant.send("GET / HTTP/1.1\r\nHo")
        await served_before.get("/")
        with trio.fail_after(20):
            assert [await each.rest() for each in (quiet, hesitant, served_before)] == [b"", b"", b""]


async def test_a_head_that_comes_byte_by_byte_is_not_awaited_for_ever(plain: QuartTrio) -> None:
    async with serving(plain, ServerLimits(keep_alive=0.2)) as served:
        client = await served.connect()
        await client.send("GET / HTTP/1.1\r\nHost: x\r\nX: ")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip, client)
            with suppress(trio.BrokenResourceError):
                assert b"200" not in await client.rest()
            nursery.cancel_scope.cancel()


async def drip(client: Client) -> None:
    with suppress(trio.BrokenResourceError):
        while True:
            await client.send("x")
            await trio.sleep(0.01)


async def test_of_too_many_connections_the_longest_idle_one_goes(plain: QuartTrio) -> None:
    async with serving(plain, ServerLimits(connections=3)) as served:
        first, second, third = [await served.connect() for _ in range(3)]
        for client in (second, third, first):
            await client.get("/")
        fourth = await served.connect()
        await fourth.get("/")
        assert await second.rest() == b""
        fifth = await served.connect()
        await fifth.get("/")
        assert await third.rest() == b""
        for client in (first, fourth, fifth):
            assert (await client.get("/"))[1] == b'{"hello":"world"}\n'


async def test_connections_in_use_are_kept_and_the_new_one_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(with_websocket(echo), ServerLimits(connections=2, ping=None)) as served:
        busy = [await served.open() for _ in range(2)]
        assert await (await served.connect()).rest() == b""
        assert "connection refused: all 2 are in use" in caplog.text
        await busy[0].send(CloseConnection(1000))
        await busy[0].closed(answered=True)
        await trio.testing.wait_all_tasks_blocked()
        await (await served.open()).send(TextMessage("x"))
        await busy[1].send(TextMessage("still here"))
        assert await busy[1].text() == "still here"


@pytest.mark.parametrize("body", ["at once", "late"])
async def test_a_long_answer_is_not_cut(plain: QuartTrio, body: str) -> None:
    plain.config["RESPONSE_TIMEOUT"] = 0.01

    @plain.post("/stream")
    async def stream() -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b"piece"
                await trio.sleep(0.01)

        await request.get_data()
        return pieces()

    async with serving(plain) as served:
        client = await served.connect()
        await client.send("POST /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\n")
        await trio.sleep(0.02 if body == "late" else 0)
        await client.send("x")
        answer = await client.rest()
        assert answer.count(b"piece") == 5
        assert answer.endswith(b"0\r\n\r\n")


async def test_a_stream_begins_before_its_first_piece(plain: QuartTrio) -> None:
    @plain.get("/stream")
    async def stream() -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            await trio.sleep_forever()
            yield b""

        return pieces()

    async with serving(plain) as served:
        client = await served.connect()
        await client.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        with trio.fail_after(20):
            assert (await client.head()).startswith("HTTP/1.1 200")


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("body", ["whole", "partial"])
async def test_a_vanished_client_cancels_its_request(plain: QuartTrio, way: str, body: str) -> None:
    watched = Watched()

    @plain.post("/wait")
    async def wait() -> str:
        async with watched.handler():
            await trio.sleep_forever()
        return ""

    async with serving(plain) as served:
        client = await served.connect()
        length = 3 if body == "whole" else 1000
        await client.send(f"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nabc")
        await watched.started.wait()
        if way == "close":
            await client.aclose()
        else:
            client.reset()
        await watched.is_cancelled(within=20)


async def test_a_failed_handler_is_logged_and_answered(plain: QuartTrio, caplog: pytest.LogCaptureFixture) -> None:
    plain.config["PROPAGATE_EXCEPTIONS"] = True

    @plain.get("/fail")
    async def fail() -> str:
        raise ZeroDivisionError

    async with serving(plain) as served:
        client = await served.connect()
        assert (await client.get("/fail"))[0].startswith("HTTP/1.1 500")
        assert (await (await served.connect()).get("/"))[0].startswith("HTTP/1.1 200")
    assert [record.message for record in caplog.records if record.name == "poseidon.server"] == ["handler failed"]


# Clients that don't read


def flood(watched: Watched) -> QuartTrio:
    app = QuartTrio(__name__)

    @app.get("/flood")
    async def http() -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            async with watched.handler():
                while True:
                    yield bytes(50_000)  # noqa: ASYNC119 - that it ends is what is tested

        return pieces()

    @app.websocket("/ws")
    async def ws() -> None:
        async with watched.handler():
            while True:
                await websocket.send(bytes(50_000))

    return app


@pytest.mark.parametrize("words", ["GET /flood HTTP/1.1\r\nHost: x\r\n\r\n", handshake("/ws")])
async def test_a_client_that_does_not_read_is_cut_off(words: str, tmp_path: Path) -> None:
    unix = socket.socket(socket.AF_UNIX)  # where no timeout of TCP helps
    unix.bind(str(tmp_path / "socket"))
    unix.listen(LISTEN)
    watched = Watched()
    async with serving(flood(watched), ServerLimits(stall=0.2, ping=None), sockets=[unix]) as served:
        client = await served.connect()
        await client.send(words)
        await watched.is_cancelled(within=20)
        with pytest.raises(trio.BrokenResourceError):
            await client.talk()


@pytest.mark.parametrize("words", ["GET /flood HTTP/1.1\r\nHost: x\r\n\r\n", handshake("/ws")])
async def test_a_client_that_does_not_read_cannot_delay_the_shutdown(words: str) -> None:
    watched = Watched()
    async with serving(flood(watched), grace=0.2) as served:
        client = await served.connect()
        await client.send(words)
        await watched.started.wait()
        await trio.sleep(0.05)
        await served.stop(within=20)
        assert watched.cancelled
        with pytest.raises(trio.BrokenResourceError):  # never an end that looks like a good one
            await client.rest()


async def test_a_send_to_a_client_that_does_not_read_can_be_given_up_and_tears_no_message() -> None:
    given_up = trio.Event()

    async def handler() -> None:
        number = 0
        with trio.move_on_after(0.1):
            while True:
                await websocket.send(f"{number} " + "x" * 50_000)
                number += 1
        given_up.set()
        await websocket.send("last")

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        with trio.fail_after(20):
            await given_up.wait()
        messages = []
        while (text := await client.text()) != "last":
            messages.append(text)
        assert [int(text.split()[0]) for text in messages] == list(range(len(messages)))
        assert {len(text.split()[1]) for text in messages} == {50_000}
        assert await client.closed() == 1000


async def test_what_waits_for_a_slow_client_is_bounded() -> None:
    sent = 0

    async def handler() -> None:
        nonlocal sent
        while True:
            await websocket.send(bytes(10_000))
            sent += 10_000

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        settled = -1
        while sent != settled:
            settled = sent
            await trio.sleep(0.05)
        assert sent < 8_000_000  # mostly the kernel's buffers
        assert isinstance(await client.event(), BytesMessage)


@pytest.mark.timeout(60)
async def test_a_handler_that_only_sends_does_not_outlive_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "PATIENCE", 60.0)  # it isn't this that ends it
    watched = Watched()

    async def handler() -> None:
        async with watched.handler():
            while True:
                await websocket.send("x" * 100)

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        await watched.started.wait()
        client.client.reset()
        await watched.is_cancelled(within=20)


@pytest.mark.timeout(60)
async def test_sending_after_the_close_lets_others_run() -> None:
    async def handler() -> None:
        await websocket.send("hello")
        await websocket.close(1000)
        while True:
            await websocket.send("too late")

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        assert await client.text() == "hello"
        await trio.sleep(0.05)


# WebSockets


async def echo() -> None:
    while True:
        data = await websocket.receive()
        await websocket.send(data if isinstance(data, str) else f"{data!r}")


async def test_the_handshake_is_exact_and_compression_is_never_agreed() -> None:
    async with serving(with_websocket(echo)) as served:
        client = await served.open("/ws", "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits")
        lines = client.head.lower().split("\r\n")
        assert [line for line in lines if line.startswith("connection")] == ["connection: upgrade"]
        assert {line.split(":")[0] for line in lines[1:]} == {"upgrade", "connection", "sec-websocket-accept"}
        await client.send(TextMessage("hällo"))
        assert await client.text() == "hällo"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xc1\x80\0\0\0\0", 1002),  # compressed
        (b"\x01\x80\0\0\0\0" * 2, 1002),  # a new message inside another one
        (b"\x81\x01a", 1002),  # not masked
        (b"\x81\x82\0\0\0\0\xff\xff", 1007),  # not UTF-8
        (b"\x88\x82\0\0\0\0\x0f\xa0", 4000),  # a client's own close code
    ],
)
async def test_bad_frames_are_refused_by_a_close_frame(
    frame: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(with_websocket(echo)) as served:
        client = await served.open()
        await client.client.send(frame)
        assert await client.closed(answered=frame[:1] == b"\x88") == code
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_an_empty_message_is_a_message() -> None:
    async with serving(with_websocket(echo)) as served:
        client = await served.open()
        await client.send(BytesMessage(b""))
        assert await client.text() == "b''"
        await client.send(TextMessage(""))
        assert await client.text() == ""


async def test_a_failed_handler_closes_with_1011(capfd: pytest.CaptureFixture[str]) -> None:
    async def handler() -> None:
        await websocket.accept()
        raise ZeroDivisionError

    async with serving(with_websocket(handler)) as served:
        assert await (await served.open()).closed() == 1011


async def test_a_handler_that_ends_closes_with_1000() -> None:
    async def handler() -> None:
        await websocket.accept()

    async with serving(with_websocket(handler)) as served:
        assert await (await served.open()).closed() == 1000


async def test_a_refusal_is_an_answer_with_a_body() -> None:
    async def handler() -> None:
        abort(410, "gone")

    async with serving(with_websocket(handler)) as served:
        for path, status in (("/ws", 410), ("/nowhere", 404)):
            client = await served.connect()
            await client.send(handshake(path) + "early words")
            head, body = await client.answer()
            assert head.startswith(f"HTTP/1.1 {status}")
            assert "connection: close" in head
            assert body
            assert await client.rest() == b""


async def test_hasty_words_are_not_lost() -> None:
    async def handler() -> None:
        await trio.sleep(0.02)
        await echo()

    async with serving(with_websocket(handler)) as served:
        client = await served.connect()
        early = Connection(ConnectionType.CLIENT).send(TextMessage("hasty"))
        await client.send(handshake("/ws").encode() + early)
        assert await WsClient(client, await client.head()).text() == "hasty"


def masked(first: int, length: int) -> bytes:
    return bytes([first, 0x80 | 127]) + struct.pack("!Q", length) + b"\0\0\0\0"


@pytest.mark.parametrize("kind", ["one frame", "fragments", "wide text"])
async def test_a_message_too_large_is_refused_before_it_is_kept(kind: str) -> None:
    watched = Watched()

    async def handler() -> None:
        async with watched.handler():
            await echo()

    async with serving(with_websocket(handler), ServerLimits(message=200_000, ping=None)) as served:
        client = await served.open()
        if kind == "one frame":  # of 2 GiB, of which only a little ever comes
            await client.client.send(masked(0x82, 2**31) + bytes(300_000))
        elif kind == "fragments":
            await client.client.send(masked(0x02, 150_000) + bytes(150_000) + masked(0x00, 150_000) + bytes(150_000))
        else:
            await client.send(TextMessage("€" * 100_000))
        assert await client.closed() == 1009
        await watched.is_cancelled(within=20)


async def test_a_message_of_just_the_limit_passes() -> None:
    async def handler() -> None:
        await websocket.send(str(len(await websocket.receive())))

    async with serving(with_websocket(handler), ServerLimits(message=200_000, ping=None)) as served:
        client = await served.open()
        await client.send(BytesMessage(bytes(200_000)))
        assert await client.text() == "200000"


@pytest.mark.parametrize("way", ["close frame", "end"])
async def test_a_slow_reader_gets_all_that_was_sent(way: str) -> None:
    got: list[str | bytes] = []
    ended = trio.Event()

    async def handler() -> None:
        try:
            while True:
                got.append(await websocket.receive())
                await trio.sleep(0.004)
        finally:
            ended.set()

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        for number in range(300):
            await client.send(TextMessage(f"{number} " + "x" * 1000))
        if way == "close frame":
            await client.send(CloseConnection(1000))
        await client.client.aclose()
        with trio.fail_after(5):
            await ended.wait()
        assert [str(each).split()[0] for each in got] == [str(number) for number in range(300)]


@pytest.mark.parametrize(
    ("way", "amount"), [*((way, n) for way in ("close frame", "end", "reset") for n in (0, 1, 60)), ("reset", 2000)]
)
async def test_a_handler_that_never_reads_learns_that_its_client_is_gone(
    way: str, amount: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not amount:
        monkeypatch.setattr(inbox, "PATIENCE", 60.0)  # it isn't this that ends it
    watched = Watched()

    async def handler() -> None:
        async with watched.handler():
            await websocket.accept()
            await trio.sleep_forever()

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        await watched.started.wait()
        with trio.move_on_after(0.2):  # as much as fits
            for _ in range(amount):
                await client.send(BytesMessage(bytes(4000)))
        if way == "close frame":
            await client.send(CloseConnection(1000))
        if way == "reset":
            client.client.reset()
        else:
            await client.client.aclose()
        await watched.is_cancelled(within=20)


async def test_unread_input_does_not_reset_the_last_words() -> None:
    async def handler() -> None:
        await websocket.accept()
        await trio.sleep(0.05)
        await websocket.send('{"type":"exit","data":0}')
        await websocket.close(1000)

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        with trio.move_on_after(0.1):
            while True:
                await client.send(BytesMessage(bytes(4000)))
        await trio.sleep(0.05)
        assert await client.text() == '{"type":"exit","data":0}'
        assert await client.closed() == 1000


async def test_a_client_that_answers_no_close_is_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.api.protocol.CLOSE_WAIT", 0.05)

    async def handler() -> None:
        await websocket.accept()

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        assert isinstance(await client.event(), CloseConnection)
        with trio.fail_after(4):
            assert not await client.client.stream.receive_some(1)


async def test_a_handler_may_tidy_up_after_its_own_close() -> None:
    tidied = trio.Event()

    async def handler() -> None:
        await websocket.accept()
        await websocket.close(1000)
        await trio.sleep(0.05)
        tidied.set()

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        event = await client.event()
        assert isinstance(event, CloseConnection)
        await client.send(event.response())
        with trio.fail_after(20):
            await tidied.wait()


async def test_pings_are_answered_and_sent() -> None:
    async with serving(with_websocket(echo), ServerLimits(ping=0.05)) as served:
        client = await served.open()
        await client.send(TextMessage("x"))
        await client.send(Ping(b"hello"))
        events = [await client.event() for _ in range(5)]
        assert Pong(b"hello") in events
        assert [event for event in events if isinstance(event, Ping)]


async def test_a_flood_of_pings_costs_no_memory() -> None:
    async with serving(with_websocket(echo)) as served:
        client = await served.open()
        pings = bytes(Connection(ConnectionType.CLIENT).send(Ping(bytes(125)))) * 1000
        for _ in range(20):
            await client.client.send(pings)
        await client.send(TextMessage("last"))
        answered = 0
        while isinstance(await client.event(), Pong):
            answered += 1
        assert 0 < answered < 10_000  # what the kernel took; the rest wasn't kept for a client that didn't read


# Shutdown


async def test_shutdown_waits_for_a_request_and_no_longer(plain: QuartTrio) -> None:
    entered = trio.Event()

    @plain.get("/slow")
    async def slow() -> str:
        entered.set()
        await trio.sleep(0.1)
        return "done"

    async with serving(plain, grace=10) as served:
        client = await served.connect()
        idle = await served.connect()
        await idle.get("/")
        await client.send("GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await entered.wait()
        served.shutdown.set()
        head, body = await client.answer()
        assert (body, "connection: close" in head) == (b"done", True)
        assert await client.rest() == b""
        await client.aclose()
        with trio.fail_after(8):
            assert await idle.rest() == b""
        await served.stop(within=8)
        with pytest.raises(ConnectionRefusedError):
            await served.connect()


async def test_shutdown_leaves_time_for_last_words() -> None:
    draining = trio.Event()

    async def handler() -> None:
        await websocket.accept()
        await draining.wait()
        await websocket.send("sorry")
        await websocket.close(1001)

    async with serving(with_websocket(handler), grace=5) as served:
        clients = [await served.open() for _ in range(3)]
        served.shutdown.set()
        draining.set()
        for client in clients:
            assert await client.text() == "sorry"
            assert await client.closed() == 1001
        await served.stop(within=20)


async def test_who_stays_after_the_grace_is_closed_with_1001() -> None:
    watched = Watched()

    async def handler() -> None:
        async with watched.handler():
            await websocket.accept()
            await trio.sleep_forever()

    async with serving(with_websocket(handler), grace=0.1) as served:
        client = await served.open()
        served.shutdown.set()
        assert await client.closed() == 1001
        await served.stop(within=20)
        assert watched.cancelled


async def test_a_handler_that_ignores_cancellation_does_not_keep_the_client() -> None:
    release = trio.Event()

    async def handler() -> None:
        await websocket.accept()
        with trio.CancelScope(shield=True):
            await release.wait()

    async with serving(with_websocket(handler)) as served:
        client = await served.open()
        await client.send(CloseConnection(1000))
        with trio.fail_after(4):
            assert isinstance(await client.event(), CloseConnection)
            assert not await client.client.stream.receive_some(1)
        release.set()


# Sockets


async def test_sockets_of_any_family_are_served(plain: QuartTrio, tmp_path: Path) -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "socket"))
    unix.listen(LISTEN)
    sockets = [tcp(), tcp(), unix]
    addresses = [each.getsockname() for each in sockets]
    async with serving(plain, sockets=sockets) as served:
        for served.address in addresses:
            assert (await (await served.connect()).get("/"))[1] == b'{"hello":"world"}\n'


async def test_accepted_sockets_are_not_inherited_and_dead_clients_are_found(plain: QuartTrio) -> None:
    listener = tcp()
    async with serving(plain, ServerLimits(stall=7), sockets=[listener]) as served:
        client = await served.connect()
        await client.get("/")
        ours = client.stream.socket.getsockname()
        with socket.socket(fileno=os.dup(descriptor_of(ours))) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert not os.get_inheritable(descriptor_of(ours))


def descriptor_of(peer: tuple[str, int]) -> int:
    """The descriptor of this process that is connected to *peer*."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as candidate:
                if candidate.getpeername() == peer:
                    return int(entry.name)
        except OSError:
            continue
    raise AssertionError("not connected")


async def test_being_out_of_descriptors_passes(plain: QuartTrio, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(plain) as served:
        await (await served.connect()).get("/")
        client = Client(trio.SocketStream(trio.socket.socket()))
        served.clients.append(client)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await client.stream.socket.connect(served.address)
            await trio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await client.get("/"))[1] == b'{"hello":"world"}\n'
    assert "connection not accepted" in caplog.text


IDLERS = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(60)]
held[0].sendall(b"GET / HTTP/1.1\\r\\nX-")
print("there", flush=True)
sys.stdin.read()
"""


async def test_idle_connections_leave_when_there_is_no_descriptor_for_another(plain: QuartTrio) -> None:
    async with serving(plain) as served:
        client = Client(trio.SocketStream(trio.socket.socket()))
        served.clients.append(client)
        command = [sys.executable, "-c", IDLERS, str(served.address[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idlers:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
            try:
                assert idlers.stdout is not None
                await trio.to_thread.run_sync(idlers.stdout.readline)
                await client.stream.socket.connect(served.address)
                assert (await client.get("/"))[1] == b'{"hello":"world"}\n'
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                idlers.kill()


async def test_no_descriptor_is_left(plain: QuartTrio) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with serving(plain, sockets=[tcp()]) as served:
        for ending in range(20):
            client = await served.connect()
            await client.get("/")
            if ending % 2:
                client.reset()
            else:
                await client.aclose()
        await served.stop(within=20)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_another_hypercorn_is_refused(plain: QuartTrio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "version", lambda _: "0.19.0")
    with tcp() as listener, pytest.raises(ConfigError, match=r"hypercorn 0\.18\.0 is needed.*0\.19\.0"):
        await serve(plain, [listener], LIMITS, shutdown=trio.Event(), grace=0)


async def test_quarts_test_client_still_works(plain: QuartTrio) -> None:
    plain.websocket("/ws")(echo)
    configure(plain, LIMITS)
    client = plain.test_client()
    assert await (await client.get("/")).get_json() == {"hello": "world"}
    async with client.websocket("/ws") as ws:
        await ws.send("x")
        assert await ws.receive() == "x"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl program")
    path = tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "-", "-out", "-"]
    path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return path


@pytest.fixture
def tls(certificate: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)
    return ours, ssl.create_default_context(cafile=str(certificate))


async def test_tls_is_spoken_and_ended_properly(plain: QuartTrio, tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    ours, theirs = tls
    async with serving(plain, tls=ours) as served:
        plainly = await served.connect()
        await plainly.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        with pytest.raises((AssertionError, trio.BrokenResourceError)):
            await plainly.answer()
        stream = trio.SSLStream((await served.connect()).stream, theirs, server_hostname="127.0.0.1")
        size = 3_000_000
        head = f"POST /length HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        await stream.send_all(head.encode() + bytes(size))
        answer = b""
        with trio.fail_after(20):
            while data := await stream.receive_some(65536):  # an end without TLS's own would raise
                answer += data
        assert answer.endswith(str(size).encode())


async def test_a_tls_client_that_does_not_read_cannot_delay_the_shutdown(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    ours, theirs = tls
    watched = Watched()
    async with serving(flood(watched), tls=ours, grace=0.1) as served:
        stream = trio.SSLStream((await served.connect()).stream, theirs, server_hostname="127.0.0.1")
        await stream.send_all(handshake("/ws").encode())
        await watched.started.wait()
        await trio.sleep(0.05)
        await served.stop(within=20)
        assert watched.cancelled

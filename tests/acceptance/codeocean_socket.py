"""CodeOcean's end of an execution's WebSocket: its handshake, its schema of messages, and its waiting for the close."""

import hashlib
import json
import secrets
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import trio
from wsproto import ConnectionType
from wsproto.connection import Connection, ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage
from wsproto.utilities import RemoteProtocolError

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
OUT_OF_MEMORY = "the allocation was OOM Killed"
LARGEST = 64 * 1024 * 1024 - 1

_WORDS = {"type": {"enum": ["stdout", "stderr", "error"]}, "data": {"type": "string"}}
_EXIT = {"type": {"const": "exit"}, "data": {"type": "integer", "minimum": 0, "maximum": 255}}
SCHEMA = jsonschema.Draft7Validator(
    {
        "oneOf": [
            {
                "properties": {"type": {"enum": ["start", "timeout"]}},
                "required": ["type"],
                "additionalProperties": False,
            },
            {"properties": _WORDS, "required": ["type", "data"], "additionalProperties": False},
            {"properties": _EXIT, "required": ["type", "data"], "additionalProperties": False},
        ]
    }
)


class HandshakeRefused(Exception):
    """The server's status instead of 101."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Conversation:
    """All that came, and what the client makes of it when the connection has closed."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[object] = field(default_factory=list)
    """Messages that aren't in the schema. The client reports them, and goes on without them."""
    broken: str = ""
    """A reset, or a fault of the protocol: it counts more than any message."""
    code: int | None = None

    @property
    def result(self) -> tuple[str, int | None]:
        """The last message with a status counts: ("exit", code), ("out of memory", None), ("timeout", None), or
        ("container depleted", None)."""
        found: tuple[str, int | None] = ("container depleted", None)
        if self.broken:
            return found
        for message in self.messages:
            match message:
                case {"type": "exit", "data": 137}:
                    found = ("out of memory", None)
                case {"type": "exit", "data": int(code)}:
                    found = ("exit", code)
                case {"type": "timeout"}:
                    found = ("timeout", None)
                case {"type": "error", "data": data} if data == OUT_OF_MEMORY:
                    found = ("out of memory", None)
        return found

    @property
    def destroys(self) -> bool:
        """Whether the client now asks for its runner's end."""
        return self.result[0] in {"timeout", "container depleted"}

    def text(self, kind: str) -> str:
        return "".join(message["data"] for message in self.messages if message["type"] == kind)

    def take(self, raw: str | bytes) -> None:
        """A whole message. Raises RemoteProtocolError for what makes the client close."""
        try:
            said = json.loads(raw)
        except ValueError:
            raise RemoteProtocolError("no JSON") from None
        if SCHEMA.is_valid(said):
            json.dumps(said, ensure_ascii=False).encode()  # half a character takes the whole reactor down
            self.messages.append(said)
        else:
            self.dropped.append(said)


class Socket:
    """Open, from one thread among many others; it never closes by itself but when the user wants to stop."""

    def __init__(self, stream: trio.abc.Stream, rest: bytes) -> None:
        self.heard = Conversation()
        self._stream = stream
        self._proto = Connection(ConnectionType.CLIENT)
        self._proto.receive_data(rest)
        self._parts: list[str | bytes] = []
        self._moved = trio.lowlevel.ParkingLot()
        self._sending = trio.Lock()

    async def type(self, text: str, *, binary: bool = True) -> None:
        """What the user typed. Whether a gem marks it as text or as bytes differs."""
        frame = BytesMessage(data=text.encode()) if binary else TextMessage(data=text)
        await self.send(frame)

    async def stop(self) -> None:
        """The user has had enough."""
        await self.send(CloseConnection(code=1000))

    async def said(self, text: str) -> None:
        """Wait until the output contains *text*."""
        while text not in self.heard.text("stdout"):
            await self._moved.park()

    async def closed(self) -> Conversation:
        """Listen until the server has ended the connection. There is no limit in time; tests have theirs."""
        try:
            async with self._stream:
                await self._events()
                while data := await self._stream.receive_some(65536):
                    self._proto.receive_data(bytes(data))
                    await self._events()
        except trio.BrokenResourceError:
            self.heard.broken = "reset"
        except RemoteProtocolError as error:
            self.heard.broken = f"protocol: {error}"
        self._moved.unpark_all()
        return self.heard

    async def send(self, event: Event) -> None:
        """Any frame."""
        async with self._sending:
            await self._stream.send_all(self._proto.send(event))

    async def _events(self) -> None:
        for event in self._proto.events():
            match event:
                case Message():
                    self._take(event)
                case Ping() if self._proto.state is ConnectionState.OPEN:
                    await self.send(event.response())
                case CloseConnection():
                    self.heard.code = int(event.code)
                    if self._proto.state is ConnectionState.REMOTE_CLOSING:
                        await self.send(event.response())

    def _take(self, event: Message[Any]) -> None:
        self._parts.append(event.data)
        if event.message_finished:
            whole = b"".join(part.encode() if isinstance(part, str) else part for part in self._parts)
            self._parts.clear()
            assert len(whole) <= LARGEST
            self.heard.take(whole.decode())
            self._moved.unpark_all()


async def open_socket(url: str, token: str, tls: ssl.SSLContext | None = None) -> Socket:
    """The handshake of its library: no origin, no extensions, no subprotocol; and it is particular about the answer."""
    parts = urlsplit(url)
    assert parts.scheme in {"ws", "wss"}, url
    assert parts.hostname is not None
    stream: trio.abc.Stream = await trio.open_tcp_stream(parts.hostname, parts.port or 80)
    if parts.scheme == "wss":
        stream = trio.SSLStream(stream, tls or ssl.create_default_context(), server_hostname=parts.hostname)
    key = b64encode(secrets.token_bytes(16))
    lines = [
        f"GET {parts.path}?{parts.query} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key.decode()}",
        "Sec-WebSocket-Version: 13",
        f"Poseidon-Token: {token}",
    ]
    await stream.send_all("\r\n".join([*lines, "", ""]).encode())
    received = b""
    while b"\r\n\r\n" not in received:
        data = bytes(await stream.receive_some(65536))
        assert data, f"the server has ended the handshake after {received!r}"
        received += data
    head, rest = received.split(b"\r\n\r\n", 1)
    try:
        _judge(head, key)
    except HandshakeRefused:
        await trio.aclose_forcefully(stream)
        raise
    return Socket(stream, rest)


def _judge(head: bytes, key: bytes) -> None:
    status, *lines = head.decode().split("\r\n")
    if status.split()[1] != "101":
        raise HandshakeRefused(int(status.split()[1]))
    headers = [(name.lower(), value.strip()) for name, value in (line.split(":", 1) for line in lines)]
    told = dict(headers)
    assert len(told) == len(headers), head
    assert told["upgrade"].lower() == "websocket", head
    assert told["connection"].lower() == "upgrade", head
    assert told["sec-websocket-accept"].encode() == b64encode(hashlib.sha1(key + GUID).digest()), head
    assert not {"sec-websocket-extensions", "sec-websocket-protocol"} & set(told), head

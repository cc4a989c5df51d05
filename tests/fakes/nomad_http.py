"""A small real HTTP/1.1 server that can also misbehave: hold back, break off, reset, refuse connections."""

import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import parse_qsl, unquote, urlsplit

import h11
import msgspec
import trio

CHUNK = 64 * 1024
PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: dict[str, str]
    body: bytes
    raw: bytes
    """Everything received of it, for whoever takes over the connection."""

    def get(self, name: str, default: str = "") -> str:
        return next((value for key, value in self.query if key == name), default)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.query if key == name]

    def flag(self, name: str) -> bool:
        return any(key == name and value in ("", "true", "1") for key, value in self.query)

    @property
    def upgrade(self) -> bool:
        return "websocket" in self.headers.get("upgrade", "").lower()


class Gone(Exception):
    """The connection is no longer ours: closed, reset or taken over."""


@dataclass
class Exchange:
    """One request and the answer to it."""

    request: Request
    stream: trio.SocketStream
    parser: h11.Connection
    lose_answer: bool = False
    """Reset the connection instead of answering."""

    async def answer(self, status: int, body: object = "", index: int | None = None, *, read: bool = True) -> None:
        """Text as it is, anything else as JSON; *index* makes Nomad's headers."""
        plain = isinstance(body, str)
        data = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
        headers = [] if plain and not body else [("Content-Type", PLAIN if plain else "application/json")]
        if index is not None:
            headers.append(("X-Nomad-Index", str(index)))
        if index is not None and read:
            headers += [("X-Nomad-Knownleader", "true"), ("X-Nomad-Lastcontact", "0")]
        await self.send(status, headers, data)

    async def send(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        if self.lose_answer:
            self.reset()
        told = [*headers, *_always(), ("Content-Length", str(len(data)))]
        head = self._bytes(h11.Response(status_code=status, headers=told))
        await self._write(head + self._bytes(h11.Data(data=data)) + self._bytes(h11.EndOfMessage()))

    async def begin(self, status: int = 200) -> None:
        """The head of an answer in chunks."""
        headers = [("Cache-Control", "no-cache"), ("Content-Type", "application/json"), *_always()]
        await self._write(
            self._bytes(h11.Response(status_code=status, headers=[*headers, ("Transfer-Encoding", "chunked")]))
        )

    async def chunks(self, data: list[bytes]) -> None:
        """Each is a chunk of its own."""
        await self._write(b"".join(self._bytes(h11.Data(data=one)) for one in data))

    async def part_of_chunk(self, data: bytes, length: int) -> None:
        """Only the first *length* bytes of what would be on the wire."""
        await self._write(self._bytes(h11.Data(data=data))[:length])

    async def end(self) -> None:
        await self._write(self._bytes(h11.EndOfMessage()))

    async def raw(self, data: bytes) -> None:
        await self._write(data)

    def reset(self) -> None:
        """End the connection by RST."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()
        raise Gone

    async def hang_up(self) -> None:
        """End the connection in the middle of the answer, by FIN."""
        await self.stream.aclose()
        raise Gone

    async def until_client_leaves(self) -> None:
        """Wait for the end of what the client sends; it has nothing more to say."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await self.stream.receive_some(CHUNK):
                pass

    async def _write(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Gone from error

    def _bytes(self, event: h11.Event) -> bytes:
        return self.parser.send(event) or b""


Handler = Callable[[Exchange], Awaitable[None]]


def _always() -> list[tuple[str, str]]:
    return [("Vary", "Accept-Encoding"), ("Date", format_datetime(datetime.now(UTC), usegmt=True))]


@dataclass
class Server:
    """Listens on one port of 127.0.0.1, which it keeps when it goes down and up again."""

    handler: Handler
    port: int = 0
    most_connections: int | None = None
    """Reset what comes above, as Nomad's http_max_conns_per_client does."""
    connections: set[trio.SocketStream] = field(default_factory=set)
    listening: bool = False
    _scope: trio.CancelScope | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def down(self) -> bool:
        """Its port is free."""
        return self._scope is None

    async def listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or cancellation."""
        while self._scope is not None:  # it is just going down
            await trio.lowlevel.checkpoint()
        (listener,) = await trio.open_tcp_listeners(self.port, host="127.0.0.1", backlog=1024)
        self.port = listener.socket.getsockname()[1]
        with trio.CancelScope() as self._scope:
            async with listener, trio.open_nursery() as nursery:
                self.listening = True
                task_status.started()
                await trio.serve_listeners(self._serve, [listener], handler_nursery=nursery)
        self._scope = None

    def stop(self, *, abruptly: bool = True) -> None:
        """Stop listening and break off all connections: by RST, or by a FIN."""
        for stream in list(self.connections):
            if abruptly and stream.socket.fileno() >= 0:  # it may just be closing
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.listening = False
        if self._scope is not None:
            self._scope.cancel()

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self.most_connections is not None and len(self.connections) >= self.most_connections:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()
            return
        self.connections.add(stream)
        try:
            await self._converse(stream)
        except (Gone, trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass
        finally:
            self.connections.discard(stream)
            await trio.aclose_forcefully(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parser = h11.Connection(h11.SERVER)
        while (request := await _read_request(stream, parser)) is not None:
            await self.handler(Exchange(request, stream, parser))
            if parser.our_state is not h11.DONE or parser.their_state is not h11.DONE:
                return
            parser.start_next_cycle()


async def _read_request(stream: trio.SocketStream, parser: h11.Connection) -> Request | None:
    head: h11.Request | None = None
    body, raw = bytearray(), bytearray()
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            data = await stream.receive_some(CHUNK)
            raw += data
            parser.receive_data(data)
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return _request(head, bytes(body), bytes(raw))
        else:
            return None


def _request(head: h11.Request, body: bytes, raw: bytes) -> Request:
    url = urlsplit(head.target.decode())
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
    query = tuple(parse_qsl(url.query, keep_blank_values=True))
    return Request(head.method.decode(), unquote(url.path), query, headers, body, raw)

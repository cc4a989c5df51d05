"""A small real HTTP server that answers just what a test orders, byte by byte if it must."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import h11
import msgspec
import trio

HTTP = Path(__file__).parent.parent / "recordings" / "http"

Handler = Callable[["Request"], Awaitable["Reply | None"]]


@dataclass(frozen=True)
class Request:
    """What came. *stream* is the raw connection, for answers that aren't HTTP any more."""

    method: str
    path: str
    query: dict[str, str]
    topics: tuple[str, ...]
    headers: dict[str, str]
    body: Any
    stream: trio.SocketStream


@dataclass(frozen=True)
class Reply:
    """An answer in one piece. Text stays text, all else becomes JSON."""

    body: Any
    status: int = 200
    index: int | None = 1000


@dataclass
class Loopback:
    """Answers by the first word of the route that fits: (method, path). A list of replies is used up one by one."""

    url: str = ""
    routes: dict[tuple[str, str], Reply | list[Reply] | Handler] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    def on(self, method: str, path: str, *replies: Reply | Handler) -> None:
        """The last of *replies* goes on and on."""
        first = replies[0]
        self.routes[method, path] = [r for r in replies if isinstance(r, Reply)] if isinstance(first, Reply) else first

    def asked(self, method: str, path: str) -> list[Request]:
        return [request for request in self.requests if (request.method, request.path) == (method, path)]

    async def answer(self, request: Request) -> Reply | None:
        route = self.routes.get((request.method, request.path))
        if route is None:
            return Reply(f"{request.method} {request.path}: no route", 404)
        if isinstance(route, list):
            return route.pop(0) if len(route) > 1 else route[0]
        return route if isinstance(route, Reply) else await route(request)


def recorded(name: str) -> Reply:
    """What the real Nomad answered."""
    found = msgspec.json.decode((HTTP / f"{name}.json").read_bytes())
    if not isinstance(found, dict) or "headers" not in found:
        return Reply(found)
    index = found["headers"].get("X-Nomad-Index")
    return Reply(found["body"], found["status"], int(index) if index else None)


def sends(*chunks: bytes, then: Callable[[Request], Awaitable[None]] | None = None) -> Handler:
    """An event stream of these chunks; *then* what happens before it is ended as it should be."""

    async def handle(request: Request) -> None:
        await request.stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in chunks:
            await request.stream.send_all(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if then is not None:
            await then(request)
        await request.stream.send_all(b"0\r\n\r\n")

    return handle


async def for_ever(_request: Request) -> None:
    """For `sends`: nothing more comes."""
    await trio.sleep_forever()


async def cut(request: Request) -> None:
    """For `sends`: the connection ends without the end of the body."""
    await request.stream.aclose()
    raise trio.BrokenResourceError


def line(index: int, *events: dict[str, Any]) -> bytes:
    """A line of the stream."""
    return msgspec.json.encode({"Index": index, "Events": list(events)}) + b"\n"


def event(topic: str, **payload: Any) -> dict[str, Any]:
    """An event of the stream."""
    return {"Topic": topic, "Type": "", "Key": "", "Payload": {topic: payload}}


@asynccontextmanager
async def open_loopback(tls: ssl.SSLContext | None = None) -> AsyncIterator[Loopback]:
    """Serves until the block is left."""
    loopback = Loopback()
    async with trio.open_nursery() as nursery:
        serve = partial(_serve, loopback)
        if tls is None:
            listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
            port = listeners[0].socket.getsockname()[1]
        else:
            listeners = await nursery.start(partial(trio.serve_ssl_over_tcp, serve, 0, tls, host="127.0.0.1"))
            port = listeners[0].transport_listener.socket.getsockname()[1]
        loopback.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        yield loopback
        nursery.cancel_scope.cancel()


async def _serve(loopback: Loopback, stream: Any) -> None:
    loopback.connections += 1
    connection = h11.Connection(h11.SERVER)
    try:
        while (request := await _receive(connection, stream)) is not None:
            loopback.requests.append(request)
            reply = await loopback.answer(request)
            if reply is None:
                break
            await stream.send_all(_bytes(connection, reply))
            connection.start_next_cycle()
    except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError):
        pass
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)


async def _receive(connection: h11.Connection, stream: Any) -> Request | None:
    head: h11.Request | None = None
    body = b""
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await stream.receive_some())
            case h11.Request() as head:
                pass
            case h11.Data(data=data):
                body += data
            case h11.EndOfMessage():
                assert head is not None
                return _request(head, body, stream)
            case _:
                return None


def _request(head: h11.Request, body: bytes, stream: Any) -> Request:
    target = urlsplit(head.target.decode())
    query = parse_qs(target.query, keep_blank_values=True)
    return Request(
        head.method.decode(),
        unquote(target.path),
        {key: values[0] for key, values in query.items()},
        tuple(query.get("topic", ())),
        {name.decode().lower(): value.decode() for name, value in head.headers},
        msgspec.json.decode(body) if body else None,
        stream,
    )


def _bytes(connection: h11.Connection, reply: Reply) -> bytes:
    body = reply.body.encode() if isinstance(reply.body, str) else msgspec.json.encode(reply.body)
    headers = [("Content-Length", str(len(body)))]
    if reply.index is not None:
        headers.append(("X-Nomad-Index", str(reply.index)))
    sent = connection.send(h11.Response(status_code=reply.status, headers=headers)) or b""
    return sent + (connection.send(h11.Data(data=body)) or b"") + (connection.send(h11.EndOfMessage()) or b"")

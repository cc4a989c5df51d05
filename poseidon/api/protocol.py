"""HTTP/1.1 and WebSocket as the server speaks them: Hypercorn's protocol classes, corrected.

They turn bytes into ASGI events and back and do no input or output of their own; `connection.py` does. What is
corrected here is told at each place; `tests/api/test_server.py` holds a test for each.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Protocol, cast

import h11
import msgspec
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.events import Event as ConnectionEvent
from hypercorn.protocol.events import Body, Data, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import ASGIWebsocketState, FrameTooLargeError, WebsocketBuffer, WSStream
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    H11SendableEvent,
    Scope,
    WorkerContext,
)
from wsproto.connection import ConnectionState as WebSocketState
from wsproto.events import CloseConnection, Message, Ping, TextMessage
from wsproto.frame_protocol import CloseReason

from poseidon.api.inbox import Gate

REFUSALS = {
    400: "the request is no valid HTTP",
    431: "the head of the request is too large",
    501: "this way of sending a body isn't understood",
    505: "only HTTP/1.0 and HTTP/1.1 are spoken",
}
CLOSE_WAIT = 5.0
"""Seconds that a client has to answer the close frame of a WebSocket."""
TOGETHER = 64 * 1024
"""Up to this many bytes of a body leave in one piece with the head."""


class Transport(Protocol):
    """What the protocol needs of its connection. Hypercorn knows it as the task group."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]: ...

    def spawn(self, func: Callable[..., Awaitable[Any]], *args: Any) -> None: ...

    async def __aenter__(self) -> "Transport": ...

    async def __aexit__(self, *_: object) -> None: ...

    async def room(self) -> None:
        """Wait until little is left to be sent. Where a handler that sends to a slow client waits, cancellably."""

    def crowded(self) -> bool:
        """Is there much left to be sent?"""

    def hung_up(self) -> bool: ...

    def close_within(self, seconds: float) -> None:
        """End reading after that time, if the client doesn't end it before."""


class HttpProtocol(H11Protocol):
    """One connection's HTTP/1.1."""

    task_group: Transport

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        *,
        transport: Transport,
        addresses: tuple[tuple[str, int] | None, tuple[str, int] | None],
        send: Callable[[ConnectionEvent], Awaitable[None]],
        encrypted: bool,
    ) -> None:
        client, server = addresses
        super().__init__(app, config, context, transport, ConnectionState({}), encrypted, client, server, send)
        self.can_read = Gate(transport.hung_up)
        self._held = b""
        self._last: HttpExchange | WebSocket | None = None

    async def go_away(self) -> None:
        """Tell the client of an open WebSocket that the server stops."""
        if isinstance(self.stream, WebSocket):
            await self.stream.fail(CloseReason.GOING_AWAY)

    def owes_input(self) -> bool:
        """May the client still be sending, though we have finished?"""
        if isinstance(self.connection, h11.Connection):
            return self.connection.their_state in {h11.SEND_BODY, h11.ERROR}
        return not (isinstance(self._last, WebSocket) and self._last.parted)

    async def stream_send(self, event: Event) -> None:
        if isinstance(event, Response) and event.status_code == HTTPStatus.NO_CONTENT:
            event.headers[:] = [each for each in event.headers if each[0] != b"content-length"]  # RFC 9110, 8.6
        if isinstance(event, Response) and event.status_code >= 200 and self._is_last():
            event.headers[:] = [
                *(each for each in event.headers if each[0] != b"connection"),
                (b"connection", b"close"),
            ]
        await super().stream_send(event)

    def _is_last(self) -> bool:
        # An answer sent before the request's body has come can't be followed by another one: what is left of the body
        # would have to be read first, and Hypercorn's reader would wait for ever for the handler to take it.
        return (
            isinstance(self.connection, H11WSConnection)
            or self.connection.their_state is h11.SEND_BODY
            or self.context.terminated.is_set()
        )

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers):
            self._held = data  # one packet and one call of the kernel, with the body that follows at once
            return
        if self._held and len(data) <= TOGETHER:
            data = self._held + data
        elif self._held:
            await self.send(RawData(data=self._held))
        self._held = b""
        if data:
            await self.send(RawData(data=data))

    async def _send_error_response(self, status_code: int, *, bare: bool = False) -> None:
        """Refuse what can't be read, with a message (Hypercorn: with nothing). *bare*: HEAD gets none."""
        headers, body = refusal(status_code)
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if not bare:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _check_protocol(self, event: h11.Request) -> None:
        """Neither HTTP/2 nor an upgrade to it is spoken; an offer of h2c is ignored."""

    async def _create_stream(self, request: h11.Request) -> None:
        target = _origin_form(request.target)
        refused = _objection(request, self.config.h11_max_incomplete_size) if target else 400
        if target is None or refused is not None:
            await self._send_error_response(refused or 400, bare=request.method == b"HEAD")
            await self.send(Closed())
            return
        headers = list(request.headers)
        wants_websocket = request.method == b"GET" and _wants_websocket(headers)
        self.stream = self._last = (WebSocket if wants_websocket else HttpExchange)(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        if wants_websocket:
            self.connection = H11WSConnection(cast(h11.Connection, self.connection))
            # Compression is never negotiated: it costs 100 KiB a socket, and a small message may inflate to gigabytes.
            headers = [(name, value) for name, value in headers if name != b"sec-websocket-extensions"]
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=headers,
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1


def refusal(status: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an answer that no handler has made."""
    said = {"message": REFUSALS.get(status, HTTPStatus(status).phrase.lower())}
    body = msgspec.json.encode(said if status < 500 or status in REFUSALS else {**said, "errorCode": "UNKNOWN"})
    length = (b"content-length", b"%d" % len(body))
    return [(b"content-type", b"application/json"), length, (b"connection", b"close")], body


def _objection(request: h11.Request, most: int) -> int | None:
    """The status that refuses a request which h11 takes. *most*: bytes of the head."""
    if not request.http_version.startswith(b"1."):
        return 505
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        return 400  # a proxy before us may go by the other one, and take what is left for somebody's next request
    if len(request.target) + sum(len(name) + len(value) for name, value in request.headers) > most:
        return 431  # h11 looks at what is incomplete, and a head may arrive in one piece
    return None


def _origin_form(target: bytes) -> bytes | None:
    """*target* as path and query; proxies may send a whole address. None if it is neither."""
    if target.lower().startswith((b"http://", b"https://")):
        rest = target.split(b"//", 1)[1]
        path = rest[len(rest.replace(b"?", b"/").split(b"/", 1)[0]) :]
        target = path if path.startswith(b"/") else b"/" + path
    return target if target.startswith(b"/") else None


def _wants_websocket(headers: list[tuple[bytes, bytes]]) -> bool:
    tokens = [token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")]
    return b"upgrade" in tokens and any(
        name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers
    )


class HttpExchange(HTTPStream):
    """One request and its answer."""

    task_group: Transport

    async def app_send(self, message: ASGISendEvent | None) -> None:
        if message is not None:
            await self.task_group.room()
            if self.closed:
                return
        await super().app_send(message)


class WebSocket(WSStream):
    """One WebSocket."""

    task_group: Transport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer = _Message(self.config.websocket_max_message_size)
        self._decided = Gate(self.task_group.hung_up)
        self._finished = False

    @property
    def parted(self) -> bool:
        """Have both sides sent their close frames?"""
        return self.handshake.accepted and self.connection.state is WebSocketState.CLOSED

    async def handle(self, event: Event) -> None:
        if isinstance(event, Body | Data) and not self.closed and not self.handshake.accepted:
            await self._decided.wait()  # a hasty client's first words wait for our answer
            if not self.handshake.accepted:
                return
        if isinstance(event, StreamClosed):
            await self._end()
        else:
            await super().handle(event)

    async def app_send(self, message: ASGISendEvent | None) -> None:
        if message is None:
            await self._leave()
        elif message["type"] == "websocket.send":
            await self._send(message)
        elif not self.closed:
            self._finished = message["type"] == "websocket.close"
            await super().app_send(message)
        await self._decided.set()

    async def fail(self, code: int, reason: str | None = None) -> None:
        """End the WebSocket for a reason that isn't the handler's."""
        if self.state is ASGIWebsocketState.CONNECTED and not self.closed:
            self.state = ASGIWebsocketState.CLOSED
            await self._send_wsproto_event(CloseConnection(code=code, reason=reason))

    async def _send(self, message: ASGISendEvent) -> None:
        await self.task_group.room()
        if self.closed or self.state is ASGIWebsocketState.CLOSED:
            await trio.lowlevel.checkpoint()  # else a loop that only sends would stop the whole process
            return
        await super().app_send(message)

    async def _end(self) -> None:
        """The client's end: expected, and no reason to cancel, after the handler's own close."""
        if not self.closed and self.app_put is not None:
            code = CloseReason.NORMAL_CLOSURE if self._finished else CloseReason.ABNORMAL_CLOSURE
            await self.app_put({"type": "websocket.disconnect", "code": code})
        self.closed = True

    async def _leave(self) -> None:
        """The handler has ended: close what it left open, then the client has its time to answer.

        The socket isn't closed before, because closing it with unread input resets it and destroys what was sent.
        """
        await self.fail(CloseReason.INTERNAL_ERROR)
        if self.closed or self.state is not ASGIWebsocketState.CLOSED:
            await super().app_send(None)
        else:
            self.task_group.close_within(CLOSE_WAIT)

    async def _handle_events(self) -> None:
        for event in self.connection.events():
            if isinstance(event, Message):
                await self._take(event)
            elif isinstance(event, Ping) and not self.task_group.crowded():
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                await self._part(event)
            if self.closed:
                return

    async def _take(self, event: Message[Any]) -> None:
        if self.state is not ASGIWebsocketState.CONNECTED:
            return
        try:
            self.buffer.extend(event)
        except FrameTooLargeError:
            await self.fail(CloseReason.MESSAGE_TOO_BIG)
            await self.send(StreamClosed(stream_id=self.stream_id))
            return
        if event.message_finished:
            message = cast(ASGIReceiveEvent, self.buffer.to_message())
            self.buffer.clear()
            await cast(Callable[[ASGIReceiveEvent], Awaitable[None]], self.app_put)(message)

    async def _part(self, event: CloseConnection) -> None:
        if self.connection.state is WebSocketState.REMOTE_CLOSING:
            await self._send_wsproto_event(event.response())
        else:  # what came wasn't a frame that we know, or is the answer to our own close
            await self.fail(event.code)
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _send_error_response(self, status_code: int) -> None:
        headers, body = refusal(status_code)
        await self.send(Response(stream_id=self.stream_id, status_code=status_code, headers=headers))
        await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
        await self.send(StreamClosed(stream_id=self.stream_id))


class _Message(WebsocketBuffer):
    """A message as it comes, measured in bytes before it is kept (Hypercorn: in characters, after)."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._bytes = 0

    def extend(self, event: Message[Any]) -> None:
        data = event.data
        wide = isinstance(event, TextMessage) and not data.isascii()
        self._bytes += len(data.encode()) if wide else len(data)
        if self._bytes > self.max_length:
            raise FrameTooLargeError
        super().extend(event)

    def clear(self) -> None:
        super().clear()
        self._bytes = 0

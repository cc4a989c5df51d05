"""The HTTP server: Hypercorn's protocols on connections of our own, on sockets that somebody else has opened.

It belongs to the nursery that runs `serve`, knows nothing of the API, and outlives no client's misbehaviour:
whoever stalls, vanishes, floods or talks nonsense costs its own connection only. What plain Hypercorn with
quart-trio does otherwise is corrected in `connection.py`, `protocol.py` and `inbox.py`, for one version of it.
"""

import errno
import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from inspect import isawaitable
from operator import itemgetter
from typing import Any, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart.wrappers import Request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection, TrioASGIWebsocketConnection

from poseidon.api.answers import UNTIL_ANSWERED
from poseidon.api.connection import Connection
from poseidon.api.inbox import Inbox
from poseidon.api.tls import Tls
from poseidon.errors import ConfigError, PoseidonError

HYPERCORN = "0.18.0"
DISMISSED = 32
"""Idle connections that are closed at once when there is no descriptor for another one."""
LAST_WORDS = 1.0
"""Seconds that cancelled handlers and their clients have, when the grace is over."""

_log = logging.getLogger("poseidon.server")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a client may cost. Sizes in bytes, times in seconds."""

    body: int = 128 * 1024 * 1024
    """Largest body of a request; beyond it 413."""
    header: int = 32 * 1024
    """Largest head of a request; beyond it 431."""
    message: int = 1024 * 1024
    """Largest message of a WebSocket from a client; beyond it close 1009."""
    connections: int = 0
    """At once; beyond it the one that has been idle for longest has to go, else the new one. 0: no limit."""
    stall: float = 60
    """How long a client may refuse to read before it is cut off."""
    keep_alive: float = 75
    """How long a connection may be without a request, or a request's head incomplete."""
    body_timeout: float = 120
    """How long a request's body may take; beyond it 408."""
    ping: float | None = 30
    """Interval of pings on WebSockets, so that proxies don't cut quiet ones; whether they are answered is nobody's
    affair, TCP finds dead clients."""


def configure(app: QuartTrio, limits: ServerLimits) -> None:
    """Replace what Quart presumes: 16 MiB bodies, answers cut after 60 s, lost empty frames, faults closed as 1000."""
    app.config["MAX_CONTENT_LENGTH"] = limits.body
    app.config["BODY_TIMEOUT"] = limits.body_timeout
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BACKGROUND_TASK_SHUTDOWN_TIMEOUT"] = LAST_WORDS
    app.asgi_http_class = _HttpRequest
    app.asgi_websocket_class = _WebSocketRequest


async def serve(
    app: QuartTrio,
    sockets: Sequence[socket.socket],
    limits: ServerLimits,
    *,
    shutdown: trio.Event,
    grace: float,
    tls: Tls | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve *app* on *sockets* (bound, listening; closed at the end) until *shutdown* is set.

    Then no connection is accepted, idle ones are closed, and what is under way has *grace* seconds: the application
    hears of the shutdown by its own means, and ends its WebSockets with its own last words. Who is left then gets
    close 1001 and is cancelled. Returns as soon as nobody is left.
    """
    _check_version()
    configure(app, limits)
    config = _hypercorn(limits)
    lifespan = Lifespan(ASGIWrapper(cast(ASGIFramework, app)), config, {})
    async with trio.open_nursery() as nursery:
        await nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        server = _Server(cast(ASGIFramework, app), config, limits, tls)
        await server.run([_listener(each, limits) for each in sockets], shutdown, grace, task_status)
        await lifespan.wait_for_shutdown()
        nursery.cancel_scope.cancel(reason="the server has stopped")


class _Server:
    def __init__(self, app: ASGIFramework, config: Config, limits: ServerLimits, tls: Tls | None) -> None:
        self._app = app
        self._config = config
        self._most = limits.connections
        self._stall = limits.stall
        self._tls = tls
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._left = trio.lowlevel.ParkingLot()

    async def run(
        self,
        listeners: Sequence[trio.socket.SocketType],
        shutdown: trio.Event,
        grace: float,
        task_status: trio.TaskStatus[None],
    ) -> None:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(self._accept, listener, nursery)
                task_status.started()
                await shutdown.wait()
                accepting.cancel_scope.cancel(reason="the server stops")
            await self._context.terminated.set()
            for connection in self._connections:
                connection.close_if_idle()
            nursery.start_soon(self._dismiss_after, grace, nursery.cancel_scope)

    async def _dismiss_after(self, grace: float, scope: trio.CancelScope) -> None:
        with trio.move_on_after(grace):
            while self._connections:
                await self._left.park()
        scope.deadline = trio.current_time() + LAST_WORDS
        for connection in list(self._connections):
            await connection.dismiss()

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        with listener:
            while True:
                try:
                    client, _ = await listener.accept()
                except OSError as error:
                    if error.errno in {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}:
                        raise
                    _log.warning("connection not accepted: %s", error)
                    self._close_idlest(DISMISSED)  # most likely out of descriptors: others have to leave first
                    await trio.sleep(0.1)
                else:
                    if self._has_room():
                        nursery.start_soon(self._serve, client)
                    else:
                        client.close()

    def _has_room(self) -> bool:
        """Whether there may be one more connection, if need be in the place of the one that is idle for longest."""
        if not self._most or len(self._connections) < self._most:
            return True
        if self._close_idlest(1):
            return True
        _log.warning("connection refused: all %d are in use, see server.limits.connections", self._most)
        return False

    def _close_idlest(self, most: int) -> int:
        """Close up to so many of those that have been without a request for longest; how many that were."""
        idle = [(since, each) for each in self._connections if (since := each.idle_since) is not None]
        chosen = sorted(idle, key=itemgetter(0))[:most]
        for _, connection in chosen:
            connection.close_if_idle()
        return len(chosen)

    async def _serve(self, client: trio.socket.SocketType) -> None:
        try:
            connection = self._open(client)
        except OSError:
            client.close()  # gone between accept and here
            return
        self._connections.add(connection)
        try:
            await connection.run()
        except* Exception:  # noqa: BLE001  # a fault that one client provokes must not end all the others
            _log.exception("connection failed")
        finally:
            self._connections.discard(connection)
            self._left.unpark_all()

    def _open(self, client: trio.socket.SocketType) -> Connection:
        plain = trio.SocketStream(client)
        stream = plain if self._tls is None else _encrypted(plain, self._tls)
        return Connection(self._app, self._config, self._context, stream, stall=self._stall, log=_log)


def _encrypted(plain: trio.SocketStream, tls: Tls) -> trio.SSLStream[trio.SocketStream]:
    return trio.SSLStream(plain, tls.context, server_side=True, https_compatible=True)


def _check_version() -> None:
    found = version("hypercorn")
    if found != HYPERCORN:
        raise ConfigError(
            f"hypercorn {HYPERCORN} is needed, {found} is installed: the corrections are made for that one"
        )


def _hypercorn(limits: ServerLimits) -> Config:
    config = Config()
    config.errorlog = _log
    config.h11_max_incomplete_size = limits.header
    config.include_date_header = False
    config.include_server_header = False
    config.keep_alive_max_requests = 2**62
    config.keep_alive_timeout = limits.keep_alive
    config.websocket_max_message_size = limits.message
    config.websocket_ping_interval = limits.ping
    return config


def _listener(bound: socket.socket, limits: ServerLimits) -> trio.socket.SocketType:
    """Set, for all connections to be accepted, that clients who died without a word are found by the kernel."""
    if bound.family in {socket.AF_INET, socket.AF_INET6}:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall * 1000))
    return trio.socket.from_stdlib_socket(bound)


class _HttpRequest(TrioASGIHTTPConnection):
    """A request as Quart sees it. One that is here as a whole needs no tasks of its own."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        body = receive.take_body() if isinstance(receive, Inbox) else None
        if body is None:
            await super().__call__(receive, send)
            return
        request = self._create_request_from_scope(send)
        request.body.append(body)
        request.body.set_complete()
        await self._answer(request, send)

    async def handle_request(self, nursery: trio.Nursery, request: Request, send: ASGISendCallable) -> None:  # type: ignore[override]
        await self._answer(request, send)
        nursery.cancel_scope.cancel()

    async def _answer(self, request: Request, send: ASGISendCallable) -> None:
        async with AsyncExitStack() as kept:
            request.scope[UNTIL_ANSWERED] = kept  # type: ignore[literal-required]
            response = await self.app.handle_request(request)
            try:
                await self._send_response(send, response)
            except PoseidonError as error:  # too late for another answer: the client sees that this one is incomplete
                _log.warning("answer broken off: %s", error.message)


class _WebSocketRequest(TrioASGIWebsocketConnection):
    """A WebSocket as Quart sees it. Whoever receives takes straight from the inbox, so that nothing is lost between."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if not isinstance(receive, Inbox):  # Quart's own test client
            await super().__call__(receive, send)
            return
        websocket = self._create_websocket_from_scope(send)
        websocket._receive = partial(self._receive, receive)
        await receive()  # the connect event: taken, so that an end can be told at once
        await self._answer(await self.app.handle_websocket(websocket), send)

    async def _receive(self, receive: ASGIReceiveCallable) -> str | bytes:
        while True:
            event = await receive()
            if event["type"] == "websocket.receive":
                data = event["bytes"]
                return data if data is not None else cast(str, event["text"])  # b"" is a message too

    async def _answer(self, response: Any, send: ASGISendCallable) -> None:
        if self._accepted:
            if not self._closed:  # a response means that the handler has failed
                await send({"type": "websocket.close", "code": 1000 if response is None else 1011, "reason": None})
        elif response is not None:
            await self._refuse(response, send)

    async def _refuse(self, response: Any, send: ASGISendCallable) -> None:
        body = response.get_data()
        headers = [(name.lower().encode(), value.encode()) for name, value in response.headers.items()]
        start = {"type": "websocket.http.response.start", "status": response.status_code, "headers": headers}
        await send(cast(ASGISendEvent, start))
        content = await body if isawaitable(body) else body
        await send({"type": "websocket.http.response.body", "body": content, "more_body": False})

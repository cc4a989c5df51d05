"""One accepted connection: reads it, writes it, runs its handlers, and closes it so that nothing sent is lost.

Only `run` closes the socket; everybody else asks for it. Nothing here waits for a client without a limit in time.
"""

import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from logging import Logger
from typing import Any, Self

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.typing import AppWrapper, ASGIFramework, ASGIReceiveEvent, ASGISendEvent, Scope, WorkerContext
from hypercorn.utils import parse_socket_addr

from poseidon.api.inbox import Inbox, hung_up
from poseidon.api.protocol import HttpProtocol

CHUNK = 64 * 1024
"""Bytes read at once, written at once, and left to be sent before a handler has to wait."""
HANDSHAKE = 10.0
LINGER = 2.0
"""Seconds without a byte after which a client that doesn't close its side is left."""
LINGER_MOST = 30.0
"""Seconds that the rest of a refused upload may take: closing earlier would reset the answer away."""

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class Connection:
    """The server's side of one client's connection."""

    def __init__(
        self,
        app: ASGIFramework,
        config: Config,
        context: WorkerContext,
        stream: Stream,
        *,
        stall: float,
        log: Logger,
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._stream = stream
        self._plain = stream if isinstance(stream, trio.SocketStream) else stream.transport_stream
        self._stall = stall
        self._log = log
        self._greeting = trio.CancelScope()
        self._reading = trio.CancelScope()
        self._pings = trio.CancelScope()
        self._inbox: Inbox | None = None
        self._idle = True
        self._idle_since = trio.current_time()
        self._over = False
        self._broken = False
        self._closed = False
        self._outgoing = bytearray()
        self._flushing = False
        self._sent = trio.lowlevel.ParkingLot()
        ends = self._plain.socket
        addresses = (
            parse_socket_addr(ends.family, ends.getpeername()),
            parse_socket_addr(ends.family, ends.getsockname()),
        )
        self._encrypted = self._plain is not stream
        wrapped: AppWrapper = app  # type: ignore[assignment]  # spawn_app is ours and calls the app itself
        self._protocol = HttpProtocol(
            wrapped, config, context, transport=self, addresses=addresses, send=self._handle, encrypted=self._encrypted
        )

    async def run(self) -> None:
        """Serve the client until one side has enough."""
        try:
            if not await self._shake_hands():
                return
            async with trio.open_nursery() as self._nursery:
                self._became_idle()
                ended = await self._read()
                await self._finish(ended=ended)
                self._close()
        finally:
            self._close()

    @property
    def idle_since(self) -> float | None:
        """Trio's time since which it has been without a request; None if it has one, or is about to be closed."""
        return self._idle_since if self._idle and not self._reading.cancel_called else None

    def close_if_idle(self) -> None:
        """The server stops, or needs the room: between requests there is nothing to wait for."""
        if self._idle:
            self._greeting.cancel(reason="the server doesn't wait")
            self._reading.cancel(reason="the server doesn't wait")

    async def dismiss(self) -> None:
        """The server's patience is over: say good-bye and cancel the handler."""
        await self._protocol.go_away()
        if self._inbox is not None:
            self._inbox.cancel_scope.cancel(reason="the server stops")

    # What the protocol asks for (protocol.Transport)

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        self._inbox = inbox = Inbox(self.hung_up)
        self._nursery.start_soon(self._run_app, scope, inbox, send)
        return inbox.put

    def spawn(self, func: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._nursery.start_soon(self._ping, func, *args)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing: `run` owns the tasks."""

    async def room(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.crowded():
            await self._sent.park()

    def crowded(self) -> bool:
        return len(self._outgoing) > CHUNK and not self._broken

    def hung_up(self) -> bool:
        return self._closed or self._broken or hung_up(self._plain.socket.fileno())

    def close_within(self, seconds: float) -> None:
        self._reading.deadline = trio.current_time() + seconds

    async def _handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            self._send(event.data)
            # Never without a pause, so that nobody who sends keeps the others from running; not cancellable, because
            # the protocol has to know that what it gave away is on its way.
            await trio.lowlevel.cancel_shielded_checkpoint()
        elif isinstance(event, Closed):
            self._over = True
            self._reading.cancel(reason="the exchange is over")
        elif isinstance(event, Updated) and event.idle:
            self._became_idle()
        elif isinstance(event, Updated):
            self._idle = False
            self._reading.deadline = math.inf

    def _became_idle(self) -> None:
        self._idle = True
        self._idle_since = trio.current_time()
        self._inbox = None
        self.close_within(self._config.keep_alive_timeout)
        if self._context.terminated.is_set():
            self.close_if_idle()

    # Handlers

    async def _run_app(
        self, scope: Scope, inbox: Inbox, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> None:
        try:
            with inbox.cancel_scope:
                await self._app(scope, inbox, send)
        except* Exception:  # noqa: BLE001  # whatever a handler failed of, the client gets an answer
            self._log.exception("handler failed")
        inbox.close()
        await send(None)

    async def _ping(self, func: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with self._pings:
            await func(*args)

    # Reading

    async def _read(self) -> bool:
        """Pass on what the client sends. True if the client has ended it."""
        with self._reading:
            try:
                while data := await self._stream.receive_some(CHUNK):
                    await self._protocol.handle(RawData(data=bytes(data)))
                return True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._broken = True
        return self._broken

    # Writing

    def _send(self, data: bytes) -> None:
        """Take *data* as a whole; what the kernel doesn't take at once is left to a task."""
        if self._broken or self._closed:
            return
        if not self._outgoing and not self._encrypted:
            data = data[self._write(data) :]
        self._outgoing += data
        if self._outgoing and not self._flushing:
            self._flushing = True
            self._nursery.start_soon(self._flush)

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self._plain.socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            self._abort("the client is gone")
            return len(data)

    async def _flush(self) -> None:
        try:
            while self._outgoing and not self._broken:
                chunk = bytes(self._outgoing[:CHUNK])
                with trio.fail_after(self._stall):
                    await self._stream.send_all(chunk)
                del self._outgoing[: len(chunk)]
                self._sent.unpark_all()
        except trio.TooSlowError:
            self._abort("the client doesn't read")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._abort("the client is gone")
        finally:
            self._flushing = False
            self._sent.unpark_all()

    def _abort(self, reason: str) -> None:
        self._broken = True
        self._sent.unpark_all()
        self._reading.cancel(reason=reason)
        self._log.debug("connection aborted: %s", reason)

    # Ending

    async def _finish(self, *, ended: bool) -> None:
        """The handler learns that nothing more comes; the client gets what is left for it."""
        self._pings.cancel(reason="the connection ends")
        await self._protocol.handle(Closed())
        while self._outgoing and not self._broken:
            await self._sent.park()
        if self._over and not ended and not self._broken and (self._encrypted or self._protocol.owes_input()):
            await self._linger()

    async def _linger(self) -> None:
        """End our side, then read until the client has ended its own: closing with unread input would be a reset."""
        try:
            with trio.move_on_after(LINGER_MOST):
                await self._end_ours()
                while True:
                    with trio.fail_after(LINGER):
                        if not await self._plain.receive_some(CHUNK):
                            return
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
            self._log.debug("client left without a close")

    async def _end_ours(self) -> None:
        if isinstance(self._stream, trio.SSLStream):
            with trio.move_on_after(LINGER):
                await self._stream.unwrap()
        await self._plain.send_eof()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._broken or self._outgoing:  # a reset, so that the kernel doesn't keep what nobody reads
            self._plain.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._plain.socket.close()

    async def _shake_hands(self) -> bool:
        if not isinstance(self._stream, trio.SSLStream):
            return True
        try:
            with self._greeting, trio.fail_after(HANDSHAKE):
                await self._stream.do_handshake()
                return True
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            self._log.debug("no TLS with this client: %s", error.__cause__ or error)
        return False

"""Forwards connections from ports of the machine to servers in a sandbox. Runs inside, forked by the helper.

Its listeners were bound outside, while what it connects to is the sandbox's own loopback: it can reach nothing else.
What passes through is never looked at. Like the helper, it runs under Python 3.9 or newer and is one file.
"""

from __future__ import annotations

import _socket as sockets
import errno
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST = 128
"""Connections at once; further ones wait. With CHUNK, this bounds the memory."""
CHUNK = 32768
ADDRESSES = ((sockets.AF_INET, "127.0.0.1"), (sockets.AF_INET6, "::1"))
KEEPALIVE = 60
"""Seconds of silence after which a client is asked whether it is still there."""


class End:
    """One of the two sockets of a connection, with what waits to be written to it."""

    def __init__(self, socket: sockets.socket) -> None:
        socket.setblocking(False)
        self.socket = socket
        self.number = socket.fileno()
        self.waiting = b""
        self.read_all = False
        """Nothing more comes from it."""
        self.told_end = False
        """It has been told that nothing more comes."""

    def read(self) -> bytes | None:
        """None: nothing there now; empty: the end."""
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return None
        self.read_all = not data
        return data

    def write(self, data: bytes) -> None:
        self.waiting += data
        try:
            self.waiting = self.waiting[self.socket.send(self.waiting) :] if self.waiting else b""
        except BlockingIOError:
            pass

    def end(self) -> None:
        """No more is to be written."""
        if not self.told_end and not self.waiting:
            self.told_end = True
            self.socket.shutdown(sockets.SHUT_WR)


class Relay:
    """A client's connection and the one to the server inside."""

    def __init__(self, forwarder: Forwarder, client: sockets.socket, port: int) -> None:
        self.forwarder = forwarder
        self.client = End(client)
        self.port = port
        self.untried = list(ADDRESSES)
        self.server: End | None = None
        self.connecting = True
        self.closed = False

    def connect(self) -> None:
        """Try the next address; without one, the client is turned away."""
        if self.server:
            self.forwarder.watch(self.server.number, 0)
            self.server.socket.close()
            self.server = None
        while self.untried:
            family, host = self.untried.pop(0)
            try:
                self.server = End(sockets.socket(family, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC))
            except OSError:
                continue
            if self.server.socket.connect_ex((host, self.port)) in (0, errno.EINPROGRESS):
                self.forwarder.watch(self.server.number, select.EPOLLOUT, self.connected)
                return
            self.server.socket.close()
            self.server = None
        self.close()

    def connected(self, _: int) -> None:
        assert self.server
        if self.server.socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_ERROR):
            self.connect()
            return
        self.connecting = False
        self.settle()

    def ready(self, end: End, other: End, events: int) -> None:
        """Move what can be moved; neither end may make us keep more than one chunk."""
        try:
            if events & select.EPOLLOUT:
                end.write(b"")
            if not end.read_all and not other.waiting and events & ~select.EPOLLOUT:
                data = end.read()
                if data:
                    other.write(data)
            for this, that in ((end, other), (other, end)):
                if this.read_all:
                    that.end()
        except OSError:
            self.close()
            return
        self.settle()

    def mover(self, end: End, other: End) -> Callable[[int], None]:
        return lambda events: self.ready(end, other, events)

    def settle(self) -> None:
        """Wait for what can happen next."""
        client, server = self.client, self.server
        assert server
        if client.told_end and server.told_end:
            self.close()
            return
        for end, other in ((client, server), (server, client)):
            events = (select.EPOLLOUT if end.waiting else 0) | (
                select.EPOLLIN if not end.read_all and not other.waiting else 0
            )
            self.forwarder.watch(end.number, events, self.mover(end, other))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for end in (self.client, self.server):
            if end:
                self.forwarder.watch(end.number, 0)
                end.socket.close()
        self.forwarder.left()


class Forwarder:
    """The loop. *ports*: descriptor of a listener → port inside."""

    def __init__(self, ports: Mapping[int, int]) -> None:
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.listeners = {descriptor: sockets.socket(fileno=descriptor) for descriptor in ports}
        self.ports = ports
        self.count = 0
        self.listen()

    def listen(self) -> None:
        for number in self.listeners:
            self.watch(number, select.EPOLLIN, self.acceptor(number))

    def acceptor(self, number: int) -> Callable[[int], None]:
        return lambda _: self.accept(number)

    def watch(self, number: int, events: int, handler: Callable[[int], None] | None = None) -> None:
        """Call *handler* upon *events*; none: not at all, as the kernel would tell of a hang-up again and again."""
        if number in self.handlers and not events:
            self.poll.unregister(number)
            del self.handlers[number]
        elif events and handler:
            (self.poll.modify if number in self.handlers else self.poll.register)(number, events)
            self.handlers[number] = handler

    def accept(self, number: int) -> None:
        try:
            descriptor, _ = self.listeners[number]._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        client = sockets.socket(fileno=descriptor)
        try:
            client.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
            client.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, KEEPALIVE)
            client.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        except OSError:
            pass  # it has left by now, as reading from it will tell
        self.count += 1
        if self.count >= MOST:
            for listener in self.listeners:
                self.watch(listener, 0)
        Relay(self, client, self.ports[number]).connect()

    def left(self) -> None:
        self.count -= 1
        if self.count == MOST - 1:
            self.listen()

    def serve(self) -> None:
        while True:
            # One at a time: a number may belong to another connection by the time the next event is looked at.
            for number, events in self.poll.poll(-1, 1):
                handler = self.handlers.get(number)
                if handler:
                    handler(events)


def serve(ports: Mapping[int, int]) -> None:
    """For ever."""
    Forwarder(ports).serve()

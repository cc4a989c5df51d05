"""What a client has sent, in order, on its way to the handler; and the waiting of the one who brings it.

The reader of a connection may wait here for a slow handler. It doesn't read meanwhile, so it asks the kernel whether
the client has hung up: else a client's end would stay unseen behind its own unread input.
"""

import select
from collections import deque
from collections.abc import Callable

import trio
from hypercorn.typing import ASGIReceiveEvent
from wsproto.frame_protocol import CloseReason

CAPACITY = 256 * 1024
"""Bytes that may wait for the handler; then the client has to (TCP's back-pressure).

An orderly end behind more input than this and the kernel hold can't be seen; keep-alive notices it minutes later.
"""
OVERHEAD = 128
"""What an event costs beside its data, so that floods of empty messages count too."""
PATIENCE = 0.5
"""Seconds without progress after which the rest of a vanished client's input is given up."""


def hung_up(descriptor: int) -> bool:
    """Has the peer of this socket closed or reset it, unread input notwithstanding?"""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


class Gate:
    """Hypercorn's event, for a reader that must wait; raises BrokenResourceError if the client hangs up meanwhile."""

    def __init__(self, gone: Callable[[], bool]) -> None:
        self._gone = gone
        self._event = trio.Event()

    async def set(self) -> None:
        self._event.set()

    async def clear(self) -> None:
        self._event = trio.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        while not self._event.is_set():
            with trio.move_on_after(PATIENCE):
                await self._event.wait()
                return
            if self._gone():
                raise trio.BrokenResourceError("the client has hung up")


class Inbox:
    """The ASGI `receive` of one request or WebSocket, bounded by bytes.

    A client's end comes last: the handler is cancelled as soon as it has taken everything, or takes nothing for a
    moment. So a slow handler loses nothing, and one that never reads still learns that its client is gone.
    """

    def __init__(self, gone: Callable[[], bool]) -> None:
        self.cancel_scope = trio.CancelScope()
        self._gone = gone
        self._events: deque[tuple[ASGIReceiveEvent, int]] = deque()
        self._size = 0
        self._ended = False
        self._closed = False
        self._arrival = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()

    async def __call__(self) -> ASGIReceiveEvent:
        """The next event; at the client's end the caller's handler is cancelled instead."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._ended:
                self.cancel_scope.cancel(reason="the client is gone")
            await self._arrival.park()
        event, size = self._events.popleft()
        self._size -= size
        self._room.unpark_all()
        if self._ended:
            self._hurry()
        return event

    async def put(self, event: ASGIReceiveEvent) -> None:
        """Bring what the client sent. Raises BrokenResourceError if it has hung up and nobody takes its input."""
        if event["type"] in {"http.disconnect", "websocket.disconnect"}:
            self._end(expected=event.get("code") == CloseReason.NORMAL_CLOSURE)
            return
        while self._size >= CAPACITY and not self._closed:
            await self._wait_for_room()
        if not self._closed:
            size = OVERHEAD + _payload(event)
            self._events.append((event, size))
            self._size += size
            self._arrival.unpark_all()

    def close(self) -> None:
        """Nobody takes anything any more: from now on, input is dropped, and no end is told."""
        self._closed = True
        self._events.clear()
        self._room.unpark_all()

    def take_body(self) -> bytes | None:
        """The body of a request if all of it is here already."""
        if not self._events or self._events[-1][0].get("more_body", False) or self._ended:
            return None
        body = b"".join(event.get("body", b"") for event, _ in self._events)  # type: ignore[misc]
        self._events.clear()
        self._size = 0
        return body

    async def _wait_for_room(self) -> None:
        with trio.move_on_after(PATIENCE) as waiting:
            await self._room.park()
        if waiting.cancelled_caught and self._gone():
            raise trio.BrokenResourceError("the client has hung up, and its input isn't taken")

    def _end(self, *, expected: bool) -> None:
        if self._closed or self._ended:
            return
        self._ended = True
        if expected:
            self._arrival.unpark_all()  # only who waits for more has waited in vain
        elif self._events:
            self._hurry()
        else:
            self.cancel_scope.cancel(reason="the client is gone")

    def _hurry(self) -> None:
        self.cancel_scope.deadline = trio.current_time() + PATIENCE


def _payload(event: ASGIReceiveEvent) -> int:
    if event["type"] == "http.request":
        return len(event["body"])
    if event["type"] == "websocket.receive":
        return len(event["bytes"] or event["text"] or b"")
    return 0

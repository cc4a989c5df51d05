"""A WebSocket client whose two directions don't wait for each other.

That of websockets lets its receiver wait for a send that is under way. A peer that takes no more input before its
output is read, as ours does, then never gets on: `run -- cat` with a large file.
"""

import logging
from contextlib import suppress

import trio
from websockets.trio.client import ClientConnection


def quiet() -> logging.Logger:
    """For a library whose errors arrive as exceptions: its own words, tracebacks among them, are none for a person."""
    logger = logging.getLogger("poseidon.quiet")
    logger.disabled = True
    return logger


class DuplexConnection(ClientConnection):
    """To be given to `connect` as *create_connection*."""

    _receiver: trio.lowlevel.Task | None = None
    _answering = False

    async def recv_events(self) -> None:
        """See ClientConnection."""
        self._receiver = trio.lowlevel.current_task()
        await super().recv_events()

    async def send_data(self) -> None:
        """Send what is queued; what the receiver queues (pongs, the answer to a close) is sent beside it."""
        if trio.lowlevel.current_task() is not self._receiver:
            await super().send_data()
        elif self.protocol.writes and not self._answering:
            self._answering = True
            self.nursery.start_soon(self._answer)

    async def _answer(self) -> None:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):  # the receiver sees that itself
            while self.protocol.writes:
                await super().send_data()
        self._answering = False

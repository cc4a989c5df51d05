"""Hostile clients, all at once: for the bench as a process of its own, for a test in the test's.

    python -m bench.attacks PORT RUNNER          # until it is ended; prints "under way" when all of them are

Each costs what it can: they stall, flood, send frames that are too large or would inflate, and hold connections open.
"""

import argparse
import json
import os
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from bench import wire

HALF_OPEN = 500
HUGE = 150 * 2**20
"""Bytes of one frame."""
BOMB = 512 * 2**20
"""Bytes that a frame of some 500 KB claims to be, if it is taken for compressed."""
UPLOAD = 50 * 2**20
"""Bytes that the length of a slow upload promises."""
PAUSE = 0.05
"""Seconds between two bytes of those who are slow."""
STALLED, FLOODING, SLOW = 5, 5, 20

Closed = trio.BrokenResourceError, trio.ClosedResourceError, OSError


@dataclass(slots=True)
class Attacks:
    """On the service at *port*, with a runner of its own; *strength* scales the numbers of clients."""

    port: int
    runner: str
    strength: float = 1.0
    refused: dict[str, int] = field(default_factory=dict)
    """Close codes that the too large were answered with."""
    _bomb: bytes = b""

    async def all(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; started when each has begun."""
        self._bomb = _deflated(BOMB)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.half_open)
            for attack, count in (
                (self.stalled_reader, STALLED),
                (self.flood_of_input, FLOODING),
                (self.slow_head, SLOW),
                (self.slow_body, SLOW),
                (self.huge_frame, 1),
                (self.deflate_bomb, 1),
            ):
                for _ in range(max(1, round(count * self.strength))):
                    await nursery.start(attack)
            task_status.started()

    async def half_open(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Connections without a request, and some with half a one."""
        held = []
        try:
            for number in range(round(HALF_OPEN * self.strength)):
                held.append(await trio.open_tcp_stream("127.0.0.1", self.port))
                if number % 2:
                    await held[-1].send_all(b"GET /api/v1/health HTTP/1.1\r\nHost: x\r\nX-")
            task_status.started()
            await trio.sleep_forever()
        finally:
            for each in held:
                each.socket.close()

    async def slow_head(self, *, task_status: trio.TaskStatus[None]) -> None:
        """A header that never ends."""
        await self._dribble(b"POST /api/v1/runners HTTP/1.1\r\nHost: x\r\nX-Long: ", task_status)

    async def slow_body(self, *, task_status: trio.TaskStatus[None]) -> None:
        """A body that never ends, after a first part at once."""
        head = f"PATCH /api/v1/runners/{self.runner}/files HTTP/1.1\r\nHost: x\r\nContent-Length: {UPLOAD}\r\n\r\n"
        await self._dribble(head.encode() + b"[" + b" " * 100_000, task_status)

    async def _dribble(self, first: bytes, task_status: trio.TaskStatus[None]) -> None:
        async with self._connected() as stream:
            await stream.send_all(first)
            task_status.started()
            while True:
                await stream.send_all(b"x")
                await trio.sleep(PAUSE)

    async def stalled_reader(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Endless output, and nobody who takes it."""
        async with self._websocket("yes"):
            task_status.started()
            await trio.sleep_forever()

    async def flood_of_input(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Endless input for a program that doesn't want any."""
        async with self._websocket("sleep 600") as stream:
            task_status.started()
            frame = _frame(0x82, 60_000) + bytes(60_000)
            while True:
                await stream.send_all(frame)

    async def huge_frame(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Again and again."""
        task_status.started()
        while True:
            async with self._websocket("cat") as stream:
                with suppress(*Closed):
                    await stream.send_all(_frame(0x82, HUGE))
                    for _ in range(HUGE // 2**16):
                        await stream.send_all(bytes(2**16))
                await self._read_close("huge", stream)

    async def deflate_bomb(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Compression is offered; a frame is marked as compressed whether or not the offer was taken."""
        task_status.started()
        while True:
            async with self._websocket("cat", "Sec-WebSocket-Extensions: permessage-deflate") as stream:
                with suppress(*Closed):
                    await stream.send_all(_frame(0xC2, len(self._bomb)) + self._bomb)
                await self._read_close("bomb", stream)

    async def _read_close(self, kind: str, stream: trio.SocketStream) -> None:
        """The close code, if one comes; then some rest."""
        received = b""
        with trio.move_on_after(10), suppress(*Closed):
            while data := bytes(await stream.receive_some(65536)):
                received = (received + data)[-200:]
        at = received.rfind(b"\x88")
        if at >= 0 and len(received) >= at + 4:
            (self.refused[kind],) = struct.unpack("!H", received[at + 2 : at + 4])
        await trio.sleep(0.5)

    @asynccontextmanager
    async def _websocket(self, command: str, *headers: str) -> AsyncIterator[trio.SocketStream]:
        """An execution's, from the start on."""
        http = await wire.connect(self.port)
        said = await http.call("POST", f"/runners/{self.runner}/execute", {"command": command, "tty": False})
        await http.aclose()
        path = "/api/v1" + said["websocketUrl"].partition("/api/v1")[2]
        lines = [
            f"GET {path} HTTP/1.1",
            "Host: 127.0.0.1",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version: 13",
            *headers,
        ]
        async with self._connected(receive=4096) as stream:
            await stream.send_all("\r\n".join([*lines, "", ""]).encode())
            answer = bytes(await stream.receive_some(1024))
            if not answer.startswith(b"HTTP/1.1 101 "):
                raise RuntimeError(f"no WebSocket: {answer[:100]!r}")
            yield stream

    @asynccontextmanager
    async def _connected(self, receive: int = 0) -> AsyncIterator[trio.SocketStream]:
        """A connection that is reset in the end, and takes the end of its other side for a reason to rest."""
        sock = trio.socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        stream = trio.SocketStream(sock)
        try:
            await sock.connect(("127.0.0.1", self.port))
            with suppress(trio.BrokenResourceError):
                yield stream
        finally:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


def _frame(first: int, length: int) -> bytes:
    """The head of a masked frame, whose mask changes nothing."""
    return bytes([first, 0x80 | 127]) + struct.pack("!Q", length) + bytes(4)


def _deflated(size: int) -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = made.compress(bytes(2**20)) + made.flush(zlib.Z_FULL_FLUSH)  # each such block stands for itself
    return (block * (size // 2**20))[:-4]


async def _run(attacks: Attacks) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(attacks.all)
        print("under way", flush=True)
        await trio.to_thread.run_sync(os.read, 0, 1, abandon_on_cancel=True)  # until nobody wants them any more
        nursery.cancel_scope.cancel()
    print(json.dumps(attacks.refused), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("port", type=int)
    options.add_argument("runner")
    options.add_argument("--strength", type=float, default=1.0)
    given = options.parse_args()
    trio.run(partial(_run, Attacks(given.port, given.runner, given.strength)))


if __name__ == "__main__":
    main()

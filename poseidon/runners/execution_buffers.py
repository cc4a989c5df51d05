"""What lies between a command and its client: bounded in bytes, so that the quicker side waits for the slower.

Adding never fails and never waits; who adds waits afterwards for room. So a cancelled producer loses nothing.
"""

from collections import deque

import trio

from poseidon.executors.base import Stream

OUTPUT_MOST = 256 * 1024
"""Bytes of output that wait for the client before the command has to."""
INPUT_MOST = 1024 * 1024
"""Bytes of input that wait for the command before the client has to: also control behind a flood shall get through."""
PIECE = 32 * 1024
"""Most bytes given to the client at once: small messages, and a stalled one costs little. Half a full pipe."""
LAST_MOST = 1024 * 1024
"""Bytes taken in without regard to the client when the command is over: more than pipes can hold."""


class OutputBuffer:
    """Output on its way to the client. One producer, one consumer."""

    def __init__(self) -> None:
        self.received = {Stream.STDOUT: 0, Stream.STDERR: 0}
        self._chunks: deque[tuple[Stream, bytes]] = deque()
        self.size = 0
        """Bytes that wait for the client."""
        self._most = OUTPUT_MOST
        self._ended = False
        self._moved = trio.lowlevel.ParkingLot()

    @property
    def total(self) -> int:
        """Bytes that ever came."""
        return sum(self.received.values())

    def add(self, stream: Stream, data: bytes) -> None:
        """Take in a chunk; after the end it is dropped."""
        self.received[stream] += len(data)
        if not self._ended:
            self._chunks.append((stream, data))
            self.size += len(data)
            self._moved.unpark_all()

    async def room(self) -> None:
        """Wait until the client has taken enough."""
        while self.size > self._most and not self._ended:
            await self._moved.park()

    def lift(self) -> None:
        """The command is over: what is left of its output no longer waits for the client."""
        self._most = self.size + LAST_MOST
        self._moved.unpark_all()

    def end(self) -> None:
        """All that counts is here."""
        self._ended = True
        self._moved.unpark_all()

    def discard(self) -> None:
        """Nobody wants it any more."""
        self._chunks.clear()
        self.size = 0
        self.end()

    async def take(self) -> tuple[Stream, bytes] | None:
        """The next piece as soon as there is one, neighbours of one stream joined; None at the end."""
        while not self._chunks:
            if self._ended:
                return None
            await self._moved.park()
        stream, data = self._next()
        self.size -= len(data)
        self._moved.unpark_all()
        return stream, data

    def _next(self) -> tuple[Stream, bytes]:
        chunks = self._chunks
        stream, data = chunks.popleft()
        if len(data) > PIECE:
            chunks.appendleft((stream, data[PIECE:]))
            return stream, data[:PIECE]
        joined = [data]
        size = len(data)
        while chunks and chunks[0][0] is stream and size + len(chunks[0][1]) <= PIECE:
            joined.append(chunks.popleft()[1])
            size += len(joined[-1])
        return stream, b"".join(joined)


class InputBuffer:
    """Input on its way to the command's stdin. One producer, one consumer."""

    def __init__(self) -> None:
        self.received = 0
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._moved = trio.lowlevel.ParkingLot()

    async def put(self, data: bytes) -> None:
        """Take in *data*, then wait while there is too much; after the end it is dropped."""
        self.received += len(data)
        if data and not self._ended:
            self._chunks.append(data)
            self._size += len(data)
            self._moved.unpark_all()
        while self._size > INPUT_MOST and not self._ended:
            await self._moved.park()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._moved.unpark_all()

    def discard(self) -> None:
        """The command takes nothing more."""
        self._chunks.clear()
        self._size = 0
        self.end()

    async def take(self) -> bytes | None:
        """The next chunk; None at the end."""
        while not self._chunks:
            if self._ended:
                return None
            await self._moved.park()
        data = self._chunks.popleft()
        self._size -= len(data)
        self._moved.unpark_all()
        return data

"""Output on its way from a connection to whoever receives it: bounded, so that the command waits for its reader."""

from collections import deque

import trio

from poseidon.errors import ExecutorError
from poseidon.executors.base import Stream

MOST = 256 * 1024
"""Bytes that wait for their receiver before the connection has to."""
CHUNK = 64 * 1024


class Output:
    """Both streams, as one sequence of chunks."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[Stream, bytes]] = deque()
        self._size = 0
        self._open = set(Stream)
        self._error: ExecutorError | None = None
        self._moved = trio.lowlevel.ParkingLot()

    async def put(self, stream: Stream, data: bytes) -> None:
        """Take it in, then wait while there is too much; what comes after the stream's end is dropped."""
        if stream in self._open:
            self._chunks.append((stream, data))
            self._size += len(data)
            self._moved.unpark_all()
        while self._size > MOST:
            await self._moved.park()

    def end(self, *streams: Stream) -> None:
        """No more comes of these."""
        self._open -= set(streams)
        self._moved.unpark_all()

    def fail(self, error: ExecutorError) -> None:
        """No more comes, though more should have."""
        if self._open:
            self._error = error
        self.end(*Stream)

    async def take(self) -> tuple[Stream, bytes] | None:
        """The next chunk, neighbours of one stream joined; None at the end. Raises what `fail` was given."""
        await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self._error:
                raise self._error
            if not self._open:
                return None
            await self._moved.park()
        stream, data = self._next()
        self._size -= len(data)
        self._moved.unpark_all()
        return stream, data

    def _next(self) -> tuple[Stream, bytes]:
        chunks = self._chunks
        stream, data = chunks.popleft()
        if len(data) > CHUNK:
            chunks.appendleft((stream, data[CHUNK:]))
            return stream, data[:CHUNK]
        joined, size = [data], len(data)
        while chunks and chunks[0][0] is stream and size + len(chunks[0][1]) <= CHUNK:
            joined.append(chunks.popleft()[1])
            size += len(joined[-1])
        return stream, b"".join(joined)

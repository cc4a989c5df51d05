"""The leanest HTTP client: measures the server rather than itself. It trusts the server to answer well."""

import json
from typing import Any

import trio

CHUNK = 65536


class Connection:
    """One connection that is kept alive, one request at a time."""

    def __init__(self, stream: trio.SocketStream, port: int) -> None:
        self._stream = stream
        self._host = f"Host: 127.0.0.1:{port}\r\n"
        self._buffer = bytearray()

    async def call(self, method: str, path: str, body: object = None, *, expect: int = 200) -> Any:
        """The answer's JSON, None without a body. Raises RuntimeError on any other status."""
        return await self.send(self.encoded(method, path, body), expect=expect)

    def encoded(self, method: str, path: str, body: object = None) -> bytes:
        """A request, for `send`."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} /api/v1{path} HTTP/1.1\r\n{self._host}Content-Length: {len(content)}\r\n"
        return head.encode() + b"Content-Type: application/json\r\n\r\n" + content

    async def send(self, request: bytes, *, expect: int) -> Any:
        """As `call`."""
        await self._stream.send_all(request)
        status, answer = await self._answer()
        if status != expect:
            raise RuntimeError(f"{request[:80]!r} was answered with {status}: {answer[:200]!r}")
        return json.loads(answer) if answer else None

    async def take(self, path: str) -> int:
        """The bytes of a GET's answer, counted and forgotten."""
        await self._stream.send_all(f"GET /api/v1{path} HTTP/1.1\r\n{self._host}\r\n".encode())
        status, size = await self._head()
        left = size - len(self._buffer)
        self._buffer.clear()
        while left > 0:
            await self._more()
            left -= len(self._buffer)
            self._buffer.clear()
        if status != 200:
            raise RuntimeError(f"GET {path} was answered with {status}")
        return size - left

    async def status(self, path: str) -> int:
        """Of a GET."""
        await self._stream.send_all(f"GET /api/v1{path} HTTP/1.1\r\n{self._host}\r\n".encode())
        return (await self._answer())[0]

    async def _answer(self) -> tuple[int, bytes]:
        status, size = await self._head()
        while len(self._buffer) < size:
            await self._more()
        answer = bytes(self._buffer[:size])
        del self._buffer[:size]
        return status, answer

    async def _head(self) -> tuple[int, int]:
        """The status, and how long the body is."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            await self._more()
        head = bytes(self._buffer[:end]).lower()
        size = 0
        if (at := head.find(b"\r\ncontent-length:")) >= 0:
            size = int(head[at + 17 :].split(b"\r\n", 1)[0])
        del self._buffer[: end + 4]
        return int(head.split(b" ", 2)[1]), size

    async def _more(self) -> None:
        data = await self._stream.receive_some(CHUNK)
        if not data:
            raise RuntimeError("the server has closed the connection")
        self._buffer += data

    async def aclose(self) -> None:
        await self._stream.aclose()


async def connect(port: int) -> Connection:
    """Raises OSError if nobody listens."""
    return Connection(await trio.open_tcp_stream("127.0.0.1", port), port)

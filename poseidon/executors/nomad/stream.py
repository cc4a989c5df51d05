"""An answer that goes on and on, read straight from its connection: whatever one read brings is handed on at once.

Not by httpx: it hands on each chunk by itself, through five nested generators, which costs two thirds of the speed,
and they can't be left in between without leaving something behind.
"""

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import h11
import trio

from poseidon.errors import ExecutorUnreachable

ONE_READ = 1 << 18
LONGEST_REFUSAL = 1 << 16
"""Bytes of the body of an answer that isn't the stream."""

Connection = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class StreamBroken(ExecutorUnreachable):
    """The connection is of no more use."""


class Answer:
    """Its head has come."""

    def __init__(self, connection: Connection, reader: h11.Connection, head: h11.Response) -> None:
        self.status = head.status_code
        self._connection = connection
        self._reader = reader
        self._ended = False

    async def receive(self) -> bytes:
        """All that has come, at least a byte; empty at the proper end. Raises StreamBroken."""
        parts: list[bytes] = []
        with _errors():
            while not self._ended:
                event = self._next(bool(parts))
                if isinstance(event, h11.Data) and event.data:
                    parts.append(bytes(event.data))
                elif event is not h11.NEED_DATA:
                    self._ended = isinstance(event, h11.EndOfMessage)
                    break
                elif parts:
                    break
                else:
                    self._reader.receive_data(bytes(await self._connection.receive_some(ONE_READ)))
        return b"".join(parts)

    def _next(self, something_came: bool) -> object:
        """What came before something that can't be understood counts; it is met again by the next call."""
        try:
            return self._reader.next_event()
        except h11.RemoteProtocolError:
            if not something_came:
                raise
            return None

    async def read(self) -> bytes:
        """A short body as a whole."""
        body = b""
        while len(body) < LONGEST_REFUSAL and (more := await self.receive()):
            body += more
        return body


@asynccontextmanager
async def open_stream(
    url: str, target: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, connect_within: float
) -> AsyncIterator[Answer]:
    """GET *target*; entered when the answer's head has come. Raises StreamBroken."""
    place = urlsplit(url)
    reader = h11.Connection(h11.CLIENT)
    with _errors():
        with trio.fail_after(connect_within):
            connection = await _connect(place.hostname or "", place.port or (443 if tls else 80), tls)
        try:
            request = h11.Request(method="GET", target=target, headers=[("Host", place.netloc), *headers.items()])
            await connection.send_all((reader.send(request) or b"") + (reader.send(h11.EndOfMessage()) or b""))
            answer = Answer(connection, reader, await _head(connection, reader))
        except BaseException:
            await trio.aclose_forcefully(connection)
            raise
    try:
        yield answer
    finally:
        await trio.aclose_forcefully(connection)


async def _connect(host: str, port: int, tls: ssl.SSLContext | None) -> Connection:
    stream = await trio.open_tcp_stream(host, port)
    if tls is None:
        return stream
    secure = trio.SSLStream(stream, tls, server_hostname=host)
    try:
        await secure.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(secure)
        raise
    return secure


async def _head(connection: Connection, reader: h11.Connection) -> h11.Response:
    while True:
        event = reader.next_event()
        if isinstance(event, h11.Response):
            return event
        if event is h11.NEED_DATA:
            reader.receive_data(bytes(await connection.receive_some(ONE_READ)))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except trio.TooSlowError:
        raise StreamBroken("no connection in time") from None
    except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as error:
        raise StreamBroken(words_of(error)) from error


def words_of(error: BaseException) -> str:
    """What went wrong, in one line: libraries often say it only further down the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if words := str(cause).partition("\n")[0]:
            return words
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__

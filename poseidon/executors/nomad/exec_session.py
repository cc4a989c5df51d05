"""One exec session of Nomad: a WebSocket that carries the streams of one process.

It knows the frames and how connections end, nothing of what runs there. Recorded: hashicorp/nomad 1.1.0.
"""

import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext
from urllib.parse import urlsplit

import msgspec
import trio
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.trio.client import ClientConnection, connect

from poseidon.core.model import Allocation
from poseidon.duplex import DuplexConnection
from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError, ExecutorUnreachable
from poseidon.executors.base import Stream
from poseidon.executors.nomad.exec_target import ExecTarget
from poseidon.executors.nomad.wire import Number

LARGEST_FRAME = 16 * 1024 * 1024
QUEUE = 64
"""Frames that wait in the client; they hold 1 to 4 KiB of output each."""
PIECE = 32 * 1024
"""Most bytes of input in one frame."""
CLOSE_WITHIN = 0.05
"""Seconds for the farewell: Nomad answers it at once, but may leave the connection open."""
MISSED_MOST = 3
"""Heartbeats without an answer after which the other end is dead."""

HARMLESS = range(2048)
"""Bytes of input, all together, that every pipe and terminal takes in though nobody reads them."""

GONE = ("Unknown allocation", "is not running", "not started yet")
REFUSED = ("Permission denied", "ACL token not found")

log = logging.getLogger(__name__)
log.setLevel(logging.CRITICAL)  # websockets logs what we handle, headers with the token among it


class Unconnected(ExecutorUnreachable):
    """There was no connection at all; another address may do."""


class _Data(msgspec.Struct, gc=False):
    data: bytes = b""
    close: bool = False


class _Result(msgspec.Struct, gc=False):
    exit_code: Number = 0


class _Frame(msgspec.Struct, gc=False):
    stdout: _Data | None = None
    stderr: _Data | None = None
    exited: bool = False
    result: _Result | None = None


_decode = msgspec.json.Decoder(_Frame).decode
_encode = msgspec.json.Encoder().encode


class Session:
    """An open one. Left by `open_session`; its process runs on then."""

    def __init__(self, connection: ClientConnection, heartbeat: float) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        self._waiting: deque[tuple[Stream, bytes]] = deque()
        self._frames, self._to_write = trio.open_memory_channel[bytes](0)
        self._sent = 0
        self._received = 0
        self._receiving = False
        self._ended = False
        self.code: int | None = None
        """The exit code, if its frame has come."""

    async def receive(self) -> tuple[Stream, bytes] | None:
        """The next output; None when the process has ended. Raises ConnectionLost, AllocationGone and the like."""
        while not self._waiting:
            if self.code is not None:
                return None
            self._take(await self._message())
        return self._waiting.popleft()

    async def _message(self) -> bytes:
        self._receiving = True
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as closed:
            raise explained(closed) from None
        finally:
            self._receiving = False
            self._received += 1

    def _take(self, message: bytes) -> None:
        try:
            frame = _decode(message)
        except msgspec.MsgspecError as error:
            raise ConnectionLost("Nomad sent a frame that can't be understood") from error
        for stream, part in ((Stream.STDOUT, frame.stdout), (Stream.STDERR, frame.stderr)):
            if part is not None and part.data:
                self._waiting.append((stream, part.data))
        if frame.exited:
            self.code = frame.result.exit_code if frame.result else 0

    async def send(self, data: bytes) -> None:
        """Write to the process's stdin, waiting while it is full; dropped if nobody reads any more."""
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            self._sent += len(piece)
            await self._put(_encode({"stdin": {"data": piece}}))

    async def send_now(self, data: bytes) -> None:
        """Write a last few bytes: what waits to be sent is overtaken, and the connection is of no use afterwards."""
        with suppress(ConnectionClosed):
            await self._connection.send(_encode({"stdin": {"data": data}}), text=True)

    async def close_stdin(self) -> None:
        """Never with a terminal: Docker gives up stdout then. Never in one message with data: Docker drops that."""
        await self._put(_encode({"stdin": {"close": True}}))

    async def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size."""
        await self._put(_encode({"tty_size": {"height": rows, "width": columns}}))

    async def _put(self, frame: bytes) -> None:
        with suppress(trio.BrokenResourceError):
            await self._frames.send(frame)

    async def write(self) -> None:
        """Send what is to be sent. Only this does: a cancelled sender must not leave half a frame behind."""
        async with self._to_write:
            with suppress(ConnectionClosed):
                async for frame in self._to_write:
                    await self._connection.send(frame, text=True)

    async def beat(self) -> None:
        """Keep the connection busy, and end it when the other end is dead."""
        pong, pong_sent, answered_sent, missed = None, 0, 0, 0
        with suppress(ConnectionClosed):
            while missed < MISSED_MOST:
                received = self._received
                await trio.sleep(self._heartbeat)
                with suppress(trio.WouldBlock, trio.BrokenResourceError):
                    self._frames.send_nowait(b"{}")
                if pong is None or pong.is_set():
                    answered_sent, pong_sent, missed = pong_sent, self._sent, 0
                    pong = await self._connection.ping()
                elif self._receiving and received == self._received and pong_sent in (answered_sent, *HARMLESS):
                    missed += 1  # input that isn't read may block the answer, and so may output
                else:
                    missed = 0
            await trio.aclose_forcefully(self._connection.stream)


@asynccontextmanager
async def open_session(
    target: ExecTarget, address: str, allocation: Allocation, words: tuple[str, ...], *, tty: bool
) -> AsyncIterator[Session]:
    """Begin to run *words*. Raises Unconnected, ExecutorUnreachable; what Nomad refuses comes by `receive`."""
    within = target.connect_timeout if address == target.url else target.direct_timeout
    async with _connected(target, address + target.path(allocation, words, tty=tty), within) as connection:
        session = Session(connection, target.heartbeat)
        async with tasks() as nursery:
            nursery.start_soon(session.write)
            nursery.start_soon(session.beat)
            yield session


@asynccontextmanager
async def _connected(target: ExecTarget, url: str, within: float) -> AsyncIterator[ClientConnection]:
    connecting = connect(
        "ws" + url.removeprefix("http"),
        stream=await _dialled(url, within),
        ssl=_context(target, url),
        compression=None,
        additional_headers=dict(target.headers),
        user_agent_header=None,
        proxy=None,
        open_timeout=within,
        ping_interval=None,  # it would take a slow reader for a dead connection
        close_timeout=CLOSE_WITHIN,
        max_size=LARGEST_FRAME,
        max_queue=QUEUE,
        logger=log,
        create_connection=DuplexConnection,
    )
    try:
        connection = await connecting.__aenter__()
    except InvalidStatus as error:
        raise _answered(error.response.status_code, error.response.body) from None
    except (OSError, InvalidHandshake, InvalidURI, EOFError) as error:
        raise Unconnected(f"Nomad can't be reached for executions: {_cause(error)}") from None
    raised: Exception | None = None
    try:
        yield connection
    except Exception as error:  # noqa: BLE001 - it comes out below, as it is and not in a group
        raised = error
    finally:
        await connecting.__aexit__(None, None, None)  # noqa: ASYNC102 - bounded; a scope can't enclose its nursery's end
    if raised:
        raise raised


async def _dialled(url: str, within: float) -> trio.abc.Stream:
    parts = urlsplit(url)
    try:
        with trio.fail_after(within):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            return _Listening(await trio.open_tcp_stream(parts.hostname or "", port))
    except (OSError, ValueError, trio.TooSlowError) as error:
        raise Unconnected(f"Nomad can't be reached for executions: {_cause(error)}") from None


class _Listening(trio.abc.HalfCloseableStream):
    """Goes on listening when the other end has stopped to: its last words are the exit code.

    Nomad closes at once after an exit, whatever is on its way to it; by itself, websockets then drops what came.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _context(target: ExecTarget, url: str) -> SSLContext | None:
    return target.tls if url.startswith("https") else None


def _answered(status: int, body: bytes | bytearray | None) -> ExecutorError:
    said = bytes(body or b"").decode("utf-8", "replace").strip()[:200]
    if any(text in said for text in GONE):
        return AllocationGone(f"Nomad refused the execution: {said}")
    return ExecutorUnreachable(f"Nomad answered an execution with status {status}: {said}")


def _cause(error: BaseException) -> str:
    """What happened, without what was sent."""
    if isinstance(error, TimeoutError | trio.TooSlowError):
        return "it didn't answer in time"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "the connection was closed" if isinstance(error, EOFError) else type(error).__name__


def explained(closed: ConnectionClosed) -> ExecutorError:
    """What an end of the connection means that comes without an exit code."""
    if closed.rcvd is None:
        return ConnectionLost("the connection to Nomad was lost before the exit code came")
    reason = closed.rcvd.reason
    if any(text in reason for text in GONE):
        return AllocationGone(f"Nomad refused the execution: {reason}")
    if any(text in reason for text in REFUSED):
        return ExecutorUnreachable(f"Nomad refused the token: {reason}")
    if "No path to" in reason:
        return ExecutorUnreachable(f"Nomad can't reach the node: {reason}")
    if "failed to start command" in reason or "task not found" in reason:
        return ExecutorError(f"Nomad can't run commands in the allocation: {reason}")
    return ConnectionLost(f"Nomad ended the execution without an exit code ({closed.rcvd.code} {reason})".rstrip())


@asynccontextmanager
async def tasks() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that never fail, cancelled in the end: what its body raises comes out as it is."""
    raised: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:  # noqa: BLE001 - it comes out below, as it is and not in a group
            raised = error
        nursery.cancel_scope.cancel()
    if raised:
        raise raised

"""The WebSocket of one execution, with our terminal at the other end.

Frames of `poseidon.terminal.v1`: what we type goes in binary ones, control in text ones.
"""

from contextlib import suppress
from dataclasses import dataclass

import msgspec
import trio
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.trio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from poseidon.cli import wire
from poseidon.cli.escape import Escape
from poseidon.cli.failures import BROKEN_PIPE, INTERRUPTED, RUN_FAILED, TIME_LIMIT, CommandFailed
from poseidon.cli.target import Target, authorities
from poseidon.cli.terminal import STDERR, STDOUT, Terminal
from poseidon.cli.timings import Timings
from poseidon.duplex import DuplexConnection, quiet

PROTOCOL = Subprotocol("poseidon.terminal.v1")
LARGEST = 64 * 1024 * 1024
"""Bytes of one message."""
BACKLOG = 64
"""Control messages that may wait while the daemon takes no input; a key held down makes many."""
CLOSING = 2
"""Seconds that the daemon has to close after its final message."""
LEAVING = 0.5
"""Seconds for our own good-bye; websockets would wait for ever if output that nobody wants is still unread."""
OUT_OF_MEMORY = "the allocation was OOM Killed"
KILLED = 137


@dataclass(frozen=True, slots=True)
class Ending:
    """Our exit code, and what to tell the person beside it."""

    code: int
    message: str = ""


class Conversation:
    """What the program and the person say to each other."""

    def __init__(self, terminal: Terminal, timings: Timings) -> None:
        self._terminal, self._timings = terminal, timings
        self._controls, self._queued = trio.open_memory_channel[bytes](BACKLOG)
        self._interrupted = False
        self._answered = False

    def resize(self) -> None:
        """Our window has another size now."""
        if self._terminal.interactive:
            rows, columns = self._terminal.size
            self._control({"type": "resize", "rows": rows, "columns": columns})

    def interrupt(self) -> bool:
        """Pass Ctrl-C on to the program; False if that has been tried before."""
        if self._interrupted:
            return False
        self._interrupted = True
        self._control({"type": "signal", "signal": "INT"})
        return True

    async def hold(self, url: str, target: Target) -> Ending:
        """Talk until the program ends, or one side leaves."""
        try:
            return await self._connected(url, target)
        except InvalidStatus as error:
            status = error.response.status_code
            raise CommandFailed(f"the execution's WebSocket was answered with {status}") from error
        except (OSError, WebSocketException, ValueError) as error:
            raise CommandFailed(f"can't connect to the execution at {url}: {error!s}") from error

    async def _connected(self, url: str, target: Target) -> Ending:
        ending = Ending(RUN_FAILED, "the connection could not be closed")
        with trio.CancelScope() as leaving:
            async with connection(url, target) as socket:
                try:
                    ending = await self._meet(socket)  # turns all that may happen from here on into an ending
                finally:
                    leaving.deadline = trio.current_time() + LEAVING
        return ending

    async def _meet(self, socket: ClientConnection) -> Ending:
        if socket.subprotocol != PROTOCOL:
            return Ending(RUN_FAILED, f"the daemon doesn't speak {PROTOCOL}: it is too old for this program")
        self._timings.lap("connect")
        with self._terminal.raw():
            self.resize()
            return await self._talk(socket)

    def _control(self, message: dict[str, object]) -> None:
        with suppress(trio.WouldBlock):
            self._controls.send_nowait(msgspec.json.encode(message))

    async def _talk(self, socket: ClientConnection) -> Ending:
        endings: list[Ending] = []
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                endings.append(await self._listen(socket))
                nursery.cancel_scope.cancel()

            async def speak() -> None:
                if await self._speak(socket):
                    endings.append(Ending(INTERRUPTED, "left by the escape ~."))
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            nursery.start_soon(speak)
            nursery.start_soon(self._send_controls, socket)
        return endings[0]

    async def _send_controls(self, socket: ClientConnection) -> None:
        with suppress(ConnectionClosed):  # the listener tells
            async for message in self._queued:
                await socket.send(message.decode())

    async def _speak(self, socket: ClientConnection) -> bool:
        """Send what is typed or piped in; whether the person wants out."""
        escape = Escape() if self._terminal.interactive else None
        with suppress(ConnectionClosed):
            while typed := await self._terminal.read():
                passed = escape.feed(typed) if escape else typed
                if passed:
                    await socket.send(passed)
                if escape and escape.quit:
                    return True
            self._control({"type": "eof"})
        return False

    async def _listen(self, socket: ClientConnection) -> Ending:
        """Show what the program writes, until the final message."""
        try:
            with suppress(ConnectionClosed):
                while True:
                    ending = await self._hear(understand(await socket.recv()))
                    if ending:
                        await closed(socket)
                        return ending
        except BrokenPipeError:
            return Ending(BROKEN_PIPE)  # nobody wants to read on, which is no news to anybody
        except OSError as error:
            return Ending(RUN_FAILED, f"can't write the program's output: {error.strerror}")
        return Ending(RUN_FAILED, f"the connection ended before the program did{reason(socket)}")

    async def _hear(self, message: wire.Message) -> Ending | None:
        match message:
            case wire.Message("stdout", str(text)):
                await self._show(STDOUT, text)
            case wire.Message("stderr", str(text)):
                await self._show(STDERR, text)
            case wire.Message("start"):
                pass
            case _:
                self._timings.lap("program")
                return final(message)
        return None

    async def _show(self, descriptor: int, text: str) -> None:
        if not self._answered:
            self._answered = True
            self._timings.lap("first output")
        await self._terminal.write(descriptor, text)


def final(message: wire.Message) -> Ending:
    """What a final message means for us."""
    match message:
        case wire.Message("exit", int(code)) if 0 <= code <= 255:
            return Ending(code)
        case wire.Message("timeout"):
            return Ending(TIME_LIMIT, "the time limit is over")
        case wire.Message("error", str(text)) if text == OUT_OF_MEMORY:
            return Ending(KILLED, "the program was killed: out of memory")
        case wire.Message("error", str(text)):
            return Ending(RUN_FAILED, text or "the execution failed")
        case _:
            return Ending(RUN_FAILED, f"the daemon sent what we don't understand: {message}")


def understand(raw: str | bytes) -> wire.Message:
    """One message; what isn't one ends the run."""
    try:
        return msgspec.json.decode(raw, type=wire.Message)
    except (msgspec.MsgspecError, UnicodeError) as error:
        return wire.Message("error", f"the daemon sent what we don't understand: {error}")


def reason(socket: ClientConnection) -> str:
    """Why the daemon closed, as far as it said."""
    said = socket.close_reason
    return f" (code {socket.close_code}{': ' + said if said else ''})" if socket.close_code else ""


async def closed(socket: ClientConnection) -> None:
    """Let the daemon close first: all is said."""
    with trio.move_on_after(CLOSING), suppress(ConnectionClosed):
        while True:
            await socket.recv()


def connection(url: str, target: Target) -> connect:
    """How to connect. No pings: while Ctrl-S holds the output, their answers would be stuck behind it."""
    return connect(
        url,
        subprotocols=[PROTOCOL],
        additional_headers={"Poseidon-Token": target.token} if target.token else None,
        ssl=authorities(target) if url.startswith("wss:") else None,
        compression=None,
        proxy=None,
        ping_interval=None,
        open_timeout=10,
        close_timeout=1,
        max_size=LARGEST,
        create_connection=DuplexConnection,
        logger=quiet(),
    )

"""Nomad's exec endpoint as a small real WebSocket server that really runs the commands.

    async with open_boxes() as boxes, open_exec_server(boxes) as server:
        box = await boxes.open("docker", folder)      # or "raw_exec"; an allocation
        server.behaviour = Behaviour(lose_exit=0.024)
        ExecTarget(server.url) …  Allocation(box.id, …)

How sessions of the two drivers differ is recorded: who must close stdin, the sizes of frames, late exits and lost ones,
what a close does to a terminal.

For a server of your own: read the HTTP head of the request, then `await serve_exec(stream, head, boxes.find, …)`.
"""

import json
import random
import shutil
import socket
import struct
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qs, urlsplit

import trio
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State
from websockets.utils import accept_key

from tests.fakes.nomad_exec_boxes import Box, Boxes, Command, Refused, open_boxes

__all__ = ["Behaviour", "Box", "Boxes", "Head", "Refused", "open_boxes", "open_exec_server", "serve_exec"]


@dataclass(slots=True)
class Behaviour:
    """What sessions do beside running their commands. Durations in seconds."""

    answer_delay: float = 0.0
    """Until the request is answered; whoever has left meanwhile shows only afterwards."""
    start_delay: float = 0.0
    """Until the command is begun (Docker); a size that is told before is lost."""
    late_exit: float = 0.05
    """Docker."""
    hold_limit: float = 2.0
    """Docker: how long the output is awaited that is held by what the command left behind."""
    lose_exit: float = 0.0
    """Docker, stdin left open: a share of sessions that end without an exit code; 0.024 was recorded."""
    lose_close: float = 0.0
    """A share of sessions that end by TCP alone after the exit code."""
    begin_late: int = 0
    """Docker, Nomad 2.0: so many sessions are told to have ended, with code 0, before their command is begun."""
    mute_after: int = -1
    """Docker, Nomad 2.0: bytes of output of which the rest is lost, though the exit code comes."""
    refuse: tuple[int, str] | None = None
    """Close code and reason instead of running anything."""
    reset: bool = False
    """The connection is reset instead of being answered: too many of one client."""
    cut: str = ""
    """eof, rst, or a close code and reason ("1011 failed to …"); together with *cut_after*."""
    cut_after: int = -1
    """Bytes of output after which the connection is cut."""
    garbage_after: int = -1
    """Bytes of output after which something comes that is no JSON."""
    silent_after: float = -1
    """Seconds after which nothing at all is answered any more, pings included."""
    hush: trio.Event = field(default_factory=trio.Event)
    """The same, from when it is set."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an HTTP request; names of headers in lower case."""

    target: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    def option(self, name: str) -> str:
        return parse_qs(urlsplit(self.target).query).get(name, [""])[0]

    @property
    def words(self) -> list[str]:
        return json.loads(self.option("command"))  # type: ignore[no-any-return]

    @property
    def tty(self) -> bool:
        return self.option("tty") == "true"


class Wire:
    """A WebSocket's frames on a stream, after the handshake."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._protocol = Protocol(Side.SERVER, state=State.OPEN, max_size=None)
        self._lock = trio.Lock()
        self._waiting: deque[bytes | None] = deque()
        self.silent = False

    async def flush(self) -> None:
        """Nobody cares whether the client is still there; its absence shows when reading."""
        async with self._lock:
            # Busy: the agent has died, and somebody else sends the farewell.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                for data in self._protocol.data_to_send():
                    if data and not self.silent:
                        await self._stream.send_all(data)

    async def send(self, message: object) -> None:
        await self.send_text(json.dumps(message, separators=(",", ":")).encode())

    async def send_text(self, data: bytes) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_text(data)
            await self.flush()

    async def close(self, code: int, reason: str = "") -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
            await self.flush()

    async def receive(self) -> bytes | None:
        """The next message; None when the client is gone, one way or another."""
        while not self._waiting:
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            if self.silent:
                continue
            self._protocol.receive_data(data)
            await self.flush()
            for frame in self._protocol.events_received():
                assert isinstance(frame, Frame)
                if frame.opcode is Opcode.CLOSE:
                    self._waiting.append(None)
                elif frame.opcode in (Opcode.TEXT, Opcode.BINARY):
                    self._waiting.append(bytes(frame.data))
        return self._waiting.popleft()

    async def cut(self, how: str) -> None:
        """eof, rst, or a close code with its reason."""
        if how[:1].isdigit():
            code, _, reason = how.partition(" ")
            await self.close(int(code), reason)
        if how == "rst":
            reset(self._stream)
        await self._stream.aclose()


def reset(stream: trio.abc.Stream) -> None:
    """Let the closing of *stream* be a RST."""
    assert isinstance(stream, trio.SocketStream)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Session:
    def __init__(self, wire: Wire, behaviour: Behaviour, box: Box, head: Head) -> None:
        self._wire, self._behaviour, self._box, self._head = wire, behaviour, box, head
        self._docker = box.driver == "docker"
        self._tty = head.tty
        self._command: Command | None = None
        self._stdin_ended = trio.Event()
        self._detached = False
        self._told = 0
        self._pieces, self._to_stdin = trio.open_memory_channel[bytes | None](16)

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._perform, nursery.cancel_scope)
            while (message := await self._wire.receive()) is not None:
                await self._hear(message)
            nursery.cancel_scope.cancel()
        if self._command:
            self._command.sink = None

    async def _perform(self, scope: trio.CancelScope) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fall_silent)
            if await self._begin():
                nursery.start_soon(self._feed)
                await self._end()
            nursery.cancel_scope.cancel()
        scope.cancel()

    async def _fall_silent(self) -> None:
        with trio.move_on_after(self._behaviour.silent_after if self._behaviour.silent_after >= 0 else float("inf")):
            await self._behaviour.hush.wait()
        self._wire.silent = True

    async def _begin(self) -> bool:
        words = self._head.words
        if self._docker:
            await trio.sleep(self._behaviour.start_delay)
        if not self._box.running:  # it has ended meanwhile
            await self._wire.close(1008, f'task "{self._box.task}" is not running.')
            return False
        if not shutil.which(words[0]):
            return await self._not_found(words[0])
        self._command = self._box.run(words, tty=self._tty)
        if self._behaviour.begin_late:
            self._behaviour.begin_late -= 1
            await self._command.close_stdin()
            await self._farewell(0)
            return False
        self._command.sink = self._tell
        return True

    async def _not_found(self, name: str) -> bool:
        if not self._docker:
            reason = (
                f"rpc error: code = Unknown desc = failed to start command: fork/exec {name}: no such file or directory"
            )
            await self._wire.close(1011, reason[:120])
            return False
        text = f'OCI runtime exec failed: exec failed: unable to start container process: exec: "{name}": '
        text += "executable file not found in $PATH: unknown\r\n"
        await self._tell("stdout", text.encode())
        await self._farewell(126)
        return False

    async def _tell(self, name: str, data: bytes) -> None:
        behaviour = self._behaviour
        if self._detached:
            return
        await self._wire.send({name: {"data": b64encode(data).decode()}})
        self._told += len(data)
        if 0 <= behaviour.garbage_after < self._told:
            await self._wire.send_text(b"{garbage")
        if 0 <= behaviour.mute_after < self._told:
            self._detached = True
        if behaviour.cut and 0 <= behaviour.cut_after < self._told:
            self._detached = True
            await self._wire.cut(behaviour.cut)

    async def _hear(self, message: bytes) -> None:
        try:
            frame = json.loads(message)
        except ValueError:
            return
        stdin, size = frame.get("stdin"), frame.get("tty_size")
        if size and self._command:
            self._command.resize(size["height"], size["width"])
        if not stdin:
            return
        closes = stdin.get("close", False)
        if stdin.get("data") and not (closes and self._docker):
            if self._command and self._command.ended.is_set():
                self._stdin_ended.set()  # raw_exec notices the end by that, too
            await self._pieces.send(b64decode(stdin["data"]))
        if closes:
            await self._pieces.send(None)

    async def _feed(self) -> None:
        assert self._command
        async for piece in self._to_stdin:
            if piece is not None:
                await self._command.write(piece)
            elif self._docker and self._tty:
                self._detached = True
                with trio.move_on_after(3):
                    await self._command.ended.wait()
                    continue
                await self._wire.close(1011, "failed to retrieve exec result")
            else:
                self._stdin_ended.set()
                await self._command.close_stdin()

    async def _end(self) -> None:
        command = self._command
        assert command
        await command.ended.wait()
        with trio.move_on_after(self._behaviour.hold_limit if self._docker else float("inf")):
            if self._tty:
                await command.run_dry()  # what is held by others isn't awaited
            else:
                await command.all_drained()
        if not self._docker and not self._tty:
            await self._stdin_ended.wait()
        lost = self._docker and not self._stdin_ended.is_set()
        if lost and self._behaviour.chance.random() < self._behaviour.lose_exit:
            await self._wire.close(1000)
            return
        if self._docker:
            await trio.sleep(self._behaviour.late_exit)
        command.sink = None
        await self._farewell(command.code)

    async def _farewell(self, code: int) -> None:
        for name in ("stdout",) if self._tty and not self._docker else ("stderr", "stdout"):
            await self._wire.send({name: {"close": True}})
        await self._wire.send({"exited": True, "result": {"exit_code": code} if code else {}})
        if self._behaviour.chance.random() >= self._behaviour.lose_close:
            await self._wire.close(1000)


async def serve_exec(
    stream: trio.abc.Stream, head: Head, find: Callable[[str, str], Box], behaviour: Behaviour
) -> None:
    """Answer one request for an execution, to its end. Closes *stream*."""
    async with stream:
        if behaviour.reset:
            reset(stream)
            return
        try:
            assert head.option("tty") in ("true", "false") and isinstance(head.words, list)
        except (ValueError, AssertionError):
            await stream.send_all(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 11\r\n\r\nbad command")
            return
        await trio.sleep(behaviour.answer_delay)
        try:
            await stream.send_all(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + accept_key(head.headers["sec-websocket-key"]).encode() + b"\r\n\r\n"
            )
        except trio.BusyResourceError:  # the agent dies in this very moment, and its farewell is being sent
            return
        wire = Wire(stream)
        try:
            box = find(head.path.split("/")[4], head.option("task"))
            if behaviour.refuse:
                raise Refused(*behaviour.refuse)
            if not head.words:
                raise Refused(1008, "command is not present")
        except Refused as refused:
            await wire.close(refused.code, refused.reason)
            return
        await _Session(wire, behaviour, box, head).serve()


# A server of its own


class ExecServer:
    """*decide* may give each request a behaviour of its own."""

    def __init__(self, boxes: Boxes, token: str) -> None:
        self.url = ""
        self.boxes, self.token = boxes, token
        self.behaviour = Behaviour()
        self.decide: Callable[[Head], Behaviour] = lambda _: self.behaviour
        self.requests: list[Head] = []
        self.open = 0
        self.most_open = 0

    async def answer(self, stream: trio.abc.Stream) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = await read_head(stream)
            if head is None:
                return
            self.requests.append(head)
            behaviour = self.decide(head)
            if self.token and head.headers.get("x-nomad-token") != self.token:
                behaviour = Behaviour(refuse=(1011, "ACL token not found"))
            await serve_exec(stream, head, self.boxes.find, behaviour)
        finally:
            self.open -= 1
            await trio.aclose_forcefully(stream)


async def read_head(stream: trio.abc.Stream) -> Head | None:
    """None if the client leaves before."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            more = await stream.receive_some()
        except trio.BrokenResourceError:
            return None
        if not more:
            return None
        data += more
    first, *lines = data.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Head(first.split(" ")[1], headers)


@asynccontextmanager
async def open_exec_server(boxes: Boxes, *, token: str = "") -> AsyncIterator[ExecServer]:
    """On a port of 127.0.0.1."""
    server = ExecServer(boxes, token)
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, server.answer, 0, host="127.0.0.1"))
        server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        yield server
        nursery.cancel_scope.cancel()

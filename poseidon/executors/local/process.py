"""One command in a sandbox: its streams, its end, its being killed."""

import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EAGAIN, EIO, EPIPE

import trio

from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError
from poseidon.executors.base import Exit, Stream
from poseidon.executors.local import wire
from poseidon.executors.local.limits import Execution

CHUNK = 65536
KILL_PATIENCE = 4.0
GONE_PATIENCE = 1.0
SIGKILL_CODE = 137


class Output:
    """The two output streams as one sequence of chunks. What isn't read stays in the pipes: nothing piles up here."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self._streams = {stdout: Stream.STDOUT, stderr: Stream.STDERR}
        self._ready = select.epoll()
        for descriptor in self._streams:
            self._ready.register(descriptor, select.EPOLLIN)
        self._turn: list[int] = []

    async def next(self) -> tuple[Stream, bytes] | None:
        """The next chunk, None when both streams have ended."""
        await trio.lowlevel.checkpoint()
        while self._streams:
            if not self._turn:
                self._turn = [descriptor for descriptor, _ in self._ready.poll(0)]
            if not self._turn:
                await trio.lowlevel.wait_readable(self._ready.fileno())
                continue
            descriptor = self._turn.pop()
            data = self._read(descriptor)
            if data:
                return self._streams[descriptor], data
            if data is not None:
                self._ready.unregister(descriptor)
                del self._streams[descriptor]
        return None

    def _read(self, descriptor: int) -> bytes | None:
        """None: nothing there now; empty: the end, of which a terminal tells by an error."""
        try:
            return os.read(descriptor, CHUNK)
        except OSError as error:
            if error.errno == EAGAIN:
                return None
            if error.errno == EIO:
                return b""
            raise

    def close(self) -> None:
        """Forget what hasn't been read."""
        trio.lowlevel.notify_closing(self._ready.fileno())
        self._ready.close()
        self._streams.clear()


class Input:
    """Standard input: a pipe or the master of a terminal."""

    def __init__(self, descriptor: int, *, terminal: bool) -> None:
        self._descriptor = descriptor
        self._terminal = terminal
        self._lock = trio.Lock()
        self._scope = trio.CancelScope()
        self._line_begun = False
        self._ended = False

    async def send(self, data: bytes) -> None:
        """Write all of it, unless the end comes first."""
        await trio.lowlevel.checkpoint()
        async with self._lock:
            self._scope = trio.CancelScope()
            with self._scope:
                await self._write(data)

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._ended:
            try:
                done = os.write(self._descriptor, view)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._descriptor)
            except OSError as error:
                if error.errno not in (EPIPE, EIO):
                    raise
                return
            else:
                self._line_begun = view[done - 1] != ord("\n")
                view = view[done:]

    async def close(self) -> None:
        """End of file: with a terminal by its own character, twice if a line is unfinished (once only ends that)."""
        await trio.lowlevel.checkpoint()
        if self._ended:
            return
        if self._terminal:
            with suppress(termios.error):
                character = termios.tcgetattr(self._descriptor)[6][termios.VEOF]
                await self.send(bytes(character) * (2 if self._line_begun else 1))
        else:
            async with self._lock:
                self.end()

    def end(self) -> None:
        """Drop what still waits and all that comes; close the descriptor if it is ours alone."""
        if self._ended:
            return
        self._ended = True
        self._scope.cancel()
        if not self._terminal:
            trio.lowlevel.notify_closing(self._descriptor)
            os.close(self._descriptor)


class LocalProcess:
    """A running command; what the port promises of it."""

    def __init__(
        self,
        channel: wire.Channel,
        streams: Sequence[int],
        *,
        terminal: bool,
        group: Execution | None,
        out_of_memory: Callable[[], bool],
        sandbox_gone: trio.Event,
    ) -> None:
        self._channel = channel
        self._streams = tuple(streams)
        stdin, stdout, stderr = streams
        self._input = Input(stdin, terminal=terminal)
        self._output = Output(stdout, stderr)
        self._master = stdin if terminal else -1
        self._group = group
        self._out_of_memory = out_of_memory
        self._sandbox_gone = sandbox_gone
        self._exit: Exit | None = None
        self._exited = trio.Event()
        self._killed = trio.Event()
        self._kill_certain: bool | None = None
        """What the helper answered."""
        self._listening = trio.CancelScope()

    async def listen(self) -> None:
        """Take in what the helper tells; runs beside, until the connection ends."""
        with self._listening, suppress(ConnectionLost, trio.ClosedResourceError):
            while True:
                match await self._channel.receive():
                    case [b"exited", code] if code.isdigit() and len(code) <= 3 and int(code) <= 255:
                        self._end(int(code))
                    case [b"killed", certain]:
                        self._kill_certain = certain == b"1"
                        self._killed.set()
                    case _:
                        break
        self._exited.set()
        self._killed.set()
        self._input.end()

    def _end(self, code: int) -> None:
        self._exit = Exit(code, out_of_memory=code == SIGKILL_CODE and self._out_of_memory())
        self._exited.set()
        self._input.end()

    async def send(self, data: bytes) -> None:
        """See Process."""
        await self._input.send(data)

    async def close_stdin(self) -> None:
        """See Process."""
        await self._input.close()

    async def resize(self, rows: int, columns: int) -> None:
        """See Process."""
        await trio.lowlevel.checkpoint()
        if self._master >= 0 and rows > 0 and columns > 0:
            size = struct.pack("HHHH", min(rows, 65535), min(columns, 65535), 0, 0)
            with suppress(OSError):
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    async def signal(self, number: int) -> None:
        """See Process."""
        await trio.lowlevel.checkpoint()
        if not self._exited.is_set():
            with suppress(ConnectionLost):
                await self._channel.send(b"signal", b"%d" % number)

    async def receive(self) -> tuple[Stream, bytes] | None:
        """See Process."""
        return await self._output.next()

    async def wait(self) -> Exit:
        """See Process."""
        await self._exited.wait()
        if self._exit is not None:
            return self._exit
        if await self._is_sandbox_gone():
            raise AllocationGone("the sandbox ended while a command ran in it")
        raise ConnectionLost("the connection to the sandbox's helper was lost")

    async def _is_sandbox_gone(self) -> bool:
        """After the connection has ended: so has the sandbox. The connection's end is seen first."""
        with trio.move_on_after(GONE_PATIENCE):
            await self._sandbox_gone.wait()
        return self._sandbox_gone.is_set()

    async def kill(self) -> bool:
        """See Process."""
        with trio.move_on_after(KILL_PATIENCE):
            with suppress(ConnectionLost, trio.ClosedResourceError):
                await self._channel.send(b"kill")
                await self._killed.wait()
            if self._kill_certain is None:
                return await self._is_sandbox_gone()
            if self._kill_certain and self._group:
                await self._group.emptied()  # the helper's word alone is none
            return self._kill_certain
        return False

    def close(self) -> None:
        """End the connection, and with it the command."""
        self._listening.cancel()
        self._input.end()
        self._output.close()
        self._channel.close()
        for descriptor in set(self._streams[1:]):
            os.close(descriptor)


def open_host_terminal() -> tuple[int, int]:
    """Master and slave of a terminal of this machine, for when a runner has used up those that runners may have."""
    try:
        master, slave = pty.openpty()
    except OSError as error:
        raise ExecutorError(f"this machine has no terminal left: {error.strerror}") from error
    os.set_inheritable(master, False)
    os.set_inheritable(slave, False)
    os.set_blocking(master, False)
    return master, slave

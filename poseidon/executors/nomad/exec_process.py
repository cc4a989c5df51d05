"""A command in an allocation, as the port promises it: what its sessions say, put together.

Two sessions with a terminal (the second for stderr), one without. Each begins with a script of `wrap`, which says that
it is ready, and does nothing until it is told the nonce. So what fails before that has run nothing.
"""

import secrets
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation
from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError, ExecutorUnreachable, LeftRunning
from poseidon.executors.base import Exit, Stream
from poseidon.executors.nomad import wrap
from poseidon.executors.nomad.exec_marks import READY, Mark, Marks
from poseidon.executors.nomad.exec_output import Output
from poseidon.executors.nomad.exec_session import Session, open_session
from poseidon.executors.nomad.exec_side import Side, ask
from poseidon.executors.nomad.exec_target import ExecTarget

KILL_WITHIN = 4.5
KILLED_WITHIN = 0.2
"""Seconds in which a killed command's exit code may still come by itself."""
BOTH_WITHIN = 0.5
"""Seconds in which both sessions end if their allocation does."""
FAREWELL_WITHIN = 3.0
"""Seconds for telling scripts that wait that nothing comes; else they give up after a minute.

A node that is busy is slow to begin them. Those who wait for us meanwhile are told of the end before.
"""
STARTED_WITHIN = 10.0
SIGKILL_CODE = 137
DEATHS = (129, SIGKILL_CODE)
"""How the wrapper may end without telling the command's code; of all other signals it takes no notice."""
END_OF_FILE = b"\x04"
QUIT = b"\x1c"


class NeverBegan(ExecutorUnreachable):
    """Nothing has run, so it may be tried again. Nomad 2.0 takes what Docker hasn't begun yet for ended, as code 0."""


class NomadProcess:
    """See Process."""

    def __init__(self, target: ExecTarget, allocation: Allocation, command: Command) -> None:
        self._target, self._allocation = target, allocation
        self._tty = command.tty
        self._nonce = str(secrets.randbits(128)).encode()
        self._fifo = f"/tmp/poseidon-{secrets.token_hex(8)}.fifo" if command.tty else ""  # noqa: S108 - as the original
        self._words = wrap.run_words(command, set_user=target.set_user, mark=target.mark(), fifo=self._fifo)
        target.path(allocation, self._words, tty=command.tty)
        self._size = (command.rows, command.columns)
        self._streams = {Stream.STDOUT} if command.tty else set(Stream)
        """Those of the main session."""
        self._address = target.url
        self._main, self._side = Side(), Side()
        self._output = Output()
        self._running: wrap.Running | None = None
        self._told: Exit | None = None
        """As the wrapper told it; it counts once both streams are complete."""
        self._exit: Exit | None = None
        self._failure: ExecutorError | None = None
        self._over = trio.Event()
        """The main process has ended, or will never be known to have."""
        self._begun: set[Stream] = set()
        """Streams of the main session on which the command may have written."""
        self._said_all: set[Stream] = set()
        """Streams on which the main process has written all it will."""
        self._alone = False
        """It has left nobody behind who could still write."""
        self._line_begun = self._stdin_closed = False

    # Beginning and end

    async def start(self, nursery: trio.Nursery, address: str) -> None:
        """Begin to run. Raises AllocationGone, ExecutorUnreachable, ConnectionLost, LeftRunning, ExecutorError."""
        self._address, self._nursery = address, nursery
        sides = [self._main, self._side] if self._tty else [self._main]
        nursery.start_soon(self._held_open, self._main, self._serve_main)
        if self._tty:
            nursery.start_soon(self._held_open, self._side, self._serve_stderr)
        try:
            with trio.move_on_after(self._target.start_timeout):
                for side in sides:
                    await side.ready.wait()
            self._raise_unless(all(side.ready.is_set() for side in sides))
        except BaseException:
            with trio.move_on_after(FAREWELL_WITHIN, shield=True):
                await self._dismiss(sides)
            raise
        with trio.CancelScope(shield=True):  # from here on it may run, and somebody has to see to it
            await self._tell_nonce()

    async def _dismiss(self, sides: list[Side]) -> None:
        async with trio.open_nursery() as nursery:
            for side in sides:
                nursery.start_soon(partial(side.dismiss, tty=self._tty and side is self._main))

    async def _tell_nonce(self) -> None:
        with trio.move_on_after(STARTED_WITHIN):
            await self._main.tell(self._nonce)
            await self._main.started.wait()
            if self._tty:
                await self._side.tell(self._nonce)
                await self._end_input(self._side)
                await self._resize()
        well = self._main.started.is_set() and not self._failure
        if not well and not await self.kill():
            raise LeftRunning("a command that was lost while it began may run on")
        self._raise_unless(well)

    @staticmethod
    async def _held_open(side: Side, serve: Callable[[], Awaitable[None]]) -> None:
        with side.scope:
            await serve()
        side.end()

    def leave(self) -> None:
        """Close the connections."""
        self._main.scope.cancel()
        self._side.scope.cancel()

    def _raise_unless(self, well: bool) -> None:
        if self._failure:
            raise self._failure
        if not well:
            raise ExecutorUnreachable("the command didn't begin in time")

    @staticmethod
    def _not_started(side: Side, session: Session) -> ExecutorError:
        if not side.said and not session.code:
            return NeverBegan("Nomad says that the command has ended, but it didn't begin")
        said = side.said.decode("utf-8", "replace").strip()
        return ExecutorError(f"the allocation can't run commands: {said or 'bash failed'}")

    # What comes

    async def _serve_main(self) -> None:
        try:
            async with open_session(
                self._target, self._address, self._allocation, self._words, tty=self._tty
            ) as session:
                self._main.open(session)
                await self._resize()
                await self._listen_main(session)
        except ExecutorError as error:
            self._lost(error)
        self._output.end(*([Stream.STDOUT] if self._tty else Stream))

    async def _listen_main(self, session: Session) -> None:
        marks = {Stream.STDOUT: Marks(READY), Stream.STDERR: Marks(self._nonce)}
        while piece := await session.receive():
            stream, data = piece
            for part in self._parts(marks, stream, data):
                await self._take(stream, part)
        for stream in self._begun:
            if held := marks[stream].rest():
                await self._output.put(stream, held)
        if not self._main.started.is_set():
            self._lost(self._not_started(self._main, session))
        elif self._told or session.code not in DEATHS:
            # Nomad 2.0 takes what it has read from Docker so far for all there is
            self._lost(ConnectionLost("Nomad told the exit code, but lost the end of the output"))
        self._exited(session.code or 0)

    def _parts(self, marks: dict[Stream, Marks], stream: Stream, data: bytes) -> list[bytes | Mark]:
        """What *data* brings; after the first mark, those that count are others."""
        parts = list(marks[stream].feed(data))
        if stream is Stream.STDOUT and not self._main.ready.is_set():
            for number, part in enumerate(parts):
                if isinstance(part, Mark):
                    self._get_ready(part)
                    marks[stream] = Marks(self._nonce)
                    return parts[:number]
        return parts

    def _get_ready(self, mark: Mark) -> None:
        if len(mark.numbers) == 5:
            self._running = wrap.Running(*mark.numbers)
        self._main.ready.set()

    async def _take(self, stream: Stream, part: bytes | Mark) -> None:
        if isinstance(part, bytes):
            if stream in self._begun:
                await self._output.put(stream, part)
            else:
                self._main.note(part)
        elif stream in self._begun:
            self._told_end(stream, part)
        else:
            self._begun.add(stream)
            if stream is Stream.STDOUT:
                self._main.started.set()

    def _told_end(self, stream: Stream, mark: Mark) -> None:
        if len(mark.numbers) == 3:
            code, left, starved = mark.numbers
            self._alone = not left
            self._told = Exit(code & 0xFF, out_of_memory=bool(starved))
            if not self._tty:
                self._nursery.start_soon(self._end_input, self._main)  # raw_exec tells of no end before
        self._said_all.add(stream)
        if self._told and self._said_all == self._streams:
            self._exited(self._told.code, out_of_memory=self._told.out_of_memory)
        if self._alone:
            self._output.end(*self._said_all)

    async def _serve_stderr(self) -> None:
        words = wrap.stderr_words(self._fifo)
        try:
            async with open_session(self._target, self._address, self._allocation, words, tty=False) as session:
                self._side.open(session)
                await self._listen_stderr(session)
        except ExecutorError as error:
            if not self._side.started.is_set():  # the output is incomplete, and mustn't look as if it were not
                self._output.fail(error)
                self._lost(error)
        self._output.end(Stream.STDERR)

    async def _listen_stderr(self, session: Session) -> None:
        marks = Marks(READY)
        while piece := await session.receive():
            stream, data = piece
            for part in marks.feed(data) if stream is Stream.STDOUT else [data]:
                if isinstance(part, bytes):
                    await self._take_stderr(stream, part)
                elif self._side.ready.is_set():
                    self._side.started.set()
                    self._output.end(Stream.STDERR)
                else:
                    self._side.ready.set()
                    marks = Marks(self._nonce)
        if not self._side.ready.is_set():
            raise self._not_started(self._side, session)
        if not self._side.started.is_set():
            with trio.move_on_after(BOTH_WITHIN):  # the end of the allocation takes both
                await self._over.wait()
            raise ConnectionLost("what passes on stderr was killed")

    async def _take_stderr(self, stream: Stream, data: bytes) -> None:
        if stream is Stream.STDOUT and self._side.ready.is_set():
            await self._output.put(Stream.STDERR, data)
        else:
            self._side.note(data)

    def _exited(self, code: int, *, out_of_memory: bool = False) -> None:
        """The first to tell counts."""
        if not self._over.is_set():
            self._exit = Exit(code, out_of_memory=out_of_memory)
            self._over.set()

    def _lost(self, error: ExecutorError) -> None:
        if not self._over.is_set():
            self._failure = error
            self._over.set()
            self._output.fail(error)
        self._main.release()
        self._side.release()

    # What goes

    async def send(self, data: bytes) -> None:
        """See Process."""
        await trio.lowlevel.checkpoint()
        if data and self._main.session and not self._over.is_set() and not self._stdin_closed:
            self._line_begun = data[-1:] != b"\n"
            await self._until_over(partial(self._main.session.send, data))

    async def _until_over(self, send: Callable[[], Awaitable[None]]) -> None:
        """What the command doesn't read mustn't outlast it."""
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await self._over.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(give_up)
            await send()
            nursery.cancel_scope.cancel()

    async def close_stdin(self) -> None:
        """See Process. With a terminal twice if a line is unfinished: once only ends that."""
        await trio.lowlevel.checkpoint()
        if self._tty:
            await self.send(END_OF_FILE * (2 if self._line_begun else 1))
        else:
            await self._end_input(self._main)

    async def _end_input(self, side: Side) -> None:
        if side is self._main:
            if self._stdin_closed:
                return
            self._stdin_closed = True
        if side.session:
            await side.session.close_stdin()

    async def resize(self, rows: int, columns: int) -> None:
        """See Process."""
        await trio.lowlevel.checkpoint()
        self._size = (rows, columns)
        if not self._over.is_set():
            await self._resize()

    async def _resize(self) -> None:
        """Once when it is opened and once when it runs: Docker loses the first."""
        if self._tty and all(self._size) and self._main.session:
            await self._main.session.resize(*self._size)

    async def signal(self, number: int) -> None:
        """See Process."""
        await trio.lowlevel.checkpoint()
        if self._exit or not self._running:
            return
        if number == signal.SIGQUIT and self._tty and self._main.session and not self._over.is_set():
            await self._main.session.send(QUIT)
        else:
            await self._ask(wrap.signal_words(self._running, number))

    # How it ends

    async def receive(self) -> tuple[Stream, bytes] | None:
        """See Process."""
        return await self._output.take()

    async def wait(self) -> Exit:
        """See Process."""
        await self._over.wait()
        if self._exit:
            return self._exit
        assert self._failure
        raise self._failure

    async def kill(self) -> bool:
        """See Process."""
        certain = False
        with trio.move_on_after(KILL_WITHIN):
            certain = await self._kill()
        if certain:
            await self._conclude()
        return certain

    async def _kill(self) -> bool:
        if not self._running:
            return isinstance(self._failure, AllocationGone)
        try:
            return await self._ask(wrap.kill_words(self._running)) == (1,)
        except AllocationGone:  # and what ran in it
            return True
        except ExecutorError:
            return False

    async def _conclude(self) -> None:
        with trio.move_on_after(KILLED_WITHIN):
            await self._over.wait()
            if not self._tty:
                await self._end_input(self._main)
        self._exited(SIGKILL_CODE)
        self._output.end(*Stream)

    async def _ask(self, words: tuple[str, ...]) -> tuple[int, ...]:
        addresses = dict.fromkeys((self._address, self._target.url))
        return await ask(self._target, tuple(addresses), self._allocation, words)

"""Programs that work on files inside a runner: fed, heard, and never left behind when something goes wrong."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation
from poseidon.errors import ConnectionLost, ExecutorError, Unsupported
from poseidon.executors.base import Executor, Exit, Process, Stream

T = TypeVar("T")

KILL_WITHIN = 6.0
OUTPUT_WITHIN = 1.0
"""Seconds that output may still come after the program's end."""
SAID_MOST = 8 * 1024
"""Bytes of a stream that the message of a failure may quote."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where programs run."""

    executor: Executor
    allocation: Allocation


@dataclass(slots=True)
class Said:
    """What a program has written so far; its beginning is what counts."""

    most: int = SAID_MOST
    """Bytes of stdout that are kept."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    cut: bool = False
    """There was more on stdout."""
    complete: trio.Event = field(default_factory=trio.Event)

    def add(self, stream: Stream, data: bytes) -> None:
        """Keep what is to be kept."""
        if stream is Stream.STDERR:
            self.stderr += data[: SAID_MOST - len(self.stderr)]
        else:
            kept = data[: self.most - len(self.stdout)]
            self.stdout += kept
            self.cut = self.cut or len(kept) < len(data)

    @property
    def error(self) -> str:
        """Its complaints."""
        return self.stderr.decode("utf-8", "replace").strip()

    def __str__(self) -> str:
        stderr, stdout = self.stderr.decode("utf-8", "replace"), self.stdout.decode("utf-8", "replace")
        return f"stderr output '{stderr}' and stdout output '{stdout}'"


@asynccontextmanager
async def started(place: Place, command: Command) -> AsyncIterator[Process]:
    """Run *command*. If the block is left by an error or cancelled, nothing of it goes on.

    What is raised in the block may come out as a group: expected errors should leave it as values.
    """
    async with place.executor.execute(place.allocation, command) as process:
        try:
            yield process
        except BaseException:
            await killed(process)  # noqa: ASYNC102 - it has both
            raise


async def killed(process: Process) -> None:
    """Kill it, whatever else is going on, as well as can be."""
    with trio.move_on_after(KILL_WITHIN, shield=True), suppress(ExecutorError):
        await process.kill()


async def as_allowed(command: Command, run: Callable[[Command], Awaitable[T]]) -> T:
    """*run* it; where there is only one user, everything belongs to that anyway."""
    try:
        return await run(command)
    except Unsupported:
        return await run(replace(command, privileged=False))


async def repeated(run: Callable[[], Awaitable[T]]) -> T:
    """*run*, and once more if the connection was lost: for what only reads."""
    try:
        return await run()
    except ConnectionLost:
        return await run()


# To the end


async def fed(place: Place, command: Command, pieces: Iterator[bytes]) -> tuple[Exit, Said]:
    """Run *command* with *pieces* as its input. Raises ExecutorError."""
    said = Said()
    async with started(place, command) as process:
        ended = await _attend(process, pieces, said)
    if isinstance(ended, ExecutorError):
        raise ended
    return ended, said


async def _attend(process: Process, pieces: Iterator[bytes], said: Said) -> Exit | ExecutorError:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_feed, process, pieces)
        nursery.start_soon(_listen, process, said)
        ended = await as_value(process.wait)
        with trio.move_on_after(OUTPUT_WITHIN):
            await said.complete.wait()
        nursery.cancel_scope.cancel(reason="the command has ended")
    return ended


async def as_value(wait: Callable[[], Awaitable[T]]) -> T | ExecutorError:
    """What it gives or raises, as a value: nurseries on the way would wrap the error into groups."""
    try:
        return await wait()
    except ExecutorError as error:
        return error


async def _feed(process: Process, pieces: Iterator[bytes]) -> None:
    with suppress(ExecutorError):  # the process's end tells of it
        for piece in pieces:
            await process.send(piece)
        await process.close_stdin()


async def _listen(process: Process, said: Said) -> None:
    with suppress(ExecutorError):
        while chunk := await process.receive():
            said.add(*chunk)
    said.complete.set()


async def heard(place: Place, command: Command, *, most: int) -> tuple[Exit | None, Said]:
    """Run *command* and take in all that it says; no exit if it said more than *most* bytes. Raises ExecutorError."""
    said = Said(most)
    async with started(place, command) as process:
        ended = await as_value(lambda: _hear(process, said))
        if said.cut or isinstance(ended, ExecutorError):
            await killed(process)  # noqa: ASYNC102 - it has both
    if isinstance(ended, ExecutorError):
        raise ended
    return ended, said


async def _hear(process: Process, said: Said) -> Exit | None:
    await process.close_stdin()
    while chunk := await process.receive():
        said.add(*chunk)
        if said.cut:
            return None
    return await process.wait()

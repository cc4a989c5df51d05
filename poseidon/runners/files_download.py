"""A file's content on its way out of a runner: exactly as many bytes as were announced, or an error.

Only regular files are read, after following links: devices and fifos would block or never end.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from poseidon.core.command import Command
from poseidon.core.listing import start_of
from poseidon.errors import ExecutorError, FilesFailed, FilesNotAccessible
from poseidon.executors.base import Process, Stream
from poseidon.runners.files_programs import Place, Said, as_value, killed, started

AHEAD = 256 * 1024
"""Bytes that are read before anything is announced. A file that ends within them may lie about its size, as those of
/proc and /sys do; one that has no size mustn't be larger."""
BEGIN_WITHIN = 30.0
END_WITHIN = 1.0
"""Seconds that the program may take to end after the last byte."""
HEADER = 32
NOT_THERE = 66
UNREADABLE = 1

READ = """\
if [[ ! -f $1 ]]; then
  stat -L -c "%F: it is no regular file" -- "$1" >&2
  exit 66
fi
exec 3<"$1" && [[ -f /dev/fd/3 ]] || exit 66
stat -L -c %s /proc/self/fd/3 && exec cat <&3
"""
"""Nothing else is opened: it might block, and bash takes some names for addresses of the network. What was opened is
asked again what it is, for it may have been replaced meanwhile."""


def read_command(path: str, *, privileged: bool) -> Command:
    """Print the size of *path*, then what is in it."""
    argv = ("/bin/bash", "-c", READ, "poseidon", start_of(path))
    return Command(argv=argv, environment={"LC_ALL": "C"}, privileged=privileged, tty=False)


class Download:
    """Opened by `open_download`."""

    def __init__(self, process: Process) -> None:
        self.size = 0
        """Bytes that will come."""
        self._process = process
        self._ahead = bytearray()
        self._said = Said()
        self._ended = False

    async def begin(self) -> None:
        """Find out how much there is. Raises FilesNotAccessible, FilesFailed, ExecutorError."""
        await self._process.close_stdin()
        await self._read_ahead()
        digits, newline, _ = self._ahead[:HEADER].partition(b"\n")
        if self._ended and (code := (await self._process.wait()).code):
            raise self._failure(code)
        if not newline or not digits.isdigit():
            raise FilesFailed("the size of the file can't be found out: unexpected output of `stat`")
        del self._ahead[: len(digits) + 1]
        self.size = len(self._ahead) if self._ended else int(digits)
        if not self.size and not self._ended:
            raise FilesNotAccessible(f"the file doesn't tell its size, and is larger than {AHEAD} bytes")

    async def _read_ahead(self) -> None:
        while len(self._ahead) < AHEAD + HEADER:
            data = await self._next()
            if data is None:
                return
            self._ahead += data

    def _failure(self, code: int) -> FilesNotAccessible | FilesFailed:
        if code in (NOT_THERE, UNREADABLE):
            detail = self._said.error.rpartition(": ")[2]
            return FilesNotAccessible(f"file not found or insufficient permissions ({detail})")
        return FilesFailed(f"reading the file failed with exit code {code}: {self._said}")

    async def _next(self) -> bytes | None:
        while chunk := await self._process.receive():
            stream, data = chunk
            if stream is Stream.STDOUT:
                return data
            self._said.add(stream, data)
        self._ended = True
        return None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        left = self.size
        data: bytes | None = bytes(self._ahead)
        self._ahead.clear()
        while left:
            if not data:
                raise FilesFailed(f"the file has become shorter, {left} bytes are missing")
            piece = data[:left]
            left -= len(piece)
            if not left:
                await self.end()  # before the last byte: with that, the client is done and so is this task
            yield piece
            data = await self._next() if left else None

    async def end(self) -> None:
        """Leave nothing behind of the program, which may have more to say."""
        with trio.move_on_after(END_WITHIN):
            if self._ended or await as_value(self._next) is None:
                return
        await killed(self._process)
        self._ended = True


@asynccontextmanager
async def open_download(place: Place, command: Command) -> AsyncIterator[Download]:
    """Raises FilesNotAccessible, FilesFailed, ExecutorError before there is anything, and while it is read."""
    async with started(place, command) as process:
        download = Download(process)
        failure = await _begun(download)
        if failure is None:
            yield download
        await download.end()
    if failure is not None:
        raise failure


async def _begun(download: Download) -> FilesNotAccessible | FilesFailed | ExecutorError | None:
    try:
        with trio.fail_after(BEGIN_WITHIN):
            await download.begin()
    except (FilesNotAccessible, FilesFailed, ExecutorError) as error:
        return error
    except trio.TooSlowError:
        return FilesNotAccessible(f"the file gave nothing within {BEGIN_WITHIN:g} seconds")
    return None

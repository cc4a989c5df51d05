"""Files in a runner: deleted and copied by programs inside its sandbox, so that no path leads out of it.

Names never meet a shell: they are arguments, or lie in the archive.
"""

import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from posixpath import normpath
from typing import Protocol

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, Runner, RunnerId
from poseidon.errors import BadRequest, ExecutorError, FilesFailed, Unsupported
from poseidon.executors.base import Executor, Exit, Process, Stream

CHUNK = 64 * 1024
WITHIN = 300.0
"""Seconds that a copy may take."""
KILL_WITHIN = 6.0
OUTPUT_WITHIN = 1.0
"""Seconds that output may still come after the program's end."""
SAID_MOST = 8 * 1024
"""Bytes of each stream that the message of a failure may quote."""
PATHS_MOST = 1024 * 1024
"""Bytes of all paths to delete: they are arguments of a program."""
FILE_MODE = 0o744
FOLDER_MODE = 0o1777
"""Everybody may add files to a copied folder, but not remove those that were copied."""

UPDATE = """\
failed=0
remove() { rm -rf -- "$@" || failed=1; }
for path; do
  if [[ $path == "./*" && $PWD == / ]]; then
    echo "not everything in / is removed" >&2
    failed=1
  elif [[ $path == "./*" ]]; then
    found=(./*)
    for ((i = 0; i < ${#found[@]}; i += 500)); do remove "${found[@]:i:500}"; done
  else
    remove "$path"
  fi
done
tar --extract --file=- --absolute-names --preserve-permissions || failed=$?
exit "$failed"
"""
"""`./*` is everything in the workspace that isn't hidden; in portions, for there may be more than a program takes.
Tasks of Nomad's driver raw_exec, and images without a working folder, begin in /: it would be the whole system."""


@dataclass(frozen=True, slots=True)
class File:
    """What is to be copied. A path that ends in a slash is a folder, whose content doesn't count."""

    path: str
    content: bytes = b""


class Claims(Protocol):
    """What file operations need to know of runners."""

    def used(self, runner: RunnerId) -> Runner: ...

    def place(self, runner: Runner) -> tuple[Executor, Allocation]: ...

    def hold(self, runner: RunnerId) -> AbstractContextManager[None]: ...


class Files:
    """File operations in runners that are in use. Each is activity."""

    def __init__(self, claims: Claims, now: Callable[[], float] = time.time) -> None:
        self._claims = claims
        self._now = now

    async def update(self, runner: RunnerId, *, delete: Sequence[str], copy: Sequence[File]) -> None:
        """Delete first, then copy. What fails doesn't keep the rest from being done.

        Raises RunnerGone, BadRequest, FilesFailed, ExecutorError.
        """
        found = self._claims.used(runner)
        archive = archived(copy, int(self._now()))
        command = Command(argv=("/bin/bash", "-c", UPDATE, "poseidon", *_paths(delete)), privileged=True, tty=False)
        with self._claims.hold(runner):
            await self._run(found, command, archive)

    async def _run(self, runner: Runner, command: Command, archive: Iterator[bytes]) -> None:
        executor, allocation = self._claims.place(runner)
        try:
            with trio.fail_after(WITHIN):
                try:
                    await _fed(executor, allocation, command, archive)
                except Unsupported:  # here everything belongs to the only user anyway
                    await _fed(executor, allocation, replace(command, privileged=False), archive)
        except trio.TooSlowError:
            raise FilesFailed(f"file copy failed: not done within {WITHIN:g} seconds") from None
        except ExecutorError:
            self._claims.used(runner.id)  # that it is gone explains it better
            raise


def archived(files: Sequence[File], modified: int) -> Iterator[bytes]:
    """*files* as a tar archive, piece by piece. Raises BadRequest at once for a path that can't be archived."""
    headers = [_header(file, modified) for file in files]
    return _pieces(files, headers)


def _pieces(files: Sequence[File], headers: Sequence[bytes]) -> Iterator[bytes]:
    for file, header in zip(files, headers, strict=True):
        yield header
        if not file.path.endswith("/"):
            for start in range(0, len(file.content), CHUNK):
                yield file.content[start : start + CHUNK]
            yield bytes(-len(file.content) % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(file: File, modified: int) -> bytes:
    entry = tarfile.TarInfo(cleaned(file.path))
    entry.mtime = modified
    if file.path.endswith("/"):
        entry.type, entry.mode = tarfile.DIRTYPE, FOLDER_MODE
    else:
        entry.size, entry.mode = len(file.content), FILE_MODE
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def cleaned(path: str) -> str:
    """*path* without detours. Raises BadRequest for what no file can be called."""
    if "\0" in path:
        raise BadRequest(f"the path {path!r} contains a NUL character")
    clean = normpath(path) if path else "."
    return clean[1:] if clean.startswith("//") else clean


def _paths(delete: Sequence[str]) -> list[str]:
    paths = [path if path == "./*" else cleaned(path) for path in delete]
    if sum(len(path.encode()) + 1 for path in paths) > PATHS_MOST:
        raise BadRequest(f"the paths to delete exceed {PATHS_MOST} bytes together")
    return paths


@dataclass(slots=True)
class _Said:
    """What a command has written so far; its beginning is what counts."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    complete: trio.Event = field(default_factory=trio.Event)

    def add(self, stream: Stream, data: bytes) -> None:
        kept = self.stdout if stream is Stream.STDOUT else self.stderr
        kept += data[: SAID_MOST - len(kept)]

    def __str__(self) -> str:
        stderr, stdout = self.stderr.decode("utf-8", "replace"), self.stdout.decode("utf-8", "replace")
        return f"stderr output '{stderr}' and stdout output '{stdout}'"


async def _fed(executor: Executor, allocation: Allocation, command: Command, archive: Iterator[bytes]) -> None:
    """Run *command* with *archive* as its input. Raises FilesFailed with what it said."""
    said = _Said()
    async with executor.execute(allocation, command) as process:
        try:
            ended = await _attend(process, archive, said)
        except BaseException:  # the client has left, or the time is over: nothing of it may go on
            with trio.move_on_after(KILL_WITHIN, shield=True), suppress(ExecutorError):
                await process.kill()
            raise
    if isinstance(ended, ExecutorError):
        raise ended
    if ended.code != 0:
        raise FilesFailed(f"file copy failed: {said}")


async def _attend(process: Process, archive: Iterator[bytes], said: _Said) -> Exit | ExecutorError:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_feed, process, archive)
        nursery.start_soon(_listen, process, said)
        ended = await _waited(process)
        with trio.move_on_after(OUTPUT_WITHIN):
            await said.complete.wait()
        nursery.cancel_scope.cancel(reason="the command has ended")
    return ended


async def _waited(process: Process) -> Exit | ExecutorError:
    """The end, as a value: nurseries on the way would wrap the error into groups."""
    try:
        return await process.wait()
    except ExecutorError as error:
        return error


async def _feed(process: Process, archive: Iterator[bytes]) -> None:
    with suppress(ExecutorError):  # the process's end tells of it
        for piece in archive:
            await process.send(piece)
        await process.close_stdin()


async def _listen(process: Process, said: _Said) -> None:
    with suppress(ExecutorError):
        while chunk := await process.receive():
            said.add(*chunk)
    said.complete.set()

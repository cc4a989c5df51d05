"""Files in a runner: listed, read, deleted and copied by programs inside its sandbox, so that no path leads out of it.

Names never meet a shell: they are arguments, or lie in the archive.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

import structlog
import trio

from poseidon.core.command import Command
from poseidon.core.listing import Entry
from poseidon.core.model import Allocation, Runner, RunnerId
from poseidon.errors import BadRequest, ExecutorError, FilesFailed, FilesNotAccessible, PoseidonError
from poseidon.executors.base import Executor
from poseidon.runners.files_archive import File, archived, cleaned, possible
from poseidon.runners.files_download import Download, open_download, read_command
from poseidon.runners.files_listing import list_files
from poseidon.runners.files_programs import Place, as_allowed, fed, repeated

log = structlog.get_logger(__name__)

WITHIN = 300.0
"""Seconds that a copy may take."""
LIST_WITHIN = 60.0
PARSERS = 2
"""Listings that are taken apart at once, so that many large ones don't need their memory together."""
PATHS_MOST = 1024 * 1024
"""Bytes of all paths to delete: they are arguments of a program."""

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


class Claims(Protocol):
    """What file operations need to know of runners."""

    def used(self, runner: RunnerId) -> Runner: ...

    def place(self, runner: Runner) -> tuple[Executor, Allocation]: ...

    def hold(self, runner: RunnerId) -> AbstractContextManager[None]: ...


class Files:
    """File operations in runners that are in use. Each is activity. Where there is one user only, that one does all.

    All raise RunnerGone, BadRequest, FilesFailed, ExecutorError.
    """

    def __init__(self, claims: Claims, now: Callable[[], float] = time.time) -> None:
        self._claims = claims
        self._now = now
        self._parsers = trio.CapacityLimiter(PARSERS)

    async def update(self, runner: RunnerId, *, delete: Sequence[str], copy: Sequence[File]) -> None:
        """Delete first, then copy. What fails doesn't keep the rest from being done."""
        found = self._claims.used(runner)
        archive = archived(copy, int(self._now()))
        command = Command(argv=("/bin/bash", "-c", UPDATE, "poseidon", *_paths(delete)), privileged=True, tty=False)
        with self._within(WITHIN, "file copy"), self._at_work(found) as place:
            ended, said = await as_allowed(command, partial(fed, place, pieces=archive))
            if ended.code != 0:
                raise FilesFailed(f"file copy failed: {said}")

    async def list(self, runner: RunnerId, path: str, *, recursive: bool, privileged: bool) -> list[Entry]:
        """What lies at *path*, sorted by name.

        Raises RunnerGone, BadRequest, and for all else FilesNotAccessible: CodeOcean lists in a callback; a 500
        there would end all that it runs.
        """
        found = self._claims.used(runner)
        path = possible(path)
        try:
            with self._within(LIST_WITHIN, "listing"), self._at_work(found) as place:
                return await list_files(place, path, recursive=recursive, privileged=privileged, parsers=self._parsers)
        except (FilesFailed, ExecutorError) as error:
            log.warning("listing failed", runner_id=runner, error=error.message)
            raise FilesNotAccessible(error.message) from error

    @asynccontextmanager
    async def read(self, runner: RunnerId, path: str, *, privileged: bool) -> AsyncIterator[Download]:
        """The content of the regular file at *path*, links followed. Raises FilesNotAccessible too."""
        found = self._claims.used(runner)
        command = read_command(possible(path), privileged=privileged)
        async with AsyncExitStack() as stack:
            with self._at_work(found) as place:
                stack.enter_context(self._claims.hold(runner))

                async def opened(allowed: Command) -> Download:
                    return await stack.enter_async_context(open_download(place, allowed))

                download = await repeated(partial(as_allowed, command, opened))
            yield download

    @contextmanager
    def _at_work(self, runner: Runner) -> Iterator[Place]:
        try:
            with self._claims.hold(runner.id):
                yield Place(*self._claims.place(runner))
        except PoseidonError:
            self._claims.used(runner.id)  # that it is gone explains it better
            raise

    @staticmethod
    @contextmanager
    def _within(seconds: float, what: str) -> Iterator[None]:
        try:
            with trio.fail_after(seconds):
                yield
        except trio.TooSlowError:
            raise FilesFailed(f"{what} failed: not done within {seconds:g} seconds") from None


def _paths(delete: Sequence[str]) -> list[str]:
    paths = [path if path == "./*" else cleaned(path) for path in delete]
    if sum(len(path.encode()) + 1 for path in paths) > PATHS_MOST:
        raise BadRequest(f"the paths to delete exceed {PATHS_MOST} bytes together")
    return paths

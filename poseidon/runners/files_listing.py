"""What lies in a runner, told by programs in it: `find` if it is GNU's, else `ls`, which every image must have."""

from collections.abc import Callable
from functools import partial

import trio

from poseidon.core import listing
from poseidon.core.command import Command
from poseidon.core.listing import Entry, LongListing, MalformedListing
from poseidon.errors import FilesFailed, FilesNotAccessible
from poseidon.runners.files_programs import Place, Said, as_allowed, heard, repeated

MOST = 16 * 1024 * 1024
"""Bytes of output that a listing may have."""
TROUBLE = (0, 1, 2)
"""Exit codes with which the programs still tell what they can."""

Parse = Callable[[bytes], list[Entry] | None]


async def list_files(
    place: Place, path: str, *, recursive: bool, privileged: bool, parsers: trio.CapacityLimiter
) -> list[Entry]:
    """Sorted by name. Raises FilesNotAccessible, FilesFailed, ExecutorError. *parsers*: how many may parse at once."""
    run = partial(_run, place, privileged=privileged, parsers=parsers)
    entries, said = await run(
        listing.find_words(path, recursive=recursive), partial(listing.found, path=path, recursive=recursive)
    )
    if entries is None:
        entries, said = await run(
            listing.ls_words(path, recursive=recursive), partial(listing.listed, path=path, recursive=recursive)
        )
    if entries is None:
        reason = said.error.rpartition(": ")[2]
        raise FilesNotAccessible(f"file not found or insufficient permissions ({reason})")
    return entries


async def _run(
    place: Place, words: tuple[str, ...], parse: Parse, *, privileged: bool, parsers: trio.CapacityLimiter
) -> tuple[list[Entry] | None, Said]:
    command = Command(argv=words, environment={"LC_ALL": "C"}, privileged=privileged, tty=False)
    ended, said = await repeated(partial(as_allowed, command, partial(heard, place, most=MOST)))
    if ended is None:
        raise FilesNotAccessible(f"the listing is longer than {MOST} bytes, list a part of it")
    if ended.code not in TROUBLE and (said.stdout or words[0] == "ls"):
        raise FilesFailed(f"listing failed with exit code {ended.code}: {said.error}")
    entries = await trio.to_thread.run_sync(_parsed, parse, bytes(said.stdout), limiter=parsers)
    return (entries if entries or ended.code == 0 else None), said


def _parsed(parse: Parse, raw: bytes) -> list[Entry] | None:
    try:
        return parse(raw)
    except LongListing:
        raise FilesNotAccessible(f"there are more than {listing.MOST} entries, list a part of them") from None
    except MalformedListing:
        raise FilesFailed("listing failed: unexpected output") from None

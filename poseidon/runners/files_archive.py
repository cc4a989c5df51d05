"""What is to be copied, as a tar archive, piece by piece."""

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import normpath

from poseidon.errors import BadRequest

CHUNK = 64 * 1024
FILE_MODE = 0o744
FOLDER_MODE = 0o1777
"""Everybody may add files to a copied folder, but not remove those that were copied."""


@dataclass(frozen=True, slots=True)
class File:
    """What is to be copied. A path that ends in a slash is a folder, whose content doesn't count."""

    path: str
    content: bytes | bytearray = b""


def archived(files: Sequence[File], modified: int) -> Iterator[bytes]:
    """*files* as a tar archive, piece by piece. Raises BadRequest at once for a path that can't be archived."""
    return _pieces(files, [cleaned(file.path) for file in files], modified)


def _pieces(files: Sequence[File], names: Sequence[str], modified: int) -> Iterator[bytes]:
    for file, name in zip(files, names, strict=True):
        yield _header(file, name, modified)
        if not file.path.endswith("/"):
            for start in range(0, len(file.content), CHUNK):
                yield bytes(file.content[start : start + CHUNK])
            yield bytes(-len(file.content) % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(file: File, name: str, modified: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.mtime = modified
    if file.path.endswith("/"):
        entry.type, entry.mode = tarfile.DIRTYPE, FOLDER_MODE
    else:
        entry.size, entry.mode = len(file.content), FILE_MODE
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def cleaned(path: str) -> str:
    """*path* without detours. Raises BadRequest for what no file can be called."""
    clean = normpath(possible(path)) if path else "."
    return clean[1:] if clean.startswith("//") else clean


def possible(path: str) -> str:
    """*path* if a file can be called so. Raises BadRequest."""
    if "\0" in path:
        raise BadRequest(f"the path {path!r} contains a NUL character")
    return path

"""What `poseidon run` runs: a script with its interpreter, or a command. Reads local files, does nothing else."""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from poseidon.cli.failures import CommandFailed

LARGEST_FILE = 256 * 2**20
"""Bytes; a body of this size is beyond what daemons take by default."""
INTERPRETERS = {
    ".py": "python3",
    ".sh": "bash",
    ".bash": "bash",
    ".js": "node",
    ".mjs": "node",
    ".cjs": "node",
    ".rb": "ruby",
    ".pl": "perl",
    ".php": "php",
    ".lua": "lua",
    ".r": "Rscript",
    ".java": "java",
}


@dataclass(frozen=True, slots=True)
class Program:
    """A shell line, and the files that it needs in the workspace, by their paths there."""

    line: str
    files: dict[str, bytes] = field(default_factory=dict)


def from_words(words: Sequence[str]) -> Program:
    """A single word is a shell line, as with ssh; several are a program and its exact arguments."""
    return Program(words[0] if len(words) == 1 else shlex.join(words))


def from_script(script: Path, arguments: Sequence[str]) -> Program:
    """The script under its own name, run by its interpreter."""
    content = read(script)
    name = script.name if not script.name.startswith("-") else f"./{script.name}"
    line = shlex.join([*interpreter(script, content), name, *arguments])
    return Program(line, {script.name: content})


def interpreter(script: Path, content: bytes) -> list[str]:
    """What runs *script*: its #! line, else its suffix."""
    first = content.split(b"\n", 1)[0]
    if first.startswith(b"#!") and (words := first[2:].decode(errors="replace").strip().split(None, 1)):
        return words  # at most one argument, as the kernel has it
    try:
        return [INTERPRETERS[script.suffix.lower()]]
    except KeyError:
        hint = f"copy it with --file and say how: poseidon run --file {script} -- COMMAND"
        raise CommandFailed(f"{str(script)!r} has no #! line and no suffix that tells its language; {hint}") from None


def read(path: Path) -> bytes:
    """The file's content. A pipe is as good, but not a device without an end."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise CommandFailed(f"can't read {str(path)!r}: {error.strerror}") from error
    if len(content) > LARGEST_FILE:
        raise CommandFailed(f"{str(path)!r} is larger than {LARGEST_FILE} bytes, the most that can be copied")
    return content


def extras(wanted: Iterable[str]) -> dict[str, bytes]:
    """The files of `--file PATH[=NAME]`, folders with all that is in them."""
    files: dict[str, bytes] = {}
    for word in wanted:
        for name, path in located(word):
            if name in files:
                raise CommandFailed(f"two files would be {name!r} in the workspace; name another with --file PATH=NAME")
            files[name] = read(path)
    return files


def located(word: str) -> Iterator[tuple[str, Path]]:
    """Each file that *word* means, with its path in the workspace."""
    source, _, name = (word, "", "") if os.path.lexists(word) else word.rpartition("=")
    path = Path(source or word)
    name = name.strip("/") or path.resolve().name
    if not path.is_dir():
        yield name, path
        return
    for found in sorted(path.rglob("*")):
        if found.is_file():
            yield f"{name}/{found.relative_to(path)}", found


def variables(entries: Iterable[str]) -> dict[str, str]:
    """`K=V` as given, `K` alone with the value it has here."""
    found: dict[str, str] = {}
    for entry in entries:
        name, given, value = entry.partition("=")
        if not name:
            raise CommandFailed(f"--env wants NAME=VALUE, not {entry!r}")
        if not given and name not in os.environ:
            raise CommandFailed(f"--env {name}: there is no such variable here; give a value with --env {name}=VALUE")
        found[name] = value if given else os.environ[name]
    return found

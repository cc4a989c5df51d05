"""A file listing, as programs of a runner print it, into entries. Pure; what a runner says is untrusted.

`find` tells everything apart by NUL, which no name can hold. Where it isn't GNU's, `ls` quotes the names as C does.
Hidden files are left out, as `ls` does without being told otherwise.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

MOST = 50_000
"""Entries of one listing."""
FORMAT = r"%d\0%M\0%s\0%u\0%g\0%T@\0%P\0%l\0"
FIELDS = 8
HOME = "./"
SPECIAL = re.compile(r"[*?\[\\]")
"""What means something in a pattern of `find`."""
ESCAPED = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
QUOTED = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
"""Up to a quotation mark that isn't escaped."""
LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


class MalformedListing(ValueError):
    """No such program prints this."""


class LongListing(ValueError):
    """It has more entries than MOST."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or anything else that has a name. Bytes of it that aren't UTF-8 are replaced."""

    name: str
    kind: str
    """`-` a file, `d` a folder, `l` a link, `b`, `c`, `p`, `s`."""
    size: int
    owner: str
    group: str
    permissions: str
    """Nine characters."""
    modified: int
    """Seconds since the epoch."""
    target: str = ""
    """Of a link; empty if it can't be read."""


def start_of(path: str) -> str:
    """*path* so that no program takes it for an option or an operator."""
    return path if path.startswith("/") else HOME + path


def find_words(path: str, *, recursive: bool) -> tuple[str, ...]:
    """Print *path* itself, then all in it."""
    start = start_of(path)
    depth = () if recursive else ("-maxdepth", "1")
    hidden = ("-name", ".*", "!", "-path", SPECIAL.sub(r"\\\g<0>", start), "-prune")
    return ("find", start, "-ignore_readdir_race", *depth, *hidden, "-o", "-printf", FORMAT)


def found(raw: bytes, path: str, *, recursive: bool) -> list[Entry] | None:
    """What `find_words` printed; None if there is no such path. Raises MalformedListing, LongListing."""
    if not raw:
        return None
    records, path = _records(raw), _shown(path)
    depth, entry = _found(next(records), path)
    if depth:
        raise MalformedListing
    if entry.kind != "d":
        return [entry]
    prefix = _prefix(path) if recursive else ""
    return _sorted(entry for _, entry in (_found(each, prefix) for each in records))


def _records(raw: bytes) -> Iterator[Sequence[bytes]]:
    fields = raw.split(b"\0")
    if len(fields) % FIELDS != 1 or fields[-1]:
        raise MalformedListing
    return (fields[at : at + FIELDS] for at in range(0, len(fields) - 1, FIELDS))


def _found(fields: Sequence[bytes], prefix: str) -> tuple[int, Entry]:
    depth, mode, size, owner, group, modified, name, target = fields
    facts = (mode, size, owner, group, modified.partition(b".")[0])
    return _number(depth), _entry(facts, prefix + _text(name), target)


def ls_words(path: str, *, recursive: bool) -> tuple[str, ...]:
    """The same by GNU's ls; its environment must say `LC_ALL=C`."""
    layout = ("-l", "--block-size=1", "--time-style=+%s", "--quoting-style=c")
    return ("ls", *layout, *(("--recursive",) if recursive else ()), "--", start_of(path))


def listed(raw: bytes, path: str, *, recursive: bool) -> list[Entry] | None:
    """What `ls_words` printed; None if there is no such path. Raises MalformedListing, LongListing."""
    if not raw:
        return None
    return _sorted(_listed(raw, path, recursive=recursive))


def _listed(raw: bytes, path: str, *, recursive: bool) -> Iterator[Entry]:
    path, inside, prefix = _shown(path), False, ""
    start = start_of(path)
    for line in raw.split(b"\n"):
        if line.startswith(b'"'):
            folder = _prefix(_unquoted(line[1:].removesuffix(b'":')))
            prefix = _prefix(path) + folder.removeprefix(_prefix(start)) if recursive else ""
        elif line.startswith(b"total "):
            inside = True
        elif entry := _line(line, prefix):
            yield entry if inside else replace(entry, name=path)


def _line(line: bytes, prefix: str) -> Entry | None:
    """The entry that *line* tells of; None if there is none, or nothing is known of it but its name."""
    facts, opened, names = line.partition(b' "')
    words = facts.split()
    if not opened or len(words) < 6 or b"?" in words[0]:
        return None
    mode, _, owner, *groups, size, modified = words
    if groups and groups[-1].endswith(b","):  # a device has two numbers instead
        size = b"0"
        del groups[-1]
    name, target = _names(names)
    group = b" ".join(groups)
    return _entry((mode[:10], size, owner, group, modified), prefix + _unquoted(name), _bytes(target))


def _names(quoted: bytes) -> tuple[bytes, bytes]:
    """A name and what it links to, both still escaped; their own quotation marks are, so that the first plain one ends
    the name."""
    name = QUOTED.match(quoted)
    assert name is not None  # it may be empty
    return name[0], quoted[name.end() :].removeprefix(b'" -> "').removesuffix(b'"')


def _unquoted(name: bytes) -> str:
    return _text(_bytes(name))


def _bytes(quoted: bytes) -> bytes:
    return ESCAPED.sub(_unescaped, quoted)


def _unescaped(match: re.Match[bytes]) -> bytes:
    given = match[1]
    return bytes([int(given, 8) & 0xFF]) if len(given) == 3 else LETTERS.get(given, given)


def _entry(facts: Sequence[bytes], name: str, target: bytes) -> Entry:
    mode, size, owner, group, modified = facts
    letters = _text(mode)
    if len(letters) != 10:
        raise MalformedListing
    return Entry(
        name,
        letters[0],
        _number(size),
        _text(owner),
        _text(group),
        letters[1:],
        _number(modified),
        _text(target),
    )


def _sorted(entries: Iterator[Entry]) -> list[Entry]:
    kept = sorted(islice(entries, MOST + 1), key=lambda entry: entry.name)
    if len(kept) > MOST:
        raise LongListing
    return kept


def _shown(path: str) -> str:
    return _text(path.encode("utf-8", "surrogateescape"))


def _prefix(folder: str) -> str:
    return folder.rstrip("/") + "/"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _number(digits: bytes) -> int:
    if len(digits) > 20:
        raise MalformedListing
    try:
        return int(digits)
    except ValueError:
        raise MalformedListing from None

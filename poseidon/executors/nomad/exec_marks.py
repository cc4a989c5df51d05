"""Marks in a stream of output: what our scripts tell in band, among what the command writes. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

SEPARATOR = b"\x1e"
LONGEST_TELLING = 64
READY = b"ready"


@dataclass(frozen=True, slots=True)
class Mark:
    """The numbers that a mark tells."""

    numbers: tuple[int, ...]


class Marks:
    """Tells marks with a *tag* from all else; of that, at most the length of one mark is withheld."""

    def __init__(self, tag: bytes) -> None:
        self._begin = SEPARATOR + tag
        self._whole = re.compile(re.escape(self._begin) + rb"((?: (?:0|-?[1-9]\d{0,18}))*)" + SEPARATOR)
        self._longest = len(self._begin) + LONGEST_TELLING
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes | Mark]:
        """What *data* brings, in its order: marks, and what lies between them."""
        if not self._held and SEPARATOR not in data:
            yield data
            return
        data = self._held + data
        while match := self._whole.search(data):
            if match.start():
                yield data[: match.start()]
            yield Mark(tuple(map(int, match[1].split())))
            data = data[match.end() :]
        known = len(data) - self._unfinished(data)
        self._held = data[known:]
        if known:
            yield data[:known]

    def rest(self) -> bytes:
        """What was withheld, when no more comes."""
        held, self._held = self._held, b""
        return held

    def _unfinished(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a mark."""
        start = data.rfind(SEPARATOR)
        if start < 0 or len(data) - start > self._longest:
            return 0
        tail = data[start:]
        told = tail[len(self._begin) :]
        begins = self._begin.startswith(tail) or (tail.startswith(self._begin) and not told.strip(b" -0123456789"))
        return len(tail) if begins else 0

"""Takes long strings out of a JSON text, so that reading the rest holds up nobody, and decodes them piece by piece.

A parser goes through a text of many megabytes in one go, and nothing else runs meanwhile, in whichever thread it is.
"""

import binascii
import secrets
from collections.abc import Mapping

import trio

from poseidon.errors import BadRequest

LONG = 16 * 1024
"""Bytes from which on a string is taken out."""
MOST_QUOTES = 40_000
"""Quotes that are looked at, for each takes half a microsecond. A text with more has few long strings anyway."""
MOST_BACKSLASHES = 256
"""In a row, before a quote; who sends more is served slowly."""
PIECE = 256 * 1024
"""Bytes of base64 that are decoded in one go: about a millisecond."""
EXPECTED = "base64 with padding is expected"


def taken_out(text: bytearray) -> tuple[bytearray, Mapping[bytes, memoryview]]:
    """*text* with a name instead of each long string, and what these stand for.

    Nobody can guess the names. Strings with escapes stay. A text that isn't JSON is none afterwards either.
    """
    if len(text) < LONG:
        return text, {}
    nonce, view = secrets.token_hex(16), memoryview(text)
    rest, found, copied = bytearray(), dict[bytes, memoryview](), 0
    for start, end in _long_strings(text):
        name = f"{nonce}-{len(found)}".encode()
        found[name] = view[start:end]
        rest += view[copied:start]
        rest += name
        copied = end
    rest += view[copied:]
    return rest, found


def whole(text: str, found: Mapping[bytes, memoryview]) -> str:
    """What *text* stands for, if it is a name that `taken_out` has given."""
    long = found.get(text.encode())
    return text if long is None else bytes(long).decode("utf-8", "replace")


def _long_strings(text: bytearray) -> list[tuple[int, int]]:
    found, at, start = [], 0, 0
    for _ in range(MOST_QUOTES):
        quote = text.find(b'"', at)
        if quote < 0:
            break
        at = quote + 1
        if not start:
            start = at
        elif (backslashes := _backslashes(text, start, quote)) == MOST_BACKSLASHES:
            break
        elif backslashes % 2 == 0:
            if quote - start >= LONG and text.find(b"\\", start, quote) < 0:
                found.append((start, quote))
            start = 0
    return found


def _backslashes(text: bytearray, start: int, end: int) -> int:
    """How many stand just before *end*, as far as they count."""
    before = text[max(start, end - MOST_BACKSLASHES) : end]
    return len(before) - len(before.rstrip(b"\\"))


async def decoded(base64: memoryview, name: str) -> bytearray:
    """Its bytes. Raises BadRequest, with the field's *name*."""
    content = bytearray()
    for at in range(0, len(base64), PIECE):
        piece = base64[at : at + PIECE]
        try:
            content += binascii.a2b_base64(piece, strict_mode=True)
        except (binascii.Error, ValueError):
            raise BadRequest(f"{name}: {EXPECTED}") from None
        if len(content) % 3 and at + PIECE < len(base64):
            raise BadRequest(f"{name}: {EXPECTED}")  # padding, but not at the end
        await trio.lowlevel.checkpoint()
    return content

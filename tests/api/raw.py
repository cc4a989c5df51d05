"""WebSocket frames by hand: for clients that do what no library would."""

import struct
from collections.abc import Iterator


def frame(first: int, payload: bytes, *, masked: bool = True, claims: int | None = None) -> bytes:
    """A frame with a mask of zeros. *claims*: another length than it has."""
    length = len(payload) if claims is None else claims
    bit = 0x80 if masked else 0
    if length < 126:
        head = bytes([first, bit | length])
    elif length < 2**16:
        head = bytes([first, bit | 126]) + struct.pack("!H", length)
    else:
        head = bytes([first, bit | 127]) + struct.pack("!Q", length)
    return head + (bytes(4) if masked else b"") + payload


def handshake(url: str, subprotocol: str = "") -> bytes:
    """For an execution's URL."""
    lines = [
        f"GET /api/v1{url.partition('/api/v1')[2]} HTTP/1.1",
        "Host: 127.0.0.1",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version: 13",
        *([f"Sec-WebSocket-Protocol: {subprotocol}"] if subprotocol else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Opcodes and payloads of a server's frames, as far as they are complete."""
    while len(data) >= 2:
        assert data[0] & 0xF0 == 0x80, "a fragment, or a reserved bit"
        size, start = data[1], 2
        if size == 126:
            size, start = struct.unpack("!H", data[2:4])[0] if len(data) >= 4 else 0, 4
        elif size == 127:
            size, start = struct.unpack("!Q", data[2:10])[0] if len(data) >= 10 else 0, 10
        if len(data) < start + size:
            return
        yield data[0] & 0x0F, data[start : start + size]
        data = data[start + size :]

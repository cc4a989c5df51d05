"""The daemon's side of the helper's protocol (written down in inside.py). What comes from a helper is untrusted."""

import os
import socket
import stat
import sys
from collections.abc import Sequence

import trio

from poseidon.errors import ConnectionLost

VERSION = 1
LARGEST_REPLY = 4096
PTY_MASTER = os.makedev(5, 2)


def pack(*items: bytes) -> bytes:
    """One frame."""
    body = b"".join(len(item).to_bytes(4, "big") + item for item in items)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes) -> list[bytes]:
    """The items of a frame's body. Raises ConnectionLost if they don't add up."""
    items, at = [], 0
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "big")
        if end > len(body):
            raise ConnectionLost("the sandbox's helper sent a malformed frame")
        items.append(body[at + 4 : end])
        at = end
    return items


class Channel:
    """Frames over a connected stream socket. Closing it is the caller's."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._buffer = bytearray()
        self._received: list[int] = []

    async def send(self, *items: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one frame. Raises ConnectionLost."""
        data = memoryview(pack(*items))
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        try:
            sent = await self._socket.sendmsg([data], ancillary)
            while sent < len(data):
                sent += await self._socket.send(data[sent:])
        except OSError as error:
            raise ConnectionLost(f"the sandbox's helper doesn't listen: {error.strerror}") from error

    async def receive(self) -> list[bytes]:
        """The next frame. Raises ConnectionLost, also at its regular end."""
        while True:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > LARGEST_REPLY:
                raise ConnectionLost("the sandbox's helper sent an oversized frame")
            if len(self._buffer) >= 4 + size and len(self._buffer) > 4:
                body = bytes(self._buffer[4 : 4 + size])
                del self._buffer[: 4 + size]
                return unpack(body)
            await self._read()

    async def _read(self) -> None:
        try:
            data, ancillary, flags, _ = await self._socket.recvmsg(
                LARGEST_REPLY, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ConnectionLost(f"the connection to the sandbox's helper broke: {error.strerror}") from error
        for _, _, raw in ancillary:
            self._received += [int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw) - 3, 4)]
        if not data or flags & socket.MSG_CTRUNC or len(self._received) > 1:
            raise ConnectionLost("the sandbox's helper has ended the connection")
        self._buffer += data

    def take_terminal(self) -> int:
        """The descriptor that came with a frame, if it is the master of a terminal. Raises ConnectionLost."""
        if not self._received:
            raise ConnectionLost("the sandbox's helper sent no terminal")
        descriptor = self._received.pop()
        what = os.fstat(descriptor)
        if not stat.S_ISCHR(what.st_mode) or what.st_rdev != PTY_MASTER:
            os.close(descriptor)
            raise ConnectionLost("the sandbox's helper sent something else than a terminal")
        os.set_blocking(descriptor, False)
        return descriptor

    def close(self) -> None:
        """Close; a waiting `receive` raises ConnectionLost or ClosedResourceError."""
        for descriptor in self._received:
            os.close(descriptor)
        self._received.clear()
        self._socket.close()


def connect(folder: int) -> socket.socket:
    """A connection to the helper whose runner's folder is open as *folder*. Raises OSError."""
    # By descriptor, as the path of a socket may only have 107 bytes.
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(f"/proc/self/fd/{folder}/socket")
    except OSError:
        connection.close()
        raise
    return connection


def listening_pid(connection: socket.socket) -> int:
    """The pid (as this machine sees it) of the process that listens at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(raw[:4], sys.byteorder, signed=True)

"""Prepares the network of one sandbox from outside, then becomes the program that carries its packets.

It runs under this machine's Python (3.9 or newer), given as text, as another uid can't enter our folders; and as root
of the sandbox's user namespace, which has no right on this machine. Like the helper, it imports what starts quickly.

    NETWORK REJECTED READY [PROGRAM ARGUMENTS...]

NETWORK is a descriptor of the sandbox's network namespace, REJECTED the networks that mustn't be reached, joined by
commas. Without a program, READY is written to once all is prepared; else the program is to do that.
"""

import _ctypes
import _signal as signal  # type: ignore[import-not-found]
import _socket as sockets
import _struct as struct
import fcntl
import os
import resource
import sys

SIOCADDRT = 0x890B
UP, HOST, REJECT = 0x1, 0x4, 0x200
ROUTE = "@L16s16s16sHhLBBhhhhPLLH"
"""struct rtentry."""
FIRST_FREE_PORT = "/proc/sys/net/ipv4/ip_unprivileged_port_start"
OPEN_FILES = 512
"""Each connection of the sandbox costs the program one."""
LOG_SIZE = 65536
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""So that the memory of connections that are over is free for the runner's commands again."""
MEMORY = 1 << 30
"""Of addresses, where no cgroup counts what is used; a connection takes some hundred KB of them."""


def address(packed: bytes) -> bytes:
    return struct.pack("=H2x4s8x", sockets.AF_INET, packed)


def reject(network: str) -> None:
    """Have the kernel answer that *network* is unreachable, whatever other route there is."""
    base, _, length = network.partition("/")
    mask = (0xFFFFFFFF << (32 - int(length)) & 0xFFFFFFFF).to_bytes(4, "big")
    flags = UP | REJECT | (HOST if length == "32" else 0)
    places = (address(sockets.inet_aton(base)), address(bytes(4)), address(mask))
    route = struct.pack(ROUTE, 0, *places, flags, *[0] * 12)
    any_socket = sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM)
    fcntl.ioctl(any_socket.fileno(), SIOCADDRT, route)
    any_socket.close()


def prepare(namespace: int, rejected: str) -> None:
    """In *namespace*: let every port be bound without a privilege, and reject."""
    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    if _ctypes.call_function(_ctypes.dlsym(library, "setns"), (namespace, 0)):
        raise OSError("the sandbox's network namespace can't be entered")
    try:
        with open(FIRST_FREE_PORT, "wb", buffering=0) as file:
            file.write(b"0")
    except OSError:
        pass  # in a container /proc/sys may be read-only: ports below 1024 can't be bound then
    for network in filter(None, rejected.split(",")):
        reject(network)


def main(words: "list[str]") -> None:
    namespace, rejected, ready = int(words[0]), words[1], int(words[2])
    if not os.fork():
        prepare(namespace, rejected)
        return
    if os.wait()[1]:
        sys.exit(1)
    if not words[3:]:
        os.write(ready, b"1")
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # what it logs is bounded, and that must not end it
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_SIZE, LOG_SIZE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.execve(words[3], words[3:], GIVES_BACK)


if __name__ == "__main__":
    main(sys.argv[1:])

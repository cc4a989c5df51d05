"""The ports of this machine by which servers in runners can be reached.

Bound by us, held open by the sandbox: a port is free again exactly when its runner is gone, and survives the daemon.
"""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from poseidon.core.model import Port
from poseidon.errors import PlacementFailed, Unsupported
from poseidon.executors.local.settings import LocalSettings

MOST = 32
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Bound:
    """A port of a runner and the socket on which this machine listens for it."""

    exposed: int
    address: str
    """host:port, as clients are told."""
    listener: socket.socket


class Ports:
    """Where further ports come from."""

    def __init__(self, settings: LocalSettings) -> None:
        self._bind = settings.port_address
        self._told = settings.port_host or told_host(settings.port_address)
        self._range = range(settings.port_range[0], settings.port_range[1] + 1) if settings.port_range else range(0)
        self._next = 0

    def bind(self, exposed: Sequence[int], stack: ExitStack) -> tuple[Bound, ...]:
        """Bind one for each of *exposed*, closed by *stack*. Raises PlacementFailed."""
        return tuple(self._bind_one(port, stack) for port in dict.fromkeys(exposed))

    def _bind_one(self, exposed: int, stack: ExitStack) -> Bound:
        problem = "none is left"
        for port in self._candidates():
            try:
                listener = listen(self._bind, port)
            except OSError as error:
                problem = error.strerror or str(error)
                continue
            stack.callback(listener.close)
            return Bound(exposed, f"{self._told}:{listener.getsockname()[1]}", listener)
        raise PlacementFailed(f"ports exhausted: no port of {self._bind} can be bound for a runner ({problem})")

    def _candidates(self) -> Iterator[int]:
        """Each of the range once, the longest unused first; or whichever the kernel gives."""
        if not self._range:
            yield 0
        for _ in self._range:
            yield self._range[self._next]
            self._next = (self._next + 1) % len(self._range)


def check(exposed: Sequence[int]) -> None:
    """Raise Unsupported if these ports can't be exposed."""
    for port in exposed:
        if not 1 <= port <= 65535:
            raise Unsupported(f"exposedPorts must be from 1 to 65535, not {port}")
    if len(set(exposed)) > MOST:
        raise Unsupported(f"exposedPorts may be {MOST} at most, not {len(set(exposed))}")


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the runner before may linger
        listener.bind((address, port))
        listener.listen(BACKLOG)  # at once: only a listening socket keeps others from the port
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def told_host(address: str) -> str:
    """How others name *address*: an address for all of them can't be connected to."""
    host = ipaddress.ip_address(address)
    if host.is_unspecified:
        return socket.gethostname()
    return f"[{address}]" if host.version == 6 else address


def to_text(ports: Sequence[Bound]) -> str:
    """As `SandboxRecord.ports`."""
    return " ".join(f"{port.exposed}={port.address}" for port in ports)


def from_text(text: str) -> tuple[Port, ...]:
    """The ports of a `SandboxRecord`."""
    pairs = (entry.split("=", 1) for entry in text.split())
    return tuple(Port(int(exposed), address) for exposed, address in pairs)

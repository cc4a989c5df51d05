"""What systemd wants to hear and hands over: notifications, the watchdog, listening sockets. Without it, nothing.

Its variables are taken out of the environment when read, so that no program that we start believes itself meant.
"""

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Self

import structlog
import trio

from poseidon.errors import ConfigError

log = structlog.get_logger(__name__)

FIRST_DESCRIPTOR = 3
_MOST_DESCRIPTORS = 64
_SEND_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Notifier:
    """Tells systemd how we are. A manager that doesn't listen is logged, never an error."""

    address: str = ""
    """Of systemd's datagram socket; empty: nobody asked."""
    watchdog: float = 0.0
    """Seconds within which a sign of life is expected, again and again; 0: none is."""

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Self:
        """As *environ* says; what concerned us is removed from it."""
        address = environ.pop("NOTIFY_SOCKET", "")
        micros = _number(environ.pop("WATCHDOG_USEC", ""))
        meant = environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        if address and address[0] not in "/@":
            log.warning("notify socket of an unknown kind ignored", address=address)
            address = ""
        return cls(address, micros / 1_000_000 if meant and address else 0.0)

    async def ready(self, status: str) -> None:
        """We serve from now on."""
        await self.send("READY=1", _status(status))

    async def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        await self.send(_status(text))

    async def stopping(self, status: str) -> None:
        """We have begun to stop."""
        await self.send("STOPPING=1", _status(status))

    async def alive(self) -> None:
        """A sign of life for the watchdog."""
        await self.send("WATCHDOG=1")

    async def send(self, *lines: str) -> None:
        """One datagram, or a warning in the log."""
        if not self.address:
            return
        target = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with trio.move_on_after(_SEND_TIMEOUT) as scope, trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            try:
                await out.connect(target)
                await out.send("\n".join(lines).encode())
            except OSError as error:
                log.warning("systemd not notified", about=lines[0], error=str(error))
        if scope.cancelled_caught:
            log.warning("systemd not notified", about=lines[0], error="it doesn't read")


async def feed_watchdog(notifier: Notifier, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Give signs of life for ever, twice in each period. That this very task runs is what they tell: a frozen event
    loop feeds nobody."""
    task_status.started()
    if not notifier.watchdog:
        await trio.sleep_forever()
    while True:
        await notifier.alive()
        await trio.sleep(notifier.watchdog / 2)


def take_sockets(environ: MutableMapping[str, str]) -> tuple[socket.socket, ...]:
    """The listening sockets that systemd opened for us, in the order of its unit; ours alone from now on."""
    count = _number(environ.pop("LISTEN_FDS", ""))
    owner = environ.pop("LISTEN_PID", "")
    for name in ("LISTEN_FDNAMES", "LISTEN_PIDFDID"):
        environ.pop(name, None)
    if not count:
        return ()
    if owner != str(os.getpid()):
        log.warning("sockets of systemd ignored: they are meant for another process", meant_for=owner)
        return ()
    if count > _MOST_DESCRIPTORS:
        raise ConfigError(f"systemd hands over {count} sockets, more than {_MOST_DESCRIPTORS}")
    return tuple(_adopt(number) for number in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + count))


def _adopt(number: int) -> socket.socket:
    """The descriptor as a socket that children don't inherit."""
    try:
        os.set_inheritable(number, False)
        adopted = socket.socket(fileno=number)
    except OSError as error:
        raise ConfigError(f"descriptor {number} from systemd isn't a socket: {error.strerror}") from error
    if adopted.type != socket.SOCK_STREAM or not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        adopted.detach()
        raise ConfigError(
            f"descriptor {number} from systemd isn't a listening stream socket (ListenStream=, Accept=no)"
        )
    adopted.setblocking(False)
    return adopted


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())

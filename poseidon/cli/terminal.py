"""Our own stdin, stdout and stderr: raw while a program has the terminal, and always given back as they were.

Descriptors are never made non-blocking: others share them. What may block does so in a thread.
"""

import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import trio

STDIN, STDOUT, STDERR = 0, 1, 2
CHUNK = 64 * 1024
UNKNOWN_SIZE = (24, 80)


class Terminal:
    """The three standard streams."""

    def __init__(self) -> None:
        self.interactive = os.isatty(STDIN) and os.isatty(STDOUT)
        """A person sits at both ends, so the program gets a terminal."""
        self.whole = self.interactive and os.isatty(STDERR)
        """The same goes for what the program writes to stderr."""
        self._raw = False

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        try:
            columns, rows = os.get_terminal_size(STDOUT)
        except OSError:
            return UNKNOWN_SIZE
        return (rows, columns) if rows and columns else UNKNOWN_SIZE

    @property
    def kind(self) -> dict[str, str]:
        """The variable that tells a program which terminal this is, if we know it ourselves."""
        return {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else {}

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Every key goes to the program, Ctrl-C included, if we are interactive."""
        if not self.interactive:
            yield
            return
        before = termios.tcgetattr(STDIN)
        try:
            self._raw = True
            self.make_raw()
            yield
        finally:
            self._raw = False
            restore(before)

    def make_raw(self) -> None:
        """Set raw mode, again if need be: the shell resets it while we are stopped."""
        if self._raw:
            tty.setraw(STDIN, termios.TCSADRAIN)

    async def read(self) -> bytes:
        """What was typed or piped in next; empty at its end."""
        with suppress(OSError):  # plain files can't be waited for, and needn't
            await trio.lowlevel.wait_readable(STDIN)
        try:
            return await trio.to_thread.run_sync(os.read, STDIN, CHUNK, abandon_on_cancel=True)
        except OSError:  # closed, or the terminal has hung up
            return b""

    async def write(self, descriptor: int, text: str) -> None:
        """Write all of *text*; waits for a slow reader, or a terminal that Ctrl-S has stopped."""
        if self._raw and self.whole and descriptor == STDERR:
            text = text.replace("\n", "\r\n")  # it came through a pipe, and our terminal no longer does it
        data = text.encode(errors="replace")
        await trio.to_thread.run_sync(partial(write_all, descriptor, data), abandon_on_cancel=True)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of *data*, blocking."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def restore(settings: list[object]) -> None:
    """Give the terminal back, even from the background, and though it may have hung up."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with suppress(termios.error):
            termios.tcsetattr(STDIN, termios.TCSADRAIN, settings)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTTOU, before)


def keep_standard_descriptors() -> None:
    """Fill closed ones with /dev/null, or the next socket would become our stdout."""
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(STDIN, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", encoding="utf-8", closefd=False)

"""A real terminal with a command in it, and somebody who types and reads."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress

PATIENCE = 20


class Screen:
    """Starts *command* as the foreground of a terminal of its own."""

    def __init__(self, command: list[str], rows: int, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.slave = slave  # kept open, to see which settings are left behind
        termios.tcsetwinsize(self.master, (rows, columns))
        self.before = termios.tcgetattr(slave)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], env=environment, stdin=slave, stdout=slave, stderr=slave
        )
        self.text = ""

    @property
    def settings(self) -> list[object]:
        """How the terminal is set now."""
        return termios.tcgetattr(self.slave)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.master, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Drag the window; the kernel tells the foreground."""
        termios.tcsetwinsize(self.master, (rows, columns))

    def read_until(self, wanted: str, times: int = 1) -> str:
        """All so far, once it contains *wanted*."""
        deadline = time.monotonic() + PATIENCE
        while self.text.count(wanted) < times:
            assert time.monotonic() < deadline, f"{wanted!r} isn't in {self.text!r}"
            assert self.process.poll() is None or self._readable(0), f"ended without {wanted!r}: {self.text!r}"
            self._read(0.1)
        return self.text

    def end(self) -> int:
        """Read on until the command ends; its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"doesn't end: {self.text!r}"
            self._read(0.02)
        while self._readable(0.05):
            self._read(0)
        return int(self.process.returncode)

    def close(self) -> None:
        """Nothing is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self.master], [], [], seconds)[0])

    def _read(self, seconds: float) -> None:
        if self._readable(seconds):
            self.text += os.read(self.master, 65536).decode(errors="replace")

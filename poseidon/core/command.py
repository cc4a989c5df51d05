"""What to run in a runner, and shell quoting. Pure."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

LARGEST_ARGUMENT = 128 * 1024 - 1
"""Bytes of a command or an environment entry that execve takes (Linux: MAX_ARG_STRLEN, 32 pages)."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line for `/bin/bash -c`, or an exact argument vector if *argv* is given."""

    line: str = ""
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    privileged: bool = False
    """As root of the runner, else as `user`."""
    tty: bool = True
    """With a tty, stdin and stdout are a terminal; stderr is apart in any case."""
    rows: int = 0
    columns: int = 0
    cwd: str = ""
    """Empty: the workspace."""

    def arguments(self) -> tuple[str, ...]:
        """The argument vector to execute."""
        return self.argv or ("/bin/bash", "-c", self.line)


def quote(word: str) -> str:
    """*word* as one word of a POSIX shell."""
    return shlex.quote(word)

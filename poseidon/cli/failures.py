"""What goes wrong on the command line, told in one line and by an exit code. No tracebacks, unless asked for."""

import os
import sys
import traceback
from contextlib import suppress
from typing import ClassVar

import click

from poseidon.errors import ConfigError, PoseidonError

FAILED = 1
USAGE = 2
TIME_LIMIT = 124
BROKEN_PIPE = 141
INTERRUPTED = 130
RUN_FAILED = 255


class CommandFailed(PoseidonError):
    """A command couldn't do what it was asked to."""

    exit_code: ClassVar[int] = FAILED


class DaemonUnreachable(CommandFailed):
    """Nobody answers where the daemon should be."""


class DaemonRefused(CommandFailed):
    """The daemon answered with an error. *http_status* is what it said."""

    def __init__(self, message: str, *, http_status: int) -> None:
        super().__init__(message)
        self.http_status = http_status


class UnexpectedAnswer(CommandFailed):
    """What answered doesn't speak as a Poseidon daemon does."""


class RunFailed(CommandFailed):
    """`poseidon run` itself failed, as told apart from the program that it ran."""

    exit_code = RUN_FAILED


def explain(error: BaseException) -> str:
    """*error* for a person: one line, but for the problems of a configuration."""
    match root(error):
        case ConfigError() | RunFailed() as known:  # all problems at once, one a line
            return "\n".join(map(printable, known.message.splitlines()))
        case PoseidonError() as known:
            return printable(known.message)
        case click.ClickException() as known:
            return printable(usage(known))
        case OSError() as known if known.strerror:
            return printable(f"{known.filename}: {known.strerror}" if known.filename else known.strerror)
        case unknown:
            kind = type(unknown).__name__
            return printable(f"internal error: {kind}: {unknown} (POSEIDON_DEBUG=1 shows where)")


def usage(error: click.ClickException) -> str:
    """What click has to say, and where to read more."""
    message = error.format_message()
    context = getattr(error, "ctx", None)
    message = message[:1].lower() + message[1:].rstrip(".")
    return f"{message} (see {context.command_path} --help)" if context else message


def root(error: BaseException) -> BaseException:
    """The one error that matters in a group: nurseries wrap what their tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def printable(text: str) -> str:
    """*text* as one line that can't play tricks with a terminal: others wrote parts of it."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def complain(message: str) -> None:
    """Say *message* on stderr, if anybody is there to read it."""
    with suppress(OSError):
        print(f"poseidon: {message}", file=sys.stderr, flush=True)


def report(error: BaseException) -> None:
    """Tell a person why we fail."""
    if os.environ.get("POSEIDON_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    for line in explain(error).splitlines():
        complain(line)

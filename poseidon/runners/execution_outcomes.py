"""How an execution can end, and what its client says: plain values."""

from dataclasses import dataclass
from enum import StrEnum

from poseidon.core.model import Reason


class Ending(StrEnum):
    """The kinds of outcome."""

    EXIT = "exit"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    RUNNER_GONE = "runner_gone"
    CLIENT_GONE = "client_gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an execution ended. Each has exactly one."""

    ending: Ending
    code: int | None = None
    """The exit code, if the command ended by itself."""
    detail: str = ""
    """Why the runner is gone, or what failed."""

    @staticmethod
    def exited(code: int) -> "Outcome":
        """The command ended by itself."""
        return Outcome(Ending.EXIT, code)

    @staticmethod
    def runner_gone(reason: Reason) -> "Outcome":
        """Its runner ended under it."""
        return Outcome(Ending.RUNNER_GONE, detail=reason)

    @staticmethod
    def failed(cause: str) -> "Outcome":
        """Something that is neither the command's nor the client's doing."""
        return Outcome(Ending.FAILED, detail=cause)


TIMEOUT = Outcome(Ending.TIMEOUT)
OUT_OF_MEMORY = Outcome(Ending.OUT_OF_MEMORY)
CLIENT_GONE = Outcome(Ending.CLIENT_GONE)
SHUTDOWN = Outcome.failed("the service is about to stop")


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The client sends nothing more to stdin."""


@dataclass(frozen=True, slots=True)
class Resize:
    """The client's terminal has another size."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal for the command."""

    number: int


Input = bytes | EndOfInput | Resize | Signal
"""What comes from the client; bytes are for stdin. Empty bytes change nothing."""

"""What is said on an execution's WebSocket, in both directions.

Messages to the client are JSON objects with exactly `type` and, where it belongs, `data`: clients drop any other.
"""

import signal
from codecs import getincrementaldecoder
from typing import assert_never

import msgspec

from poseidon.api.frames import (
    TERMINAL,
    EndOfFile,
    Error,
    ExitCode,
    FromClient,
    Message,
    ResizeTerminal,
    SendSignal,
    Start,
    Stderr,
    Stdout,
    Timeout,
)
from poseidon.core.model import Reason
from poseidon.executors.base import Stream
from poseidon.runners.execution_outcomes import Ending, EndOfInput, Input, Outcome, Resize, Signal

__all__ = ["GOING_AWAY", "NORMAL", "START", "TERMINAL", "Decoder", "final_message", "understand"]

NORMAL, GOING_AWAY = 1000, 1001

OUT_OF_MEMORY = "the allocation was OOM Killed"
STOPPED = "the allocation stopped as expected"
FAILED = "Error executing the request"
OUTPUT = {Stream.STDOUT: Stdout, Stream.STDERR: Stderr}

_control = msgspec.json.Decoder(FromClient)


def _frame(message: Message) -> str:
    return msgspec.json.encode(message).decode()


START = _frame(Start())


class Decoder:
    """Turns the bytes of both streams into text. A character that is split waits for its rest."""

    def __init__(self) -> None:
        decoder = getincrementaldecoder("utf-8")
        self._decoders = {stream: decoder("replace") for stream in Stream}

    def decode(self, stream: Stream, data: bytes) -> str | None:
        """The message with as much of *data* as is complete; None if nothing is."""
        text = self._decoders[stream].decode(data)
        return _frame(OUTPUT[stream](text)) if text else None

    def rest(self) -> list[str]:
        """Messages with what never became complete."""
        rests = {stream: decoder.decode(b"", final=True) for stream, decoder in self._decoders.items()}
        return [_frame(OUTPUT[stream](text)) for stream, text in rests.items() if text]


def final_message(outcome: Outcome) -> str | None:
    """The one message that says how the execution ended; who has left gets none."""
    match outcome:
        case Outcome(Ending.EXIT, int(code)):
            return _frame(ExitCode(code & 0xFF))
        case Outcome(Ending.TIMEOUT) | Outcome(Ending.RUNNER_GONE, detail=Reason.INACTIVE):
            return _frame(Timeout())
        case Outcome(Ending.OUT_OF_MEMORY) | Outcome(Ending.RUNNER_GONE, detail=Reason.OUT_OF_MEMORY):
            return _frame(Error(OUT_OF_MEMORY))
        case Outcome(Ending.RUNNER_GONE, detail=Reason.RELEASED | Reason.STOPPED):
            return _frame(Error(STOPPED))
        case Outcome(Ending.CLIENT_GONE):
            return None
        case _:
            return _frame(Error(FAILED))


def understand(frame: str | bytes, *, terminal: bool) -> Input:
    """What a frame means. Control that makes no sense is nothing: the client may be newer than we are."""
    if isinstance(frame, bytes):
        return frame
    return _understand_control(frame) if terminal else frame.encode("utf-8", "replace")


def _understand_control(frame: str) -> Input:
    try:
        said = _control.decode(frame)
    except (msgspec.DecodeError, RecursionError):
        return b""
    match said:
        case EndOfFile():
            return EndOfInput()
        case ResizeTerminal(rows, columns):
            return Resize(rows, columns)
        case SendSignal(name):
            return Signal(getattr(signal, f"SIG{name}"))
        case other:
            assert_never(other)

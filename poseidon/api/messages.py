"""What is said on an execution's WebSocket, in both directions.

Messages to the client are JSON objects with exactly `type` and, where it belongs, `data`: clients drop any other.
"""

import signal
from codecs import getincrementaldecoder

import msgspec

from poseidon.core.model import Reason
from poseidon.executors.base import Stream
from poseidon.runners.execution_outcomes import Ending, EndOfInput, Input, Outcome, Resize, Signal

TERMINAL = "poseidon.terminal.v1"
"""The subprotocol in which binary frames are stdin, and text frames control."""
NORMAL, GOING_AWAY = 1000, 1001

OUT_OF_MEMORY = "the allocation was OOM Killed"
STOPPED = "the allocation stopped as expected"
FAILED = "Error executing the request"

SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "KILL", "TERM", "USR1", "USR2")} | {
    name: getattr(signal, f"SIG{name}") for name in ("ALRM", "STOP", "TSTP", "CONT", "WINCH")
}


def message(kind: str, data: str | int | None = None) -> str:
    """One message."""
    body = {"type": kind} if data is None else {"type": kind, "data": data}
    return msgspec.json.encode(body).decode()


START = message("start")
TIMEOUT = message("timeout")


class Decoder:
    """Turns the bytes of both streams into text. A character that is split waits for its rest."""

    def __init__(self) -> None:
        decoder = getincrementaldecoder("utf-8")
        self._decoders = {stream: decoder("replace") for stream in Stream}

    def decode(self, stream: Stream, data: bytes) -> str | None:
        """The message with as much of *data* as is complete; None if nothing is."""
        text = self._decoders[stream].decode(data)
        return message(stream, text) if text else None

    def rest(self) -> list[str]:
        """Messages with what never became complete."""
        rests = {stream: decoder.decode(b"", final=True) for stream, decoder in self._decoders.items()}
        return [message(stream, text) for stream, text in rests.items() if text]


def final_message(outcome: Outcome) -> str | None:
    """The one message that says how the execution ended; who has left gets none."""
    match outcome:
        case Outcome(Ending.EXIT, int(code)):
            return message("exit", code & 0xFF)
        case Outcome(Ending.TIMEOUT) | Outcome(Ending.RUNNER_GONE, detail=Reason.INACTIVE):
            return TIMEOUT
        case Outcome(Ending.OUT_OF_MEMORY) | Outcome(Ending.RUNNER_GONE, detail=Reason.OUT_OF_MEMORY):
            return message("error", OUT_OF_MEMORY)
        case Outcome(Ending.RUNNER_GONE, detail=Reason.RELEASED | Reason.STOPPED):
            return message("error", STOPPED)
        case Outcome(Ending.CLIENT_GONE):
            return None
        case _:
            return message("error", FAILED)


def understand(frame: str | bytes, *, terminal: bool) -> Input:
    """What a frame means. Control that makes no sense is nothing: the client may be newer than we are."""
    if isinstance(frame, bytes):
        return frame
    return _control(frame) if terminal else frame.encode("utf-8", "replace")


def _control(frame: str) -> Input:
    try:
        said = msgspec.json.decode(frame)
    except (msgspec.DecodeError, RecursionError):
        return b""
    match said:
        case {"type": "eof"}:
            return EndOfInput()
        case {"type": "resize", "rows": int(rows), "columns": int(columns)} if _is_size(rows) and _is_size(columns):
            return Resize(rows, columns)
        case {"type": "signal", "signal": str(name)} if name in SIGNALS:
            return Signal(SIGNALS[name])
        case _:
            return b""


def _is_size(number: int) -> bool:
    return not isinstance(number, bool) and 0 <= number <= 65535

"""The messages of an execution's WebSocket as types: what is sent is made of them, what comes is read by them, and
`openapi.py` tells clients of them. Nothing here says when they are sent.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

TERMINAL = "poseidon.terminal.v1"
"""The subprotocol in which binary frames are stdin, and text frames control."""

SIGNALS = Literal["HUP", "INT", "QUIT", "KILL", "TERM", "USR1", "USR2", "ALRM", "STOP", "TSTP", "CONT", "WINCH"]
Text = Annotated[str, Meta(description="UTF-8, decoded per stream; what is none has become U+FFFD")]
Size = Annotated[int, Meta(ge=0, le=65535)]


class Message(Struct, tag_field="type", frozen=True, forbid_unknown_fields=True):
    """A message to the client: these keys and no others, for clients drop any other."""


class Start(Message, tag="start", frozen=True):
    """The execution begins. Always the first message."""


class Stdout(Message, tag="stdout", frozen=True):
    """Output, as it comes, cut anywhere."""

    data: Text


class Stderr(Message, tag="stderr", frozen=True):
    """Output of the error stream, which is apart also with a terminal."""

    data: Text


class ExitCode(Message, tag="exit", frozen=True):
    """Final: the command ended by itself, with this code; 128 + n for signal n."""

    data: Annotated[int, Meta(ge=0, le=255)]


class Timeout(Message, tag="timeout", frozen=True):
    """Final: the time limit is over, or the runner's inactivity timeout."""


class Error(Message, tag="error", frozen=True):
    """Final: it ended otherwise, for want of memory, for instance."""

    data: Annotated[str, Meta(description="why, for people")]


ToClient = Start | Stdout | Stderr | ExitCode | Timeout | Error


class Control(Struct, tag_field="type", frozen=True):
    """A text frame from a client that has chosen the terminal's subprotocol."""


class EndOfFile(Control, tag="eof", frozen=True):
    """Nothing more comes for stdin."""


class ResizeTerminal(Control, tag="resize", frozen=True):
    """The client's terminal has another size."""

    rows: Size
    columns: Size


class SendSignal(Control, tag="signal", frozen=True):
    """A signal for the foreground processes."""

    signal: SIGNALS


FromClient = EndOfFile | ResizeTerminal | SendSignal


def schemas(template: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """JSON Schema of ToClient and FromClient, and all that they refer to; *template* makes references of `{name}`s."""
    (to_client, from_client), components = msgspec.json.schema_components([ToClient, FromClient], ref_template=template)
    return to_client, from_client, components

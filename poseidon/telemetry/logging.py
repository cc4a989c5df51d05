"""Logging, set up once: one event is one record, as JSON or for a person's eyes, whatever was logged.

Values may come from clients and their programs, so nothing in them can break the line, colour the terminal or
show a secret. The standard library's logging takes the same way.
"""

import json
import logging
import math
import sys
import traceback
import unicodedata
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

_SECRET_WORDS = frozenset({"token", "tokens", "authorization", "password", "passwd", "secret", "secrets", "cookie"})
_HIDDEN = "[hidden]"
_LONGEST_VALUE = 8192
_LONGEST_TRACEBACK = 32768
_DEEPEST = 5
_SHORTEST_SECRET = 8  # shorter ones would blot out ordinary words
_CHATTY = ("httpx", "httpcore", "hypercorn", "websockets", "quart", "alembic")
_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31;1"}

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["auto", "console", "json"]


def setup_logging(level: Level, form: Form, *, stream: TextIO | None = None, secrets: Collection[str] = ()) -> None:
    """Send everything that is logged to *stream* (stderr), from *level* on; *secrets* never appear in it."""
    out = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    console = form == "console" or (form == "auto" and out.isatty())
    render = _Console(colour=out.isatty()) if console else _as_json
    handler = _Handler(out)
    handler.setFormatter(_formatter(render, [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]))
    logging.basicConfig(handlers=[handler], level=number, force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a cached one would outlive a second set-up, in tests for instance
    )


def _formatter(render: structlog.typing.Processor, secrets: list[str]) -> logging.Formatter:
    return _HidingFormatter(
        secrets,
        foreign_pre_chain=[structlog.contextvars.merge_contextvars, structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            _add_time,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _tell_exception,
            _make_plain,
            render,
        ],
    )


class _Handler(logging.StreamHandler[TextIO]):
    """Drops a record that can't be written or formatted: logging must never end what it reports about."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        error = type(sys.exception()).__name__
        line = {"level": "error", "event": "log record lost", "logger": record.name, "error": error}
        with suppress(OSError):  # nobody reads any more, or the disk is full
            self.stream.write(json.dumps(line) + "\n")


class _HidingFormatter(structlog.stdlib.ProcessorFormatter):
    def __init__(self, secrets: list[str], **chains: Any) -> None:
        super().__init__(**chains)
        self._secrets = sorted({form for secret in secrets for form in _written(secret)}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return line


def _written(secret: str) -> tuple[str, str, str]:
    """The forms in which *secret* can stand in a line."""
    return secret, json.dumps(secret)[1:-1], printable(secret)


def _add_time(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    at = datetime.fromtimestamp(event["_record"].created, UTC)
    return {"time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"), **event}


def _tell_exception(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """An exception with its traceback in an error; below that, only what it was."""
    given = event.pop("exc_info", None)
    event.pop("stack_info", None)
    error = given if isinstance(given, BaseException) else given[1] if isinstance(given, tuple) else sys.exception()
    if not given or error is None:
        return event
    if event.get("level") in ("error", "critical"):
        text = "".join(traceback.format_exception(error))
        cut = len(text) - _LONGEST_TRACEBACK
        event["exception"] = text if cut <= 0 else f"[{cut} characters left out]\n{text[cut:]}"
    else:
        event.setdefault("error", describe(error))
    return event


def describe(error: BaseException) -> str:
    """Type and message of an error, in one line of bounded length."""
    message = printable(str(error))[:500]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _make_plain(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    exception = event.pop("exception", None)
    plain = {str(key): _plain_or_hidden(key, value, 0) for key, value in event.items()}
    return plain | ({"exception": exception} if exception else {})


def _plain_or_hidden(key: object, value: object, depth: int) -> object:
    words = str(key).lower().replace("-", "_").split("_")
    return _HIDDEN if value and not _SECRET_WORDS.isdisjoint(words) else _plain(value, depth)


def _plain(value: object, depth: int) -> object:
    """*value* as something that JSON can hold, of bounded size; never fails."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): _plain_or_hidden(key, item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - whatever somebody's __str__ does
        text = f"[{type(value).__name__} without a text: {type(error).__name__}]"
    cut = len(text) - _LONGEST_VALUE
    return text if cut <= 0 else f"{text[:_LONGEST_VALUE]}[{cut} characters left out]"


def _as_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return json.dumps(event)  # ASCII only: control characters of any kind are escaped


class _Console:
    """One line for a person; a traceback below it, indented, so that it can't pass for lines of ours."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> str:
        rest = dict(event)
        time, level, what = (str(rest.pop(key, "")) for key in ("time", "level", "event"))
        rest.pop("logger", None)
        exception = str(rest.pop("exception", ""))
        facts = "".join(f"  {printable(key)}={_quoted(value)}" for key, value in rest.items())
        below = "".join(f"\n    | {printable(line)}" for line in exception.splitlines())
        return f"{time} {self._painted(level)} {printable(what)}{facts}{below}"

    def _painted(self, level: str) -> str:
        padded = f"{level:<7}"
        return f"\x1b[{_COLOURS.get(level, '0')}m{padded}\x1b[0m" if self._colour else padded


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown = printable(text)
    bare = shown == text and shown and not any(mark in shown for mark in ' ="')
    return shown if bare or not isinstance(value, str) else '"' + shown.replace('"', '\\"') + '"'


def printable(text: str) -> str:
    """*text* with everything escaped that isn't visible: control characters, bidirectional marks, odd line ends."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    visible = letter == " " or unicodedata.category(letter)[0] in "LMNPS"
    return letter if visible else letter.encode("unicode_escape").decode() if letter != "\\" else letter

"""Logging: one event is one record, whatever it holds, and no secret leaves."""

import io
import json
import logging
import re
import sys
import warnings
from datetime import UTC, datetime, timedelta

import pytest
import structlog

from poseidon.telemetry.logging import describe, printable, setup_logging
from tests.logs import undone

__all__ = ["undone"]

NASTY = "a\nb\r\x1b[31mred\x9b1m\u2028line\u202eback\x00end\ttab\ud800"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_json(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_event_is_one_json_object() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    structlog.get_logger("poseidon.x").info("runner claimed", runner_id="1-a", environment_id=1, share=0.5, none=None)
    (line,) = as_json(out)
    at = datetime.fromisoformat(str(line.pop("time")))
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert line == {
        "level": "info",
        "logger": "poseidon.x",
        "event": "runner claimed",
        "runner_id": "1-a",
        "environment_id": 1,
        "share": 0.5,
        "none": None,
    }


def test_times_are_utc_with_milliseconds() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    logging.getLogger("x").info("y")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(as_json(out)[0]["time"]))


@pytest.mark.parametrize("form", ["json", "console"])
def test_nothing_in_an_event_breaks_its_line_or_colours_the_terminal(form: str) -> None:
    out = io.StringIO()
    setup_logging("info", form, stream=out)  # type: ignore[arg-type]
    structlog.get_logger().warning("client left", path=NASTY, **{NASTY: 1}, deep={"x": [NASTY]})
    logging.getLogger("server").warning("bad request %s", NASTY)
    lines = out.getvalue().split("\n")
    assert len(lines) == 3 and lines[2] == ""
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_a_traceback_on_the_console_cant_pass_for_lines_of_ours() -> None:
    out = io.StringIO()
    setup_logging("info", "console", stream=out)
    structlog.get_logger().error(
        "service crashed", exc_info=ValueError("x\n2026-11-30T08:00:00.000Z info    fine\x1b[2J")
    )
    first, *rest = out.getvalue().splitlines()
    assert first.endswith("service crashed")
    assert rest and all(line.startswith("    | ") for line in rest)
    assert "\x1b" not in out.getvalue()


def test_console_values_cant_look_like_further_facts() -> None:
    out = io.StringIO()
    setup_logging("info", "console", stream=out)
    structlog.get_logger().info("x", path='a  user="root"', empty="", plain="grün", number=3)
    assert out.getvalue().rstrip().endswith(r'x  path="a  user=\"root\""  empty=""  plain=grün  number=3')


def test_secrets_are_hidden_by_their_key() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    headers = {"Poseidon-Token": "s3cret", "Authorization": b"s3cret", "Accept": "text/html"}
    structlog.get_logger().info(
        "x", token="s3cret", nomad_token="s3cret", headers=headers, many=[{"password": "s3cret"}]
    )
    logging.getLogger("y").info("z", extra={"cookie": "s3cret"})
    assert "s3cret" not in out.getvalue()
    assert "text/html" in out.getvalue()


@pytest.mark.parametrize("form", ["json", "console"])
def test_known_secrets_are_hidden_wherever_they_stand(form: str) -> None:
    out = io.StringIO()
    secret = 'long "enough" secret'
    setup_logging("info", form, stream=out, secrets=["", "short", secret])  # type: ignore[arg-type]
    structlog.get_logger().error(f"x {secret}", url=f"/?t={secret}", exc_info=ValueError(secret), short="short")
    assert "enough" not in out.getvalue()
    assert "short" in out.getvalue()


def test_a_traceback_belongs_to_errors_only() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    try:
        raise OSError("no route")
    except OSError:
        structlog.get_logger().warning("stream lost", exc_info=True)
        structlog.get_logger().exception("service crashed")
        logging.getLogger("x").exception("failed")
    handled, bug, foreign = as_json(out)
    assert handled["error"] == "OSError: no route" and "exception" not in handled
    assert "Traceback" in str(bug["exception"]) and "Traceback" in str(foreign["exception"])


def test_exception_groups_are_told_with_all_their_members() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    group = ExceptionGroup("several", [ValueError("one"), KeyError("two")])
    structlog.get_logger().error("crashed", exc_info=group)
    assert "one" in str(as_json(out)[0]["exception"]) and "two" in str(as_json(out)[0]["exception"])


def test_what_is_below_the_level_is_dropped() -> None:
    out = io.StringIO()
    setup_logging("warning", "json", stream=out)
    for logger in (structlog.get_logger("a"), logging.getLogger("b")):
        logger.info("dropped")
        logger.warning("kept")
    assert [line["event"] for line in as_json(out)] == ["kept", "kept"]


def test_libraries_are_quiet_unless_debugging() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    logging.getLogger("httpx").info("HTTP Request")
    assert not out.getvalue()
    setup_logging("debug", "json", stream=out)
    logging.getLogger("httpx").info("HTTP Request")
    assert len(as_json(out)) == 1


def test_bound_facts_go_with_every_event_of_the_task() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    with structlog.contextvars.bound_contextvars(runner_id="1-a"):
        structlog.get_logger().info("x")
        logging.getLogger("y").info("z")
    assert [line["runner_id"] for line in as_json(out)] == ["1-a", "1-a"]


def test_warnings_are_logged() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "DeprecationWarning: old" in str(as_json(out)[0]["event"])


class Untellable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_logging_never_fails_and_never_floods() -> None:
    out = io.StringIO()
    setup_logging("info", "json", stream=out)
    loop: list[object] = []
    loop.append(loop)
    values = {
        "odd": Untellable(),
        "bytes": b"\xff",
        "nan": float("nan"),
        "set": {1},
        "loop": loop,
        "at": datetime.now(UTC),
    }
    structlog.get_logger().info("x", **values, long="y" * 100_000)
    logging.getLogger("z").info("%d", "not a number")
    event, lost = as_json(out)
    assert len(out.getvalue()) < 20_000
    assert event["bytes"] == "b'\\xff'" and event["nan"] == "nan" and event["set"] == [1]
    assert lost["event"] == "log record lost"


def test_nobody_reading_any_more_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    setup_logging("info", "json", stream=Broken())
    structlog.get_logger().info("x")
    logging.getLogger("y").info("z")
    assert capsys.readouterr() == ("", "")


def test_auto_is_for_a_person_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        setup_logging("info", "auto", stream=stream)
        structlog.get_logger().info("event")
    assert "\x1b[32minfo" in terminal.getvalue()
    assert as_json(pipe)[0]["event"] == "event"


def test_stderr_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json")
    structlog.get_logger().info("x")
    sys.stderr.flush()
    assert '"event": "x"' in capsys.readouterr().err


def test_an_error_is_described_in_one_bounded_line() -> None:
    assert describe(ValueError("a\nb" + "c" * 1000)) == "ValueError: a\\nb" + "c" * 496
    assert describe(ValueError()) == "ValueError"


def test_visible_text_stays_as_it_is() -> None:
    assert printable("Grüße, \\ 世界 🐍") == "Grüße, \\ 世界 🐍"
    assert printable("\x1b\n\u202e") == "\\x1b\\n\\u202e"

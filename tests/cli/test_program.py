"""What `run` makes of its words, and the escape: without a daemon."""

from pathlib import Path

import pytest

from poseidon.cli.escape import Escape
from poseidon.cli.failures import CommandFailed
from poseidon.cli.program import INTERPRETERS, extras, from_script, from_words


@pytest.mark.parametrize(("suffix", "interpreter"), [*INTERPRETERS.items(), (".PY", "python3")])
def test_a_suffix_tells_the_interpreter(tmp_path: Path, suffix: str, interpreter: str) -> None:
    (tmp_path / f"x{suffix}").write_text("")
    assert from_script(tmp_path / f"x{suffix}", []).line == f"{interpreter} x{suffix}"


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ("#!/bin/sh", "/bin/sh x"),
        ("#! /usr/bin/env python3", "/usr/bin/env python3 x"),
        ("#!/usr/bin/env -S python3 -u\r", "/usr/bin/env '-S python3 -u' x"),
    ],
)
def test_the_shebang_is_read_as_the_kernel_does(tmp_path: Path, first: str, line: str) -> None:
    (tmp_path / "x").write_bytes(f"{first}\nrest".encode())
    assert from_script(tmp_path / "x", []).line == line


def test_a_name_like_an_option_stays_a_name(tmp_path: Path) -> None:
    (tmp_path / "-c.py").write_text("")
    program = from_script(tmp_path / "-c.py", ["a"])
    assert (program.line, list(program.files)) == ("python3 ./-c.py a", ["-c.py"])


def test_a_single_word_is_not_quoted_several_are() -> None:
    assert from_words(["a | b"]).line == "a | b"
    assert from_words(["a", "| b"]).line == "a '| b'"


@pytest.mark.parametrize(
    ("typed", "passed", "leaves"),
    [
        (["~."], b"", True),
        (["ls\r", "~", "."], b"ls\r", True),
        (["x~."], b"x~.", False),
        (["~~."], b"~.", False),
        (["~a", "\r~\r~."], b"~a\r~\r", True),
        (["\n~.more"], b"\n", True),
        (["ü~.\r"], "ü~.\r".encode(), False),
    ],
)
def test_the_escape_is_known_only_at_the_start_of_a_line(typed: list[str], passed: bytes, leaves: bool) -> None:
    escape = Escape()
    assert b"".join(escape.feed(keys.encode()) for keys in typed if not escape.quit) == passed
    assert escape.quit is leaves


def test_a_file_without_an_end_isnt_read_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("poseidon.cli.program.LARGEST_FILE", 1000)
    with pytest.raises(CommandFailed, match="'/dev/zero' is larger than 1000 bytes"):
        extras(["/dev/zero"])
    (tmp_path / "full").write_bytes(bytes(1000))
    assert extras([str(tmp_path / "full")]) == {"full": bytes(1000)}

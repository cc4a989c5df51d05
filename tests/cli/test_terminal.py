"""`poseidon run` in a real terminal: like ssh, and the terminal is given back as it was."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import wait_until
from tests.cli.fake_daemon import FakeDaemon
from tests.cli.screen import Screen

Open = Callable[..., Screen]


def test_the_program_has_a_terminal_of_our_size_and_kind(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "stty size; tty; echo $TERM", rows=31, columns=97)
    assert at.end() == 0
    assert "31 97" in at.text
    assert "/dev/pts/" in at.text
    assert "xterm" in at.text
    assert daemon.executed[0]["tty"] is True


def test_a_change_of_the_window_reaches_the_program(screen: Open, daemon: FakeDaemon) -> None:
    line = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.02; done"
    at = screen("run", "--", line)
    at.read_until("ready")
    wait_for_size(daemon, rows=24, columns=80)
    at.resize(40, 111)
    assert at.end() == 0
    assert "40 111" in at.text


def test_keys_are_echoed_by_the_program_only_once(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "echo ready; read name; echo hello $name")
    at.read_until("ready")
    at.type("ann\r")
    assert at.end() == 0
    assert at.text.count("ann") == 2
    assert "hello ann\r\n" in at.text


def test_ctrl_c_goes_to_the_program(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.02; done")
    at.read_until("ready")
    at.type("\x03")
    assert at.end() == 9
    assert "caught" in at.text
    assert not daemon.runners


def test_ctrl_d_ends_the_programs_input(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "echo ready; cat; echo over")
    at.read_until("ready")
    at.type("some\r\x04")
    assert at.end() == 0
    assert "over" in at.text


def test_a_shell_prompts(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "bash", "--norc")
    at.read_until("bash-")
    at.type("echo $((40 + 2)); exit 5\r")
    assert at.end() == 5
    assert "42\r\n" in at.text


def test_errors_of_the_program_keep_their_place_and_are_aligned(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "for n in 1 2 3; do echo out $n; printf 'err\\n' >&2; done")
    assert at.end() == 0
    assert at.text == "".join(f"out {number}\r\nerr\r\n" for number in (1, 2, 3))


def test_errors_that_come_before_the_program_are_aligned_too(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "if then")
    assert at.end() == 2
    assert "\n" in at.text
    assert at.text.count("\n") == at.text.count("\r\n")


def test_errors_that_go_elsewhere_stay_apart(daemon: FakeDaemon) -> None:
    at = Screen(["bash", "-c", f"{sys.executable} -m poseidon run -- 'tty; echo err >&2' 2> err"], 24, 80)
    try:
        assert at.end() == 0
        assert "/dev/pts/" in at.text
        assert Path("err").read_text() == "err\n"
    finally:
        at.close()


@pytest.mark.parametrize("code", [0, 5, 255])
def test_the_terminal_is_given_back_with_the_exit_code(screen: Open, daemon: FakeDaemon, code: int) -> None:
    at = screen("run", "--", f"exit {code}")
    assert at.end() == code
    assert at.settings == at.before


def test_the_terminal_is_raw_meanwhile(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "echo ready; read x")
    at.read_until("ready")
    assert at.settings != at.before
    at.type("\r")
    at.end()
    assert at.settings == at.before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_gives_the_terminal_back_and_releases(
    screen: Open, daemon: FakeDaemon, number: signal.Signals
) -> None:
    at = screen("run", "--", "trap '' INT; echo ready; read x")
    at.read_until("ready")
    os.kill(at.process.pid, number)
    if number == signal.SIGINT:  # the first one is the program's, in a terminal too
        wait_until(lambda: {"type": "signal", "signal": "INT"} in daemon.controls)
        os.kill(at.process.pid, number)
    assert at.end() == 128 + number
    assert at.settings == at.before
    assert not daemon.runners


def test_a_lost_connection_gives_the_terminal_back(screen: Open, daemon: FakeDaemon) -> None:
    daemon.abandons = True
    at = screen("run", "--", "true")
    assert at.end() == 255
    assert at.settings == at.before
    assert "poseidon: the connection ended before the program did" in at.text


def test_the_escape_leaves_a_program_that_does_not_listen(screen: Open, daemon: FakeDaemon) -> None:
    at = screen("run", "--", "trap '' INT QUIT TSTP; stty raw -echo; echo ready; sleep 30")
    at.read_until("ready")
    at.type("\x03\x1a\r~.")
    assert at.end() == 130
    assert at.settings == at.before
    assert not daemon.runners


def test_ctrl_c_while_claiming_leaves(screen: Open, daemon: FakeDaemon) -> None:
    daemon.slow_claim = 0.3
    at = screen("run", "--", "true")
    wait_until(lambda: daemon.claims != [])
    at.type("\x03")
    assert at.end() == 130
    assert len(daemon.released) == 1


def test_piped_output_means_no_terminal_for_the_program(screen: Open, daemon: FakeDaemon) -> None:
    at = Screen(["bash", "-c", f"{sys.executable} -m poseidon run -- 'read x; tty; echo got $x' | cat"], 24, 80)
    try:
        at.type("line\n")
        assert at.end() == 0
        assert "not a tty" in at.text
        assert "got line" in at.text
        assert daemon.executed[0]["tty"] is False
    finally:
        at.close()


def wait_for_size(daemon: FakeDaemon, rows: int, columns: int) -> None:
    wait_until(lambda: {"type": "resize", "rows": rows, "columns": columns} in daemon.controls)

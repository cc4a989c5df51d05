"""What goes wrong is one line on stderr, with an exit code that scripts can use, and never a traceback."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import poseidon as poseidon_package
from poseidon.cli import main as main_module
from poseidon.cli import status as status_module
from tests.cli.conftest import PATIENCE, Result
from tests.cli.fake_daemon import FakeDaemon

Poseidon = Callable[..., Result]
COMMANDS = [
    ["status"],
    ["environments", "list"],
    ["environments", "put", "1"],
    ["environments", "rm", "1"],
    ["runners", "list"],
    ["runners", "stop", "1-x"],
    ["runners", "stop", "--all"],
    ["run", "--", "true"],
]


def check_told(result: Result, *parts: str, code: int) -> None:
    assert result.code == code, result
    assert result.out == ""
    assert result.err.startswith("poseidon: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err


def test_ctrl_c_while_it_is_being_loaded_ends_it_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(30)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "poseidon", "status"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(poseidon_package.__file__).parents[1]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE) == (b"", b"")
    assert process.returncode == -signal.SIGINT


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Somebody who gives *answer* to whatever is asked, then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(65536)
                    if answer is not None:
                        client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_daemon_that_does_not_run_is_told_with_the_way_to_start_it(poseidon: Poseidon, words: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code = 255 if words[0] == "run" else 1
        check_told(poseidon("--url", url, *words), f"no daemon answers at {url}", "poseidon serve", code=code)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words != ["status"]])
def test_a_wrong_token_is_told_with_the_way_to_give_one(
    poseidon: Poseidon, daemon: FakeDaemon, words: list[str]
) -> None:
    daemon.token = "right"
    code = 255 if words[0] == "run" else 1
    check_told(poseidon(*words), "wants a token", "--token-file", code=code)
    check_told(poseidon("--token", "wrong", *words), "refuses this token", code=code)
    assert not daemon.claims


def test_the_token_comes_by_option_file_variable_or_configuration(
    poseidon: Poseidon, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.token = "right"
    Path("token").write_text("right\n")
    host, port = daemon.url.removeprefix("http://").split(":")
    Path("my.toml").write_text(f'[server]\naddress = "{host}"\nport = {port}\ntoken = "right"\n')
    assert poseidon("--token", "right", "run", "--", "true").code == 0
    assert poseidon("--token-file", "token", "status").code == 0
    with monkeypatch.context() as changed:
        changed.setenv("POSEIDON_TOKEN", "right")
        assert poseidon("status").code == 0
    assert poseidon("--config", "my.toml", "status").code == 1, "the configuration's token isn't for another URL"
    monkeypatch.delenv("POSEIDON_URL")
    assert poseidon("--config", "my.toml", "status").code == 0


def test_a_token_file_that_cannot_be_read_is_told(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    check_told(poseidon("--token-file", "nowhere", "status"), "nowhere", code=1)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:7200", "ftp://x", "http://", "http://[", "http://a b/", "http://127.0.0.1:99999"]
)
def test_a_bad_url_is_told(poseidon: Poseidon, url: str) -> None:
    check_told(poseidon("--url", url, "status"), repr(url), code=1)


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("body", ["<html>\x1b[31m", "", "null", "[1]", '{"runnerId":7}', "\\xff"])
def test_answers_that_are_not_ours_are_told(poseidon: Poseidon, words: list[str], body: str) -> None:
    content = b"\xff" if body == "\\xff" else body.encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(content), content)
    with listening(answer) as url:
        check_told(poseidon("--url", url, *words), code=255 if words[0] == "run" else 1)


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", None]
)
def test_a_connection_that_breaks_is_told(poseidon: Poseidon, answer: bytes | None) -> None:
    with listening(answer) as url:
        check_told(poseidon("--url", url, "environments", "list"), code=1)


def test_the_daemons_words_reach_the_person_but_not_the_terminal(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.instead["GET /api/v1/runners"] = (500, "application/json", '{"message":"sorry\\n\\u001b]0;x"}')
    check_told(poseidon("runners", "list"), "sorry \N{REPLACEMENT CHARACTER}]0;x", code=1)


@pytest.mark.parametrize(
    "words", [["nonsense"], ["status", "--nonsense"], ["environments", "put"], ["environments", "put", "x"]]
)
def test_wrong_usage_is_2(poseidon: Poseidon, words: list[str]) -> None:
    check_told(poseidon(*words), "--help", code=2)


def test_a_fault_of_ours_is_one_line_unless_asked_for_more(
    poseidon: Poseidon, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(status_module, "report", broken)
    check_told(poseidon("status"), "internal error: RuntimeError: planted", "POSEIDON_DEBUG=1", code=1)
    monkeypatch.setenv("POSEIDON_DEBUG", "1")
    assert "Traceback" in poseidon("status").err


def test_a_bad_configuration_is_told_problem_by_problem(poseidon: Poseidon) -> None:
    Path("poseidon.toml").write_text('[server]\nport = "x"\nnonsense = 1\n')
    result = poseidon("status")
    assert result.code == 1
    assert all(line.startswith("poseidon: ") for line in result.err.splitlines())
    assert "port" in result.err
    assert "nonsense" in result.err


@pytest.mark.parametrize("command", [[], *([name] for name in main_module.COMMANDS)])
def test_each_command_explains_itself(poseidon: Poseidon, command: list[str]) -> None:
    result = poseidon(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Usage: poseidon")
    assert len(result.out.splitlines()) > 6


@pytest.mark.parametrize(
    "command",
    [
        "environments list",
        "environments put",
        "environments rm",
        "runners list",
        "runners stop",
        "db upgrade",
        "db check",
        "db backup",
    ],
)
def test_each_subcommand_explains_itself(poseidon: Poseidon, command: str) -> None:
    assert f"Usage: poseidon {command}" in poseidon(*command.split(), "-h").out


def test_the_version_is_told(poseidon: Poseidon) -> None:
    assert poseidon("--version") == Result(0, "poseidon 0.1.0\n", "")


def test_no_words_at_all_show_the_help(poseidon: Poseidon) -> None:
    result = poseidon()
    assert result.code == 2
    assert "Usage: poseidon" in result.err

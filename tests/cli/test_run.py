"""`poseidon run` with pipes: the program's output, input and exit code are ours; the runner never stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from poseidon.cli import session
from tests.cli.conftest import PATIENCE, Child, Result, wait_until
from tests.cli.fake_daemon import FakeDaemon

Poseidon = Callable[..., Result]
Start = Callable[..., Child]


@pytest.fixture(autouse=True)
def nothing_typed() -> Iterator[None]:
    """Tests in this process have no input; `capfd` leaves stdin alone."""
    null = os.open(os.devnull, os.O_RDONLY)
    before = os.dup(0)
    os.dup2(null, 0)
    yield
    os.dup2(before, 0)
    os.close(before)
    os.close(null)


def script(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


@pytest.mark.parametrize("code", [0, 1, 2, 77, 124, 128, 137, 254, 255])
def test_the_exit_code_is_the_programs(poseidon: Poseidon, daemon: FakeDaemon, code: int) -> None:
    assert poseidon("run", "--", f"exit {code}") == Result(code, "", "")
    assert daemon.released
    assert not daemon.runners


def test_stdout_and_stderr_stay_apart(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("run", "--", "echo out; echo err >&2") == Result(0, "out\n", "err\n")


def test_several_words_arrive_as_exact_arguments(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    words = ["a b", "", "$HOME", "it's", 'say "hi"', "ünï\n"]
    assert poseidon("run", "--", "printf", "<%s>", *words).out == '<a b><><$HOME><it\'s><say "hi"><ünï\n>'


def test_a_single_word_is_a_shell_line(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("run", "--", "echo one | tr a-z A-Z").out == "ONE\n"


def test_a_script_is_copied_and_run_with_its_arguments(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    Path("deep").mkdir()
    path = script("deep/show me.py", "import sys; print(sys.argv)")
    assert poseidon("run", path, "--flag", "a b", "--", "-t").out == "['show me.py', '--flag', 'a b', '--', '-t']\n"


def test_the_shebang_wins_over_the_suffix(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("run", script("odd.py", "#!/bin/bash\necho $BASH_VERSION")).out[0].isdigit()


def test_a_script_of_unknown_language_is_refused_with_a_hint(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    result = poseidon("run", script("thing.xyz", "?"))
    assert result.code == 255
    assert "no #! line" in result.err
    assert "--file" in result.err
    assert not daemon.claims


def test_a_missing_script_is_our_failure(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("run", "nowhere.py") == Result(
        255, "", "poseidon: can't read 'nowhere.py': No such file or directory\n"
    )


def test_more_files_and_folders_can_be_copied(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    Path("data/sub").mkdir(parents=True)
    Path("data/sub/b.bin").write_bytes(bytes(range(256)))
    Path("data/empty").write_text("")
    Path("a=b.txt").write_text("equals")
    Path("c.txt").write_text("other")
    files = ["--file", "data", "--file", "a=b.txt", "-f", "c.txt=deep/d.txt"]
    result = poseidon("run", *files, "--", "find . -type f | sort; md5sum < data/sub/b.bin")
    assert result.out.splitlines() == [
        "./a=b.txt",
        "./data/empty",
        "./data/sub/b.bin",
        "./deep/d.txt",
        "e2c865db4162bed963bfaa9ef6ac18f0  -",
    ]


def test_two_files_at_one_place_are_refused(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    Path("x").write_text("1")
    Path("y").write_text("2")
    result = poseidon("run", "--file", "x", "--file", "y=x", "--", "true")
    assert result.code == 255
    assert "two files would be 'x'" in result.err


def test_variables_and_limits_are_passed_on(
    poseidon: Poseidon, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "from here")
    words = ["--env", "A=1=2", "--env", "MINE", "--env", "EMPTY=", "--time-limit", "9", "--privileged"]
    assert poseidon("run", *words, "--", 'echo "$A/$MINE/$EMPTY"').out == "1=2/from here/\n"
    (body,) = daemon.executed
    assert body["timeLimit"] == 9
    assert body["privilegedExecution"] is True
    assert body["tty"] is False
    assert daemon.claims == [{"executionEnvironmentId": 1, "inactivityTimeout": 69}]


def test_a_time_limit_is_124(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.final = '{"type":"timeout"}'
    assert poseidon("run", "--time-limit", "1", "--", "true") == Result(124, "", "poseidon: the time limit is over\n")
    assert not daemon.runners


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_ended(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    assert poseidon("run", "--time-limit", "1", "--", "echo begun; sleep 30").code == 124
    assert not daemon.runners


def test_out_of_memory_is_137(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.final = '{"type":"error","data":"the allocation was OOM Killed"}'
    assert poseidon("run", "--", "true") == Result(137, "", "poseidon: the program was killed: out of memory\n")


@pytest.mark.parametrize(
    "final",
    [
        '{"type":"error","data":"node \\u001b[31mlost"}',
        '{"type":"exit","data":300}',
        "no json",
        '{"type":"exit"}',
        '{"type":"news"}',
    ],
)
def test_other_endings_are_our_failure(poseidon: Poseidon, daemon: FakeDaemon, final: str) -> None:
    daemon.final = final
    result = poseidon("run", "--", "true")
    assert result.code == 255
    assert result.err.startswith("poseidon: ")
    assert "\x1b" not in result.err
    assert not daemon.runners


def test_a_connection_that_ends_early_is_our_failure(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.abandons = True
    result = poseidon("run", "--", "true")
    assert result.code == 255
    assert "the connection ended before the program did" in result.err
    assert not daemon.runners


def test_a_daemon_without_our_protocol_is_refused(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.terminal = False
    result = poseidon("run", "--", "true")
    assert result.code == 255
    assert "poseidon.terminal.v1" in result.err
    assert not daemon.runners


def test_piped_input_reaches_the_program_with_its_end(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "wc -c; tail -c 3")
    out, err = run.communicate(b"x" * 300_000 + bytes(range(256)), timeout=PATIENCE)
    assert (out.strip(), err, run.returncode) == (b"300256", b"", 0)


def test_binary_input_arrives_unchanged(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "md5sum")
    out, _ = run.communicate(bytes(range(256)), timeout=PATIENCE)
    assert out == b"e2c865db4162bed963bfaa9ef6ac18f0  -\n"


def test_input_may_come_from_a_file(process: Start, daemon: FakeDaemon) -> None:
    Path("in.txt").write_text("from a file")
    with open("in.txt", "rb") as source:
        run = process("run", "--", "cat", stdin=source)
        assert run.communicate(timeout=PATIENCE) == (b"from a file", b"")


def test_output_comes_as_it_is_written(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "echo first; read line; echo got $line; read")
    assert run.stdout.readline() == b"first\n"
    run.stdin.write(b"an answer\n")
    run.stdin.flush()
    assert run.stdout.readline() == b"got an answer\n"
    run.communicate(timeout=PATIENCE)
    assert run.returncode == 1


def test_much_output_arrives_complete(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "seq 300000", stdin=subprocess.DEVNULL)
    out, _ = run.communicate(timeout=PATIENCE)
    assert out == b"".join(b"%d\n" % number for number in range(1, 300_001))


def test_the_first_ctrl_c_is_the_programs(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "trap 'echo caught; exit 9' INT; echo ready; sleep 30 & wait")
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=PATIENCE) == (b"caught\n", b"")
    assert run.returncode == 9
    assert not daemon.runners


def test_the_second_ctrl_c_leaves(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "trap 'echo caught' INT; echo ready; while :; do sleep 0.01; done")
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == b"caught\n"
    run.send_signal(signal.SIGINT)
    assert run.wait(PATIENCE) == 130
    assert run.stderr.read() == b""
    assert not daemon.runners


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_us_releases_the_runner(process: Start, daemon: FakeDaemon, number: signal.Signals) -> None:
    run = process("run", "--", "echo ready; sleep 30")
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(number)
    assert run.wait(PATIENCE) == 128 + number
    assert not daemon.runners


def test_a_claim_under_way_is_released_as_well(process: Start, daemon: FakeDaemon) -> None:
    daemon.slow_claim = 0.3
    run = process("run", "--", "true")
    wait_until(lambda: daemon.claims != [])
    run.send_signal(signal.SIGINT)
    assert run.wait(PATIENCE) == 130
    assert len(daemon.released) == 1
    assert not daemon.executed


def test_a_reader_that_has_gone_ends_the_run_quietly(process: Start, daemon: FakeDaemon) -> None:
    run = process("run", "--", "yes")
    run.stdout.read(10)
    run.stdout.close()
    assert run.wait(PATIENCE) == 141
    assert run.stderr.read() == b""
    assert not daemon.runners


def test_closed_standard_streams_are_no_trouble(daemon: FakeDaemon, process: Start) -> None:
    line = f"exec {sys.executable} -m poseidon run -- 'cat; echo out; exit 3' <&- >&- 2>&-"
    run = subprocess.run(
        ["bash", "-c", line], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, timeout=PATIENCE, check=False
    )
    assert run.returncode == 3


def test_a_full_disk_is_our_failure(process: Start, daemon: FakeDaemon) -> None:
    with open("/dev/full", "wb") as full:
        run = process("run", "--", "echo lost", stdout=full)
        _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 255
    assert b"No space left on device" in err
    assert not daemon.runners


def test_without_an_environment_one_is_created(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.environments.clear()
    result = poseidon("run", "--", "echo fine")
    assert (result.code, result.out) == (0, "fine\n")
    assert result.err == "poseidon: there was no environment yet: created 1 (default)\n"
    assert daemon.environments[1]["image"] == "default"
    assert daemon.environments[1]["prewarmingPoolSize"] == 1


def test_of_several_environments_one_must_be_named(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    daemon.add_environment(7, "python")
    result = poseidon("run", "--", "true")
    assert result == Result(
        255, "", "poseidon: which environment? name one with --environment: 1 (default), 7 (python)\n"
    )
    assert poseidon("run", "--environment", "7", "--", "true").code == 0
    assert [claim["executionEnvironmentId"] for claim in daemon.claims] == [7]


def test_an_unknown_environment_is_told_with_the_known_ones(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    result = poseidon("run", "-e", "5", "--", "true")
    assert result == Result(255, "", "poseidon: there is no environment 5; there are: 1 (default)\n")


@pytest.mark.parametrize("step", ["PATCH /api/v1/runners/{}/files", "POST /api/v1/runners/{}/execute"])
def test_a_runner_is_released_whichever_step_fails(poseidon: Poseidon, daemon: FakeDaemon, step: str) -> None:
    class Everywhere(dict[str, tuple[int, str, str]]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            method, path = step.split(" ")
            hit = key.startswith(method) and key.endswith(path.rsplit("/", 1)[1])
            return (500, "application/json", '{"message":"no way","errorCode":"UNKNOWN"}') if hit else default

    daemon.instead = Everywhere()
    assert poseidon("run", script("x.sh", "true")) == Result(255, "", "poseidon: no way\n")
    assert len(daemon.released) == 1


def test_a_runner_that_cannot_be_released_is_told_of(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    class Deaf(dict[str, tuple[int, str, str]]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            return (500, "application/json", '{"message":"too busy"}') if key.startswith("DELETE") else default

    daemon.instead = Deaf()
    result = poseidon("run", "--", "exit 4")
    assert result.code == 4
    (runner,) = daemon.runners
    assert result.err == f"poseidon: runner {runner} may be left over: too busy\n"


def test_a_daemon_that_is_stuck_does_not_keep_us(
    poseidon: Poseidon, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FAREWELL", 0.1)
    daemon.slow_release = 60
    result = poseidon("run", "--", "exit 4")
    assert result.code == 4
    assert "may be left over: the daemon doesn't answer" in result.err


def test_timings_are_told_on_demand(poseidon: Poseidon, daemon: FakeDaemon) -> None:
    lines = poseidon("run", "--timings", script("x.sh", "echo hi")).err.splitlines()
    names = ["environment", "claim", "copy", "execute", "connect", "first output", "program", "release", "total"]
    assert [line.removeprefix("poseidon: ")[:13].strip() for line in lines] == names
    assert all(float(line.removesuffix(" ms").rsplit(" ", 1)[1]) >= 0 for line in lines)


@pytest.mark.parametrize(
    "words", [[], ["--nonsense", "x"], ["--"], ["--env", "=1", "--", "true"], ["--env", "NOT_SET", "--", "true"]]
)
def test_wrong_usage_of_run_is_told_apart_from_a_program(
    poseidon: Poseidon, daemon: FakeDaemon, words: list[str]
) -> None:
    result = poseidon("run", *words)
    assert result.code == 255
    assert result.err.startswith("poseidon: ")
    assert result.err.count("\n") == 1

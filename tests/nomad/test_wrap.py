"""The argument vectors, and that a real bash does with them what is meant."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from poseidon.core.command import LARGEST_ARGUMENT, Command, quote
from poseidon.errors import BadRequest
from poseidon.executors.nomad.exec_marks import READY, Mark, Marks
from poseidon.executors.nomad.wrap import MARKS, run_words, stderr_words

NONCE = b"123456789"
MARK = MARKS[-1] - 7


@dataclass(frozen=True, slots=True)
class Ran:
    """What a wrapped command gave."""

    out: bytes
    err: bytes
    code: int
    marks: list[tuple[int, ...]]


def run(
    command: Command, *, stdin: bytes = b"", set_user: str = "", environment: Mapping[str, str] | None = None
) -> Ran:
    """Run the wrapper, tell it the nonce, take its output apart."""
    found = subprocess.run(
        run_words(command, set_user=set_user, mark=MARK),
        input=NONCE + b"\n" + stdin,
        capture_output=True,
        check=False,
        env={"PATH": os.environ["PATH"], **(environment or {})},
        timeout=20,
    )
    begin, ready, rest = found.stdout.split(b"\x1e", 2)
    assert begin == b""
    (told,) = Marks(READY).feed(b"\x1e" + ready + b"\x1e")
    assert isinstance(told, Mark)
    out, marks = apart(rest)
    err, _ = apart(found.stderr)
    assert marks[0] == ()
    assert marks[1][0] == found.returncode
    return Ran(out, err, found.returncode, [told.numbers, *marks])


def apart(data: bytes) -> tuple[bytes, list[tuple[int, ...]]]:
    scanner = Marks(NONCE)
    parts = [*scanner.feed(data), scanner.rest()]
    return (
        b"".join(part for part in parts if isinstance(part, bytes)),
        [part.numbers for part in parts if isinstance(part, Mark)],
    )


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
NAMES = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(words=st.lists(TEXT, max_size=4))
@example(words=["a b", "", "$HOME", "`id`", "'", '"', "\\", "\n", "-n", "ü€𝄞", "*"])
def test_any_argument_arrives_byte_for_byte(words: list[str]) -> None:
    ran = run(Command(argv=("printf", "<%s>", "first", *words), tty=False))
    assert ran.out.decode() == "".join(f"<{word}>" for word in ["first", *words])


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
@example(text="a\nb 'c' \"d\" $(e) `f` \\ !g")
def test_any_command_line_arrives_byte_for_byte(text: str) -> None:
    assert run(Command(line=f"printf %s {quote(text)}", tty=False)).out.decode() == text


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(NAMES, TEXT, max_size=4))
@example(values={"EMPTY": "", "LINES": "a\nb\n", "-i": "option", "--": "", "QUOTES": "'\"`$(id)$HOME\\", "EQUALS": "="})
def test_any_environment_value_arrives_byte_for_byte(values: dict[str, str]) -> None:
    ran = run(Command(argv=("env", "-0"), environment=values, tty=False))
    found = dict(entry.split("=", 1) for entry in ran.out.decode().split("\0") if entry)
    assert {name: found[name] for name in values if name != "CODEOCEAN"} == {
        name: value for name, value in values.items() if name != "CODEOCEAN"
    }


def test_commands_of_many_lines_are_run_as_they_are() -> None:
    line = "for i in 1 2; do\n  echo \"$i\"\ndone\ncat <<'END'\n$x\nEND\n"
    assert run(Command(line=line, tty=False)).out == b"1\n2\n$x\n"


def test_codeocean_is_true_whatever_the_client_says() -> None:
    ran = run(Command(argv=("env",), environment={"CODEOCEAN": "false", "OTHER": "1"}, tty=False))
    assert [line for line in ran.out.splitlines() if line.startswith(b"CODEOCEAN")] == [b"CODEOCEAN=true"]
    assert b"OTHER=1" in ran.out


def test_nomads_variables_are_unset_and_no_others() -> None:
    ran = run(
        Command(argv=("env",), tty=False),
        environment={"NOMAD_ALLOC_ID": "x", "NOMAD_META_a": "b c", "NOMADIC": "y", "MINE": "z"},
    )
    assert b"NOMAD_" not in ran.out
    assert b"NOMADIC=y" in ran.out
    assert b"MINE=z" in ran.out


def test_a_client_may_set_such_a_variable_itself() -> None:
    assert run(Command("echo $NOMAD_X", environment={"NOMAD_X": "mine"}, tty=False)).out == b"mine\n"


def test_only_unprivileged_commands_change_the_user() -> None:
    user = "env 'AS=the user'"
    assert run(Command("echo $AS", tty=False), set_user=user).out == b"the user\n"
    assert run(Command("echo $AS", tty=False, privileged=True), set_user=user).out == b"\n"


def test_a_command_begins_where_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "-a 'b' $c"
    folder.mkdir()
    assert run(Command("pwd", cwd=str(folder), tty=False)).out.decode() == f"{folder}\n"
    missing = run(Command("pwd", cwd="/no/where", tty=False))
    assert (missing.code, missing.out) == (126, b"")
    assert b"/no/where: No such file" in missing.err


@pytest.mark.parametrize("cwd", ["", "/"])
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (Command(line="-x"), 127, b"-x: command not found"),
        (Command(line="+x"), 127, b"+x: command not found"),
        (Command(line=""), 0, b""),
        (Command(argv=("no=such",)), 127, b"no=such: not found"),
        (Command(argv=("no-such-program",)), 127, b"no-such-program"),
        (Command(argv=("/etc/passwd",)), 126, b"Permission denied"),
        (Command(line="exit 255"), 255, b""),
        (Command(line="kill -9 $$"), 137, b"Killed"),
    ],
)
def test_odd_commands_fail_as_in_any_shell(command: Command, code: int, said: bytes, cwd: str) -> None:
    ran = run(Command(command.line, command.argv, tty=False, cwd=cwd))
    assert ran.code == code
    assert said in ran.err


def test_a_program_with_an_equals_sign_in_its_name_is_run(tmp_path: Path) -> None:
    program = tmp_path / "a=b"
    program.write_text("#!/bin/sh\necho $1\n")
    program.chmod(0o755)
    assert run(Command(argv=(str(program), "arg"), tty=False)).out == b"arg\n"


@pytest.mark.parametrize(
    "command",
    [
        Command(argv=("echo", "a\0b")),
        Command(argv=("echo", "\ud800")),
        Command(line="true", environment={"A=B": "x"}),
        Command(line="true", environment={"": "x"}),
        Command(line="true", environment={"A": "x\0"}),
        Command(line="x" * (LARGEST_ARGUMENT + 1)),
        Command(line="true", environment={"A": "x" * LARGEST_ARGUMENT}),
    ],
)
def test_what_no_program_can_be_given_is_refused(command: Command) -> None:
    with pytest.raises(BadRequest):
        run_words(command, set_user="", mark=MARK)


def test_the_largest_argument_arrives() -> None:
    line = ": " + "x" * (LARGEST_ARGUMENT - 2)
    assert run(Command(line=line, tty=False)).code == 0


def test_stdin_after_the_nonce_is_the_commands() -> None:
    data = bytes(range(256)) * 100
    assert run(Command(argv=("cat",), tty=False), stdin=data).out == data


@pytest.mark.parametrize("told", [b"", b"\n", b"go\n"])
def test_without_a_nonce_nothing_is_run(told: bytes, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    words = run_words(Command(argv=("touch", str(witness))), set_user="", mark=MARK)
    ended = subprocess.run(words, input=told, capture_output=True, check=False, timeout=20)
    assert ended.returncode == 125
    assert not witness.exists()


def test_the_nonce_is_nowhere_that_user_code_could_read() -> None:
    line = "cat /proc/$PPID/cmdline /proc/$PPID/environ /proc/self/environ; ls -l /proc/$PPID/fd; set; env"
    ran = run(Command(line, tty=False))
    assert b"read -rs" in ran.out  # the wrapper's own argument vector was there to be read
    assert NONCE not in ran.out


def test_all_that_a_command_starts_bears_its_mark() -> None:
    ran = run(Command("ulimit -Hq; (setsid bash -c 'ulimit -Hq' &) | cat; ulimit -q 819200 || ulimit -Hq", tty=False))
    assert set(ran.out.split()) in ({str(MARK).encode()}, {str(MARK).encode(), b"819200"})  # root may lift it
    assert ran.marks[0][-1] == MARK


def test_the_command_has_no_descriptors_but_its_three() -> None:
    assert run(Command("ls /proc/self/fd", tty=False)).out.split() == [b"0", b"1", b"2", b"3"]  # 3: ls's own


def test_the_wrapper_outlives_what_a_terminal_sends_to_all() -> None:
    for name in ("INT", "QUIT", "TERM"):
        ran = run(Command(f"trap '' {name}; kill -{name} $PPID; sleep 0.02; exit 4", tty=False))
        assert ran.code == 4


def test_a_command_keeps_the_signals_that_it_would_have() -> None:
    ran = run(Command("exec grep SigIgn /proc/self/status", tty=False))
    ignored = int(ran.out.split()[1], 16)
    assert not ignored & (1 << (2 - 1) | 1 << (3 - 1) | 1 << (15 - 1))


def test_the_fifo_is_made_passed_on_and_removed(tmp_path: Path) -> None:
    fifo = tmp_path / "some.fifo"
    process = subprocess.Popen(stderr_words(str(fifo)), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    assert process.stdout.read(7) == b"\x1eready\x1e"
    assert fifo.is_fifo()
    with fifo.open("wb", buffering=0) as writer:
        process.stdin.write(NONCE + b"\n")
        process.stdin.close()
        writer.write(b"something")
    assert process.stdout.read() == b"something\x1e" + NONCE + b"\x1e"
    assert process.wait(10) == 0
    process.stdout.close()
    assert not fifo.exists()


def test_a_fifo_that_nobody_uses_is_removed(tmp_path: Path) -> None:
    fifo = tmp_path / "some.fifo"
    ended = subprocess.run(
        stderr_words(str(fifo)), stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20
    )
    assert ended.returncode == 125
    assert not fifo.exists()


def test_a_fifo_that_cant_be_made_is_told_why() -> None:
    ended = subprocess.run(
        stderr_words("/no/where/x.fifo"), input=NONCE + b"\n", capture_output=True, check=False, timeout=20
    )
    assert (ended.returncode, ended.stdout) == (125, b"")
    assert b"/no/where/x.fifo" in ended.stderr

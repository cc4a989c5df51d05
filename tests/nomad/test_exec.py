"""Commands in allocations: what goes in, what comes out, how they end. Really run, for both kinds of driver."""

import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from poseidon.core.command import Command
from poseidon.errors import BadRequest
from tests.fakes.nomad_exec import Behaviour
from tests.fakes.nomad_exec_boxes import Command as BoxCommand
from tests.nomad.exec_site import Result, Site, drain, open_site, read_until

FLAKY = Behaviour(lose_exit=1.0, lose_close=0.5)
LATE = Behaviour(late_exit=60.0)

both = pytest.mark.parametrize("driver", ["docker", "raw_exec"])
docker = pytest.mark.parametrize("driver", ["docker"])
with_and_without_tty = pytest.mark.parametrize("tty", [False, True])


@pytest.fixture
async def site(driver: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(driver, tmp_path) as site:
        yield site


@both
async def test_without_a_terminal_the_streams_stay_apart(site: Site) -> None:
    result = await site.run("echo out; echo err >&2; tty", tty=False)
    assert (result.out, result.err, result.code) == ("out\nnot a tty\n", "err\n", 1)
    assert len(site.server.requests) == 1


@both
async def test_with_a_terminal_stderr_stays_apart_and_as_it_is(site: Site) -> None:
    result = await site.run("test -t 0 && test -t 1 && echo out; test -t 2 || echo err >&2; exit 3")
    assert (result.out, result.err, result.code) == ("out\r\n", "err\n", 3)
    assert [head.tty for head in site.server.requests].count(True) == 1
    assert len(site.server.requests) == 2


@both
async def test_what_is_typed_at_a_terminal_is_echoed_but_never_the_nonce(site: Site) -> None:
    async with site.open(Command("read line; echo got $line")) as process:
        await process.send(b"hello\n")
        assert await drain(process) == (b"hello\r\ngot hello\r\n", b"")


@both
@with_and_without_tty
async def test_the_exit_code_is_the_programs_own(site: Site, tty: bool) -> None:
    lines = {f"exit {code}": code for code in (0, 1, 126, 127, 137, 255)}
    lines |= {"kill -9 $$": 137, "kill -TERM $$": 143, "no-such-program": 127}
    for line, code in lines.items():
        assert (await site.run(line, tty=tty)).code == code, line


@docker
@with_and_without_tty
async def test_no_exit_code_is_lost_with_its_frame(site: Site, tty: bool) -> None:
    site.server.behaviour = FLAKY
    for code in (0, 3):
        async with site.open(Command(f"echo out; echo err >&2; exit {code}", tty=tty)) as process:
            out, err = await drain(process)
            assert (out.replace(b"\r", b""), err, (await process.wait()).code) == (b"out\n", b"err\n", code)


@docker
@with_and_without_tty
async def test_an_execution_ends_when_it_ends_and_not_later(site: Site, tty: bool) -> None:
    site.server.behaviour = LATE
    began = trio.current_time()
    async with site.open(Command("echo out; exit 3", tty=tty)) as process:
        assert (await process.wait()).code == 3
        await drain(process)
    assert trio.current_time() - began < 10


@both
@with_and_without_tty
async def test_a_wrapper_that_is_killed_still_leaves_its_frames_code(site: Site, tty: bool) -> None:
    assert (await site.run("kill -9 $PPID; sleep 0.05", tty=tty)).code == 137


@both
async def test_an_exit_comes_though_stdin_is_never_closed(site: Site) -> None:
    async with site.open(Command("echo out", tty=False)) as process:
        assert await drain(process) == (b"out\n", b"")
        assert (await process.wait()).code == 0


@both
async def test_a_session_is_over_soon_after_its_command_though_stdin_was_never_closed(site: Site) -> None:
    async with site.open(Command("true", tty=False)) as process:
        await process.wait()
        while site.server.open:
            await trio.sleep(0.005)


@both
@with_and_without_tty
async def test_what_is_said_before_the_command_runs_is_none_of_its_output(
    site: Site, tmp_path: Path, tty: bool
) -> None:
    noise = tmp_path / "noise"
    noise.write_text("echo noise; echo noise >&2\n")
    site.box.environment["BASH_ENV"] = str(noise)
    async with site.open(Command(argv=("true",), tty=tty)) as process:
        assert await drain(process) == (b"", b"")


@both
async def test_stdin_arrives_whole_and_ends(site: Site) -> None:
    data = random.Random(1).randbytes(300_000)
    async with site.open(Command("cat; echo . >&2", tty=False)) as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.send, data[:200_001])
        out = b""
        while len(out) < 200_001:
            chunk = await process.receive()
            assert chunk
            out += chunk[1]
        await process.send(data[200_001:])
        await process.close_stdin()
        rest, err = await drain(process)
    assert (out + rest, err) == (data, b".\n")


@both
async def test_end_of_input_reaches_a_program_at_a_terminal(site: Site) -> None:
    for sent in (b"line\n", b"unfinished", b""):
        async with site.open(Command("stty -echo; echo ready; cat | wc -c")) as process:
            await read_until(process, "ready\r\n")
            await process.send(sent)
            await process.close_stdin()
            assert (await drain(process))[0].strip().decode() == str(len(sent)), sent


@both
async def test_a_terminals_stdin_is_never_closed_for_it_would_lose_output(site: Site) -> None:
    result = await site.run("read a; read b; sleep 0.1; echo after", stdin=b"x\n")
    assert result.out.endswith("after\r\n")


@both
@with_and_without_tty
async def test_input_for_a_program_that_doesnt_read_never_blocks_its_end(site: Site, tty: bool) -> None:
    async with site.open(Command("stty raw -echo 2>/dev/null; echo ready; sleep 0.1", tty=tty)) as process:
        await read_until(process, "ready")
        await process.send(b"x" * 2_000_000)
        assert (await process.wait()).code == 0
        await process.send(b"too late")
        await process.close_stdin()
        await process.close_stdin()
        await drain(process)


@both
@with_and_without_tty
async def test_much_output_arrives_complete_and_in_order(site: Site, tty: bool) -> None:
    result = await site.run("seq 1 100000; seq 1 100000 >&2", tty=tty)
    expected = "".join(f"{number}\n" for number in range(1, 100_001))
    assert result.out.replace("\r\n", "\n") == expected
    assert result.err == expected


@both
async def test_output_that_looks_like_a_mark_is_output(site: Site) -> None:
    line = r"printf '\036ready 1 2 3 4 5\036\0361234 0 0 0\036\036'; printf '\0361' >&2"
    for tty in (False, True):
        result = await site.run(line, tty=tty)
        assert (result.out, result.err) == ("\x1eready 1 2 3 4 5\x1e\x1e1234 0 0 0\x1e\x1e", "\x1e1")


@both
async def test_bytes_that_are_no_text_arrive(site: Site) -> None:
    async with site.open(Command(r"printf '\377\0\001'", tty=False)) as process:
        assert await drain(process) == (b"\xff\x00\x01", b"")


@both
async def test_a_slow_reader_holds_the_program_back(site: Site, tmp_path: Path) -> None:
    program = """
import os
progress = os.open("progress", os.O_RDWR | os.O_CREAT)
for number in range(1, 30_000):
    os.write(1, b"%01000d" % number)
    os.pwrite(progress, b"%06d" % number, 0)
"""
    async with site.open(Command(argv=("python3", "-c", program), tty=False)) as process:
        assert await process.receive()
        held = -1
        while held != (held := int((tmp_path / "progress").read_text() or 0)):
            await trio.sleep(0.2)
        assert 100 < held < 20_000
        assert await process.kill()


@both
async def test_a_terminal_has_its_size_from_the_beginning_and_when_it_changes(site: Site) -> None:
    site.server.behaviour = Behaviour(start_delay=0.02)
    line = "stty size; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done"
    async with site.open(Command(line, rows=40, columns=120)) as process:
        assert (await read_until(process, "ready\r\n")).startswith("40 120\r\n")
        await process.resize(10, 20)
        assert "10 20" in await read_until(process, "20\r\n")


@docker
async def test_a_size_is_told_again_once_the_command_runs(site: Site, tmp_path: Path) -> None:
    """Also where an image has no stty for the wrapper to set it at once."""
    site.server.behaviour = Behaviour(start_delay=0.02)
    (tmp_path / "stty").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "stty").chmod(0o755)
    site.box.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    line = "while [[ $(stty size) != '40 120' ]]; do sleep 0.01; done; echo resized"
    async with site.open(Command(line, environment={"PATH": os.environ["PATH"]}, rows=40, columns=120)) as process:
        await read_until(process, "resized")


@both
async def test_a_terminal_has_its_size_before_nomad_passes_it_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoxCommand, "resize", lambda *_: None)
    async with site.open(Command("stty size", rows=40, columns=120)) as process:
        assert await drain(process) == (b"40 120\r\n", b"")


@both
async def test_resizing_without_a_terminal_does_nothing(site: Site) -> None:
    async with site.open(Command("read x; echo $x", tty=False, rows=10, columns=10)) as process:
        await process.resize(20, 20)
        await process.send(b"fine\n")
        assert await drain(process) == (b"fine\n", b"")


@both
@with_and_without_tty
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGQUIT])
async def test_signals_reach_the_foreground_processes(site: Site, tty: bool, number: int) -> None:
    program = f"import signal, time\nsignal.signal({int(number)}, lambda *_: exit(7))\nprint('ready', flush=True)\n"
    command = Command(argv=("python3", "-c", program + "time.sleep(60)"), tty=tty)
    async with site.open(command) as process:
        await read_until(process, "ready")
        await process.signal(number)
        assert (await process.wait()).code == 7


@both
async def test_a_signal_kills_whom_it_should_and_is_told(site: Site) -> None:
    for tty in (False, True):
        async with site.open(Command("echo ready; exec sleep 60", tty=tty)) as process:
            await read_until(process, "ready")
            await process.signal(signal.SIGTERM)
            assert (await process.wait()).code == 143
            await process.signal(signal.SIGTERM)


@both
async def test_quitting_at_a_terminal_costs_no_connection(site: Site) -> None:
    async with site.open(Command(argv=("sh", "-c", "echo ready; sleep 60; true"))) as process:
        await read_until(process, "ready")
        await process.signal(signal.SIGQUIT)
        assert (await process.wait()).code == 131
    assert len(site.server.requests) == 2


@both
async def test_control_c_typed_at_a_terminal_interrupts(site: Site) -> None:
    async with site.open(Command("echo ready; sleep 60")) as process:
        await read_until(process, "ready")
        await process.send(b"\x03")
        assert (await process.wait()).code == 130


@both
async def test_waiting_can_be_cancelled_and_repeated(site: Site) -> None:
    async with site.open(Command("read line; exit 5", tty=False)) as process:
        with trio.move_on_after(0.02) as scope:
            await process.wait()
        assert scope.cancelled_caught
        await process.send(b"\n")
        assert [(await process.wait()).code for _ in range(3)] == [5, 5, 5]


@both
@with_and_without_tty
async def test_a_background_process_may_hold_the_output_after_the_end(site: Site, tty: bool) -> None:
    if (site.box.driver, tty) == ("raw_exec", False):
        pytest.skip("who is left can only be seen in a container")
    own = "setsid" if tty else ""  # the end of a terminal's session hangs up on all others in it
    async with site.open(Command(f"{own} sleep 60 & sleep 0.05; echo done", tty=tty)) as process:
        assert (await process.wait()).code == 0
        assert (await read_until(process, "\n")).strip() == "done"
        with trio.move_on_after(0.05) as scope:
            await process.receive()
        assert scope.cancelled_caught
        assert await process.kill()
        assert await process.receive() is None
    await site.until_empty()


@docker
async def test_what_a_background_process_still_writes_arrives(site: Site) -> None:
    async with site.open(Command("(sleep 0.1; echo late; echo later >&2) & echo done", tty=False)) as process:
        assert (await process.wait()).code == 0
        assert await drain(process) == (b"done\nlate\n", b"later\n")


@both
async def test_many_executions_at_once_dont_mix(site: Site) -> None:
    results: dict[str, Result] = {}

    async def one(name: str, tty: bool) -> None:
        results[name] = await site.run(f"for i in $(seq 200); do echo {name}; done; echo {name} >&2", tty=tty)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(one, f"name{number}", number % 2 == 0)
    assert len(results) == 10
    for name, result in results.items():
        assert result.out.replace("\r", "") == f"{name}\n" * 200
        assert result.err == f"{name}\n"


def fifos(site: Site) -> set[str]:
    """Those of our commands that are there."""
    asked = {word for head in site.server.requests for word in head.words if word.endswith(".fifo")}
    return {Path(path).name for path in asked if Path(path).exists()}


@both
async def test_a_fifo_is_in_tmp_only_while_it_is_needed(site: Site) -> None:
    async with site.open(Command("ls /tmp; echo that was all; read x")) as process:
        listed = await read_until(process, "that was all")
        (name,) = fifos(site)
        assert name in listed
        await process.send(b"\n")
        await drain(process)
        assert fifos(site) == set()
    async with site.open(Command("true", tty=False)) as process:
        await drain(process)
    assert all(".fifo" not in " ".join(head.words) for head in site.server.requests[2:])


@both
async def test_two_fifos_have_nothing_in_common(site: Site) -> None:
    for _ in range(2):
        await site.run("true")
    names = {word for head in site.server.requests for word in head.words if word.endswith(".fifo")}
    assert len(names) == 2


@docker
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_somebody_without_privileges_has_all_three_streams(site: Site, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    user = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    async with site.open(Command("id -u; echo a >&2; echo b > /dev/stderr"), set_user=user) as process:
        assert await drain(process) == (b"65534\r\n", b"a\nb\n")
    async with site.open(Command("id -u", privileged=True), set_user=user) as process:
        assert await drain(process) == (b"0\r\n", b"")


@docker
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory/memory.oom_control").exists(), reason="no cgroup v1")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change what a command sees there")
async def test_a_kill_for_want_of_memory_is_told(site: Site) -> None:
    line = "printf 'oom_kill 7000\n' > events; mount --bind events /sys/fs/cgroup/memory/memory.oom_control; "
    ended = (await site.run(line + "kill -9 $$", tty=False)).exit
    assert (ended.code, ended.out_of_memory) == (137, True)
    again = (await site.run("kill -9 $$", tty=False)).exit
    assert (again.code, again.out_of_memory) == (137, False)


@both
async def test_what_no_program_can_be_given_is_refused_before_anything_is_sent(site: Site) -> None:
    for command in (Command("a\0b"), Command("x" * 200_000), Command("x", environment={"a": "\x01" * 120_000})):
        for repeat in range(3):
            environment = {f"{name}{repeat}": value for name, value in command.environment.items()}
            full = {f"{n}": "\x01" * 60_000 for n in range(4)} if command.environment else environment
            with pytest.raises(BadRequest):
                async with site.open(Command(command.line, environment=full)):
                    pass
    assert site.server.requests == []


@both
async def test_nomads_variables_arent_seen(site: Site) -> None:
    assert "NOMAD_" in str(site.box.environment)
    result = await site.run("env", environment={"A": "b c"})
    assert "NOMAD_" not in result.out
    assert "A=b c\r\n" in result.out
    assert "CODEOCEAN=true\r\n" in result.out

"""Commands in a sandbox: what goes in, what comes out, how they end."""

import os
import signal
from dataclasses import replace

import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, AllocationId
from poseidon.errors import AllocationGone, BadRequest, Unsupported
from poseidon.executors.base import Stream
from poseidon.executors.local.executor import LocalExecutor
from tests.local.support import IS_ROOT, PATIENCE, Result, World, drain, read_until, run, start

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root has two users in a sandbox")


async def test_the_two_output_streams_stay_apart(world: World) -> None:
    async with world.executor() as executor:
        result = await run(executor, await start(executor), "echo out; echo err >&2")
    assert (result.out, result.err, result.code) == ("out\n", "err\n", 0)


async def test_with_a_terminal_stderr_stays_apart_and_as_it_is(world: World) -> None:
    async with world.executor() as executor:
        result = await run(executor, await start(executor), "tty; echo out; echo err >&2", tty=True)
    assert result.out.splitlines() == ["/dev/pts/0", "out"]
    assert result.err == "err\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        *((f"exit {n}", n) for n in (0, 1, 2, 63, 127, 128, 254, 255)),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("kill -QUIT $$; sleep 0", 0),  # bash ignores it
    ],
)
async def test_the_exit_code_is_the_programs_own(world: World, line: str, code: int) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for tty in (False, True):
            assert (await run(executor, allocation, line, tty=tty)).code == code


async def test_a_missing_command_is_127_with_the_shells_message(world: World) -> None:
    async with world.executor() as executor:
        result = await run(executor, await start(executor), "no-such-program-here")
    assert result.code == 127
    assert "no-such-program-here: command not found" in result.err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("no-such-program",), 127, "no-such-program: No such file"),
        (("/no/such/program",), 127, "/no/such/program: No such file"),
        (("/etc/passwd",), 126, "/etc/passwd: Permission denied"),
        (("printf", "%s|", "a b", "", "$HOME", "'", "ü\n"), 0, ""),
    ],
)
async def test_an_argument_vector_is_run_exactly(world: World, argv: tuple[str, ...], code: int, message: str) -> None:
    async with world.executor() as executor:
        result = await run(executor, await start(executor), argv=argv)
    assert result.code == code
    assert message in result.err
    if not code:
        assert result.out == "a b||$HOME|'|ü\n|"


async def test_environment_values_arrive_byte_for_byte(world: World) -> None:
    values = {"EMPTY": "", "QUOTES": "'\"`$(id)$HOME\\", "LINES": "a\nb\n", "UNICODE": "ü€𝄞", "EQUALS": "a=b=c"}
    async with world.executor() as executor:
        result = await run(executor, await start(executor), argv=("env", "-0"), environment=values)
    found = dict(entry.split("=", 1) for entry in result.out.split("\0") if entry)
    assert {name: found[name] for name in values} == values


async def test_every_command_has_the_promised_environment_and_no_more(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        plain = await run(executor, allocation, argv=("env", "-0"), environment={"CODEOCEAN": "no", "PATH": "/bin"})
        terminal = await run(executor, allocation, argv=("env", "-0"), tty=True)
    found = dict(entry.split("=", 1) for entry in plain.out.split("\0") if entry)
    assert found == {"PATH": "/bin", "HOME": "/workspace", "USER": "user", "LANG": "C.UTF-8", "CODEOCEAN": "true"}
    assert "TERM=xterm-256color" in terminal.out


async def test_commands_begin_in_the_workspace_or_where_told(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        assert (await run(executor, allocation, "pwd")).out == "/workspace\n"
        assert (await run(executor, allocation, "pwd", cwd="/tmp")).out == "/tmp\n"
        missing = await run(executor, allocation, "pwd", cwd="/nowhere")
    assert missing.code == 126
    assert missing.err == "/nowhere: No such file or directory\n"


@needs_root
async def test_a_privileged_command_is_root_of_the_sandbox(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        assert (await run(executor, allocation, "id -un; echo $HOME", privileged=True)).out == "root\n/root\n"
        assert (await run(executor, allocation, "id -un; id -Gn")).out == "user\nuser\n"


@needs_root
async def test_what_root_protects_the_user_cant_change(world: World) -> None:
    script = "mkdir -m 1777 protected; echo kept > protected/file; chmod 744 protected/file"
    async with world.executor() as executor:
        allocation = await start(executor)
        await run(executor, allocation, script, privileged=True)
        assert (await run(executor, allocation, "echo x > protected/mine")).code == 0
        for attempt in ("rm -r protected", "rm -f protected/file", "mv protected away", "rmdir protected"):
            result = await run(executor, allocation, attempt)
            assert result.code, attempt
            assert "Operation not permitted" in result.err, attempt
        assert "Permission denied" in (await run(executor, allocation, "echo x >> protected/file")).err
        assert (await run(executor, allocation, "cat protected/file")).out == "kept\n"


@pytest.mark.skipif(IS_ROOT, reason="root has two users")
async def test_without_root_a_privileged_command_is_refused_with_the_reason(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        with pytest.raises(Unsupported, match="not as root"):
            await run(executor, allocation, "id", privileged=True)


@pytest.mark.parametrize(
    "command",
    [
        Command(argv=("echo", "a\0b")),
        Command(argv=("echo", "\ud800")),
        Command(line="true", environment={"A=B": "x"}),
        Command(line="true", environment={"": "x"}),
        Command(line="true", environment={"A": "x\0"}),
    ],
)
async def test_what_no_program_can_be_given_is_refused(world: World, command: Command) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        with pytest.raises(BadRequest):
            async with executor.execute(allocation, command):
                pass


async def test_stdin_reaches_the_program_and_ends(world: World) -> None:
    data = os.urandom(300_000).hex().encode()
    async with world.executor() as executor:
        result = await run(executor, await start(executor), "wc -c", stdin=data)
    assert result.out.strip() == str(len(data))


async def test_end_of_input_reaches_a_program_at_a_terminal(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for sent in (b"line\n", b"unfinished", b""):
            result = await run(executor, allocation, "stty -echo; cat | wc -c", tty=True, stdin=sent)
            assert result.code == 0
            assert result.out.strip().endswith(str(len(sent))), (sent, result.out)


async def test_input_for_a_program_that_doesnt_read_never_blocks_its_end(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for tty in (False, True):
            with trio.fail_after(PATIENCE):
                command = Command("stty raw 2>/dev/null; echo ready; sleep 0.1", tty=tty)
                async with executor.execute(allocation, command) as process:
                    await read_until(process, "ready")
                    await process.send(b"x" * 2_000_000)
                    assert (await process.wait()).code == 0
                    await process.send(b"too late")
                    await process.close_stdin()


async def test_input_that_a_background_process_could_still_read_doesnt_block_after_the_end(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for tty in (False, True):
            command = Command("stty raw 2>/dev/null; sleep 60 <&0 & echo ready; sleep 0.1", tty=tty)
            async with executor.execute(allocation, command) as process:
                await read_until(process, "ready")
                with trio.fail_after(PATIENCE):
                    await process.send(b"x" * 2_000_000)
                assert (await process.wait()).code == 0
                assert await process.kill()


async def test_much_output_arrives_complete_and_in_order(world: World) -> None:
    async with world.executor() as executor:
        result = await run(executor, await start(executor), "seq 1 1000000")
    assert result.out == "".join(f"{n}\n" for n in range(1, 1_000_001))


async def test_a_slow_reader_holds_the_program_back(world: World) -> None:
    line = "for i in $(seq 1 2000); do printf '%01000d' $i || exit; echo $i > progress; done"
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command(line, tty=False)) as process:
            chunk = await process.receive()
            await trio.sleep(0.1)
            held = int((await run(executor, allocation, "cat progress")).out)
            assert chunk
            assert held < 400
            out, _ = await drain(process)
    assert len(chunk[1]) + len(out) == 2_000_000


async def test_chunks_are_never_empty_nor_too_large(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command("head -c 1000000 /dev/zero", tty=False)) as process:
            while chunk := await process.receive():
                assert chunk[0] is Stream.STDOUT
                assert 0 < len(chunk[1]) <= 65536


async def test_a_terminal_has_the_size_that_was_asked_for_and_can_be_resized(world: World) -> None:
    line = "trap 'stty size; exit' WINCH; stty size; while true; do sleep 0.01; done"
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command(line, rows=33, columns=101)) as process:
            await read_until(process, "33 101")
            await process.resize(40, 70)
            await read_until(process, "40 70")
            assert (await process.wait()).code == 0


async def test_a_signal_reaches_the_foreground_of_a_terminal(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for tty in (True, False):
            line = "trap 'echo got it; exit 3' USR1; echo ready; while true; do sleep 0.01; done"
            async with executor.execute(allocation, Command(line, tty=tty)) as process:
                await read_until(process, "ready")
                await process.signal(signal.SIGUSR1)
                await read_until(process, "got it")
                assert (await process.wait()).code == 3
                await process.signal(signal.SIGUSR1)


FOREGROUND_JOB = """
import os, signal
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
else:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got it\\n") and os._exit(0))
    os.write(1, b"ready\\n")
    while True:
        signal.pause()
"""


async def test_a_signal_goes_to_the_job_in_the_foreground(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command(argv=("python3", "-c", FOREGROUND_JOB))) as process:
            await read_until(process, "ready")
            await process.signal(signal.SIGUSR1)
            await read_until(process, "got it")


async def test_no_signal_is_ignored_or_blocked_at_the_start(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        status = (await run(executor, allocation, argv=("grep", "^Sig[BI]", "/proc/self/status"))).out
    of_the_c_library = 0b11 << 31  # 32 and 33: whoever starts a program by posix_spawn leaves them ignored
    assert {int(line.split()[1], 16) & ~of_the_c_library for line in status.splitlines()} == {0}


async def test_a_command_for_another_life_is_refused(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for other in (replace(allocation, started="another"), replace(allocation, id=AllocationId("another"))):
            with pytest.raises(AllocationGone):
                await run(executor, other, "true")


async def test_control_c_typed_at_a_terminal_interrupts(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command("echo ready; sleep 60")) as process:
            await read_until(process, "ready")
            await process.send(b"\x03")
            assert (await process.wait()).code == 130


async def test_waiting_can_be_cancelled_and_repeated(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command("read line; exit 5", tty=False)) as process:
            with trio.move_on_after(0.02) as scope:
                await process.wait()
            assert scope.cancelled_caught
            await process.send(b"\n")
            assert [(await process.wait()).code for _ in range(3)] == [5, 5, 5]


async def test_a_background_process_may_hold_the_output_after_the_end(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command("sleep 60 & echo done", tty=False)) as process:
            assert (await process.wait()).code == 0
            assert await process.receive() == (Stream.STDOUT, b"done\n")
            with trio.move_on_after(0.05) as scope:
                await process.receive()
            assert scope.cancelled_caught
            assert await process.kill()
            assert await process.receive() is None


async def test_two_executions_at_once_dont_mix(world: World) -> None:
    results: dict[str, Result] = {}

    async def one(name: str) -> None:
        results[name] = await run(executor, allocation, f"for i in $(seq 200); do echo {name}; done")

    async with world.executor() as executor:
        allocation = await start(executor)
        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(one, f"name{n}")
    assert all(result.out == f"{name}\n" * 200 for name, result in results.items())
    assert len(results) == 8


KILLED = (
    "setsid sh -c 'trap \"\" TERM HUP; sleep 61' & (setsid sh -c 'sleep 62' &) & trap '' TERM; echo ready; sleep 63"
)


async def test_killing_an_execution_takes_all_that_descends_from_it(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        before = world.processes()
        async with executor.execute(allocation, Command(KILLED)) as process:
            await read_until(process, "ready")
            while len(world.processes() - before) < 5:
                await trio.sleep(0.005)
            assert await process.kill()
            assert world.processes() == before
            assert (await process.wait()).code == 137
        assert (await run(executor, allocation, "echo usable")).out == "usable\n"


async def test_killing_one_of_two_executions_leaves_the_other(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with (
            executor.execute(allocation, Command("read x; echo $x", tty=False)) as other,
            executor.execute(allocation, Command("echo ready; sleep 60 & sleep 60", tty=False)) as process,
        ):
            await read_until(process, "ready")
            assert await process.kill()
            assert (await process.wait()).code == 137
            await other.send(b"alive\n")
            await read_until(other, "alive")
            assert (await other.wait()).code == 0


async def test_killing_at_the_moment_of_the_end_is_harmless(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        for n in range(60):
            async with executor.execute(allocation, Command("true", tty=bool(n % 2))) as process:
                await trio.sleep(n % 20 / 10_000)
                await process.signal(signal.SIGTERM)
                assert await process.kill()
                assert (await process.wait()).code in (0, 137, 143)


async def test_leaving_an_execution_ends_it(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        before = world.processes()
        async with executor.execute(allocation, Command("setsid sleep 60 & echo ready; sleep 60")) as process:
            await read_until(process, "ready")
        with trio.fail_after(PATIENCE):
            while world.processes() != before:
                await trio.sleep(0.002)


@pytest.mark.parametrize("tty", [False, True])
async def test_leaving_while_the_command_is_being_started_leaves_nothing_and_harms_nobody(
    world: World, tty: bool
) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        before = world.processes()
        for moment in range(60):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sleep_in, executor, allocation, tty)
                    for _ in range(moment % 6):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
        with trio.fail_after(PATIENCE):
            while world.processes() != before:
                await trio.sleep(0.002)
        assert (await run(executor, allocation, "echo usable")).out == "usable\n"


async def sleep_in(executor: LocalExecutor, allocation: Allocation, tty: bool) -> None:
    """A command that doesn't end by itself."""
    async with executor.execute(allocation, Command("sleep 60", tty=tty)) as process:
        await process.wait()


async def test_a_command_that_has_just_been_started_is_killed_for_certain(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        before = world.processes()
        for _ in range(60):
            async with executor.execute(allocation, Command("sleep 60", tty=False)) as process:
                assert await process.kill()
                assert world.processes() == before
                assert (await process.wait()).code == 137


async def test_a_hundred_idle_executions_cost_no_time(world: World) -> None:
    async with world.executor(processes=150) as executor:
        allocation = await start(executor)
        async with trio.open_nursery() as nursery:
            processes = []
            for _ in range(100):
                manager = executor.execute(allocation, Command("read line", tty=False))
                processes.append((manager, await manager.__aenter__()))
            before = sum(os.times()[:2])
            await trio.sleep(0.2)
            assert sum(os.times()[:2]) - before < 0.05
            for manager, _ in processes:
                await manager.__aexit__(None, None, None)
            nursery.cancel_scope.cancel()


async def test_the_end_of_the_sandbox_ends_its_executions_as_gone(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        async with executor.execute(allocation, Command("echo ready; sleep 60", tty=False)) as process:
            await read_until(process, "ready")
            await executor.stop(allocation.job)
            assert await process.receive() is None
            with pytest.raises(AllocationGone):
                await process.wait()
            assert await process.kill()
        with pytest.raises(AllocationGone):
            await run(executor, allocation, "true")

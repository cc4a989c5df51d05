"""Hostile programs: nothing survives the runner, nothing harms its neighbours, the helper or the daemon."""

import time

import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, ClientStatus
from poseidon.executors.local.executor import LocalExecutor
from tests.local.support import IS_ROOT, PATIENCE, World, read_until, run, start

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root has two users in a sandbox")
USERS = [False, pytest.param(True, marks=needs_root)]


FILLER = """
import os
try:
    for i in range(400000):
        os.close(os.open(f"/workspace/{i}", os.O_CREAT))
except OSError:
    pass
"""
TERMINALS = """
import os, time
for _ in range(28):
    if not os.fork():
        break
held = []
try:
    while True:
        held.append(os.openpty())
except OSError:
    pass
print("ready", flush=True)
time.sleep(60)
"""


async def check_usable(executor: LocalExecutor, *allocations: Allocation) -> None:
    """The sandboxes still run commands, without waiting for those that hang."""
    for allocation in allocations:
        began = time.monotonic()
        assert (await run(executor, allocation, "echo usable")).out == "usable\n"
        assert time.monotonic() - began < 15


async def attack(
    executor: LocalExecutor,
    victim: Allocation,
    neighbour: Allocation,
    line: str,
    *,
    privileged: bool,
    tty: bool = False,
) -> None:
    """Run *line*, which doesn't end by itself; see that a neighbour can work meanwhile; kill it."""
    command = Command(line, privileged=privileged, tty=tty)
    with trio.fail_after(PATIENCE):
        async with executor.execute(victim, command) as process:
            await read_until(process, "ready")
            await trio.sleep(0.1)
            await check_usable(executor, neighbour)
            assert await process.kill()
            await process.wait()


@pytest.mark.parametrize("privileged", USERS)
async def test_a_fork_bomb_is_confined_and_killed(world: World, privileged: bool) -> None:
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        before = world.processes()
        line = "bomb() { bomb | bomb & }; echo ready; bomb 2>/dev/null; sleep 60"
        await attack(executor, victim, neighbour, line, privileged=privileged)
        assert world.processes() == before
        await check_usable(executor, victim)


async def test_a_fork_bomb_doesnt_keep_other_executions_from_starting(world: World) -> None:
    async with world.executor() as executor:
        victim = await start(executor)
        line = "while true; do sleep 60 & done 2>/dev/null & echo ready; sleep 60"
        async with executor.execute(victim, Command(line, tty=False)) as process:
            await read_until(process, "ready")
            await trio.sleep(0.2)
            result = await run(executor, victim, argv=("/bin/echo", "started"))
            assert result.out == "started\n"
            assert await process.kill()


@pytest.mark.parametrize("privileged", USERS)
async def test_a_memory_hog_dies_and_its_runner_stays(world: World, privileged: bool) -> None:
    hog = "x = [bytearray(1 << 20) for _ in range(500)]; print('survived')"
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        result = await run(executor, victim, argv=("python3", "-c", hog), privileged=privileged)
        assert "survived" not in result.out
        if executor.abilities()[0].holds:
            assert (result.code, result.exit.out_of_memory) == (137, True)
        else:
            assert "MemoryError" in result.err
        await check_usable(executor, victim, neighbour)
        again = await run(executor, victim, "kill -9 $$")
        assert (again.code, again.exit.out_of_memory) == (137, False)


@needs_root
async def test_many_small_hogs_never_take_the_helper(world: World) -> None:
    # Each far smaller than the helper, all together larger than the limit.
    line = "for i in $(seq 45); do (x=$(head -c 1000000 /dev/zero | tr '\\0' x); read -t 0.3 <> <(:)) & done; wait"
    async with world.executor(processes=300, memory_mb=24) as executor:
        victim = await start(executor)
        await run(executor, victim, line)
        await check_usable(executor, victim)


@pytest.mark.parametrize("privileged", USERS)
@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_a_disk_filler_meets_its_limit(world: World, folder: str, privileged: bool) -> None:
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        line = f"dd if=/dev/zero of={folder}/fill bs=1M 2>&1; stat -c %s {folder}/fill"
        result = await run(executor, victim, line, privileged=privileged)
        assert "No space left on device" in result.out
        assert int(result.out.split()[-1]) <= 20 << 20
        await check_usable(executor, victim, neighbour)


async def test_all_file_systems_full_at_once_leave_memory_for_the_helper_and_a_program(world: World) -> None:
    async with world.executor() as executor:
        victim = await start(executor)
        line = "for d in /workspace /tmp /dev/shm; do dd if=/dev/zero of=$d/fill bs=1M; done 2>/dev/null; echo filled"
        assert (await run(executor, victim, line)).out == "filled\n"
        await check_usable(executor, victim)


async def test_empty_files_fill_nothing_of_the_host(world: World) -> None:
    script = FILLER
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        await run(executor, victim, argv=("timeout", "1", "python3", "-c", script))
        await check_usable(executor, neighbour)


@pytest.mark.parametrize("privileged", USERS)
async def test_a_hog_of_terminals_leaves_some_to_its_neighbours(world: World, privileged: bool) -> None:
    hog = TERMINALS
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        command = Command(argv=("python3", "-c", hog), privileged=privileged, tty=False)
        async with executor.execute(victim, command) as process:
            await read_until(process, "ready")
            await trio.sleep(0.2)
            result = await run(executor, neighbour, "test -t 0 && test -t 1 && echo terminal", tty=True)
            assert result.out == "terminal\r\n"
            assert await process.kill()


@pytest.mark.parametrize("privileged", USERS)
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
async def test_signals_to_everybody_hit_nobody_else(world: World, signal: str, privileged: bool) -> None:
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        async with executor.execute(victim, Command(f"kill -{signal} -1; echo sent", privileged=privileged)) as process:
            await read_until(process, "sent")
            assert (await process.wait()).code == 0
            assert await process.kill()
        await check_usable(executor, victim, neighbour)


async def test_a_stopped_program_is_killed(world: World) -> None:
    async with world.executor() as executor:
        victim = await start(executor)
        async with executor.execute(victim, Command("echo ready; kill -STOP $$", tty=False)) as process:
            await read_until(process, "ready")
            assert await process.kill()
            assert (await process.wait()).code == 137


async def test_a_program_that_ignores_all_signals_is_killed(world: World) -> None:
    line = "trap '' $(seq 1 8) $(seq 10 18) $(seq 20 64); setsid -w bash -c 'echo ready; while :; do :; done'"
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        await attack(executor, victim, neighbour, line, privileged=False)
        await check_usable(executor, victim)


async def test_daemons_left_behind_die_with_the_runner(world: World) -> None:
    async with world.executor() as executor:
        victim = await start(executor)
        await run(executor, victim, "for i in 1 2 3; do (setsid sleep 60 >/dev/null 2>&1 </dev/null &); done")
        assert len(world.processes()) >= 4
        job = victim.job
        await executor.stop(job)
        with trio.fail_after(PATIENCE):
            while (await executor.look_up(job)).listing.jobs:
                await trio.sleep(0.002)
        assert not world.processes()


async def test_a_flood_of_signals_at_the_helper_doesnt_block_it(world: World) -> None:
    line = "echo ready; while :; do kill -CHLD 1 -1; kill -CONT 1; done 2>/dev/null"
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        await attack(executor, victim, neighbour, line, privileged=False)
        await check_usable(executor, victim)


async def test_endless_output_of_one_doesnt_slow_the_others(world: World) -> None:
    async with world.executor() as executor:
        victim, neighbour = await start(executor), await start(executor)
        async with executor.execute(victim, Command("yes", tty=False)) as process, trio.open_nursery() as nursery:

            async def swallow() -> None:
                while await process.receive():
                    pass

            nursery.start_soon(swallow)
            durations = []
            for _ in range(20):
                began = time.monotonic()
                await run(executor, neighbour, "true")
                durations.append(time.monotonic() - began)
            assert await process.kill()
        assert sorted(durations)[10] < 0.2


@needs_root
async def test_the_death_of_the_helper_is_the_end_of_the_runner(world: World) -> None:
    async with world.executor() as executor:
        async with executor.follow(None) as stream:
            victim = await start(executor)
            pid = next(iter(executor._site.book)).pid
            await trio.run_process(["kill", "-9", str(pid)])
            with trio.fail_after(PATIENCE):
                async for batch in stream:
                    found = [v for v in batch.values if isinstance(v, Allocation) and v.id == victim.id]
                    if found and found[0].client is ClientStatus.FAILED:
                        break
        assert not found[0].oom_killed

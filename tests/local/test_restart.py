"""Sandboxes outlive the daemon and are found again; what died meanwhile is told; nothing is doubled or leaked."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from poseidon.core.command import Command
from poseidon.core.model import ClientStatus, JobStatus
from poseidon.errors import PlacementFailed
from poseidon.executors.local import wire
from poseidon.executors.local.executor import LocalExecutor
from poseidon.executors.local.ledger import SandboxRecord
from poseidon.executors.local.network import PROGRAM, SEARCHED
from poseidon.executors.local.root import PYTHON
from tests.local.support import (
    ENVIRONMENT,
    IS_ROOT,
    PATIENCE,
    World,
    new_job,
    read_until,
    reasons,
    run,
    start,
    until_gone,
)

needs_stack = pytest.mark.skipif(shutil.which(PROGRAM, path=SEARCHED) is None, reason=f"{PROGRAM} isn't installed")


async def only_record(world: World) -> SandboxRecord:
    (record,) = await world.ledger.load()
    return record


async def test_a_sandbox_is_found_again_with_its_files_and_processes(world: World) -> None:
    async with world.daemon() as executor:
        before = await start(executor)
        await run(executor, before, "echo kept > file; setsid sleep 60 >/dev/null 2>&1 </dev/null & sleep 0.01")
    async with world.executor() as executor:
        listing = await executor.snapshot()
        assert listing.allocations == (before,)
        assert listing.allocations_index > before.version
        assert (await run(executor, before, "cat file; cat /proc/*/comm")).out.startswith("kept\n")
        again = await start(executor)
        assert again.created > listing.allocations_index


async def test_an_execution_ends_with_its_daemon_and_the_sandbox_doesnt(world: World) -> None:
    manager = world.daemon()
    executor = await manager.__aenter__()
    allocation = await start(executor)
    idle = world.processes()
    execution = executor.execute(allocation, Command("setsid sleep 60 & echo ready; sleep 60"))
    await read_until(await execution.__aenter__(), "ready")
    assert world.processes() > idle
    await execution.__aexit__(None, None, None)
    await manager.__aexit__(None, None, None)
    with trio.fail_after(PATIENCE):
        while world.processes() != idle:
            await trio.sleep(0.005)
    async with world.executor() as executor:
        assert (await run(executor, allocation, "echo usable")).out == "usable\n"


async def test_a_helper_that_was_killed_meanwhile_is_told_as_failed(world: World) -> None:
    async with world.daemon() as executor:
        allocation = await start(executor)
    os.kill((await only_record(world)).pid, signal.SIGKILL)
    with trio.fail_after(PATIENCE):
        while world.processes():
            await trio.sleep(0.002)
    async with world.executor() as executor:
        listing = await executor.snapshot()
        assert [(job.job, job.status) for job in listing.jobs] == [(allocation.job, JobStatus.DEAD)]
        assert listing.allocations[0].client is ClientStatus.FAILED
        assert listing.allocations[0].version > allocation.version


@pytest.mark.parametrize(
    "forge",
    [
        lambda record: replace(record, started=record.started + "1"),
        lambda record: replace(record, started="another-boot:" + record.started.split(":")[1]),
        lambda record: replace(record, pid=os.getpid()),
    ],
    ids=["other start", "other boot", "other pid"],
)
async def test_a_reused_pid_is_never_taken_for_ours(
    world: World, forge: Callable[[SandboxRecord], SandboxRecord]
) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        async with world.daemon() as executor:
            await start(executor)
        record = forge(await only_record(world))
        await world.ledger.save(record)
        async with world.executor() as executor, executor.follow(None) as stream:
            assert (await executor.snapshot()).allocations[0].client is ClientStatus.FAILED
            await executor.stop(record.job)  # type: ignore[arg-type]
            await until_gone(stream, record.job)  # type: ignore[arg-type]
            assert not world.processes()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_another_stores_sandboxes_are_left_alone(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    async with other.executor() as theirs:
        allocation = await start(theirs)
        async with world.executor() as ours:
            assert not (await ours.snapshot()).jobs
            mine = await start(ours)
        async with world.executor():
            pass
        assert mine.id != allocation.id
        assert (await run(theirs, allocation, "echo alive")).out == "alive\n"
        if IS_ROOT:
            assert not set(world.uids()) & set(other.uids())
    assert not other.processes()
    assert not other.cgroups()


async def test_a_sandbox_of_ours_that_nobody_recorded_is_ended(world: World) -> None:
    async with world.daemon() as executor:
        allocation = await start(executor)
    await world.ledger.forget(allocation.id)
    async with world.executor() as executor:
        assert not (await executor.snapshot()).jobs
        with trio.fail_after(PATIENCE):
            while world.processes() or list(world.state.glob("sandboxes/*/*")):
                await trio.sleep(0.005)


async def test_a_helper_of_another_version_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.daemon() as executor:
        await start(executor)
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    async with world.executor() as executor, executor.follow(None):
        assert (await executor.snapshot()).allocations[0].client is ClientStatus.FAILED
        assert "another version" in reasons(executor)[0]
        with trio.fail_after(PATIENCE):
            while world.processes():
                await trio.sleep(0.005)


@pytest.mark.skipif(not IS_ROOT, reason="the helper can be stopped by root only")
async def test_a_helper_that_doesnt_answer_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.executors.local.sandbox.GREETING_PATIENCE", 0.05)
    async with world.daemon() as executor:
        await start(executor)
    os.kill((await only_record(world)).pid, signal.SIGSTOP)
    async with world.executor() as executor:
        assert (await executor.snapshot()).allocations[0].client is ClientStatus.FAILED


DYING_DAEMON = """
import os, signal, sys, trio
from dataclasses import replace
from pathlib import Path
from tests.local.support import ENVIRONMENT, JsonLedger, World, new_job
from poseidon.executors.local.executor import open_local

moment = sys.argv[2]

class Ledger(JsonLedger):
    async def save(self, record):
        if moment == f"before {record.state}":
            os.kill(os.getpid(), signal.SIGKILL)
        await super().save(record)
        if moment == f"after {record.state}":
            os.kill(os.getpid(), signal.SIGKILL)

async def main():
    world = World(Path(sys.argv[1]))
    ledger = Ledger(world.folder / "ledger.json")
    async with open_local(world.settings, world.state, ledger) as executor:
        environment = replace(ENVIRONMENT, network_access=sys.argv[3] == "network", exposed_ports=(80,))
        await executor.start(new_job(), environment if sys.argv[3] else ENVIRONMENT)
        if moment.startswith("after "):
            await trio.sleep_forever() if moment == "after running" else await trio.sleep(float(moment[6:]))
        elif moment != "before asked":
            await trio.sleep_forever()
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main)
"""


async def run_dying_daemon(world: World, moment: str, outside: str = "") -> None:
    """A daemon that launches a sandbox and is killed at *moment*. *outside*: with a "network", or only "ports"."""
    python = sys.executable if os.access(sys.executable, os.X_OK) else PYTHON
    daemon = await trio.run_process(
        [python, "-c", DYING_DAEMON, str(world.folder), moment, outside],
        check=False,
        capture_stderr=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert daemon.returncode == -signal.SIGKILL, daemon.stderr


async def test_a_sandbox_whose_daemon_dies_before_recording_it_ends_itself(world: World) -> None:
    await run_dying_daemon(world, "before running")
    with trio.fail_after(PATIENCE):
        while world.processes():
            await trio.sleep(0.005)
    async with world.executor() as executor:
        assert [value.client for value in (await executor.snapshot()).allocations] == [ClientStatus.FAILED]


@pytest.mark.parametrize(
    ("moment", "records"),
    [
        ("before asked", 0),
        ("before running", 1),
        ("after running", 1),
        *((f"after {seconds}", 1) for seconds in (0.001, 0.005, 0.01, 0.015, 0.02, 0.03)),
    ],
)
async def test_a_daemon_killed_at_any_moment_of_a_launch_neither_loses_nor_doubles(
    world: World, moment: str, records: int
) -> None:
    ledger = world.ledger
    await run_dying_daemon(world, moment)
    assert len(await ledger.load()) == records
    async with world.executor() as executor:
        with trio.fail_after(PATIENCE):
            while len(world.processes()) != await expected_processes(executor):
                await trio.sleep(0.01)
        listing = await executor.snapshot()
        assert len(listing.allocations) == len(listing.jobs) == records
        for allocation in listing.allocations:
            assert allocation.client in (ClientStatus.RUNNING, ClientStatus.FAILED)


@pytest.mark.parametrize("moment", ["before running", "after running", "after 0.03", "after 0.06", "after 0.1"])
@pytest.mark.parametrize(("outside", "more"), [("ports", 1), pytest.param("network", 2, marks=needs_stack)])
async def test_a_killed_daemon_leaves_no_network_without_its_runner(
    world: World, moment: str, outside: str, more: int
) -> None:
    await run_dying_daemon(world, moment, outside)
    async with world.executor() as executor:
        with trio.fail_after(PATIENCE):
            while len(world.processes()) != await expected_processes(executor, 2 + more):
                await trio.sleep(0.01)


async def expected_processes(executor: LocalExecutor, each: int = 2) -> int:
    """A helper and the bwrap beside it for each that runs."""
    listing = await executor.snapshot()
    return each * sum(allocation.client is ClientStatus.RUNNING for allocation in listing.allocations)


async def test_many_sandboxes_are_found_again_at_once(world: World) -> None:
    async with world.daemon() as executor:
        for _ in range(6):
            await start(executor)
    async with world.executor() as executor:
        listing = await executor.snapshot()
        assert {value.client for value in listing.allocations} == {ClientStatus.RUNNING}
        assert len(listing.allocations) == 6
        for allocation in listing.allocations:
            assert (await run(executor, allocation, "echo usable")).out == "usable\n"


async def test_what_was_promised_before_a_restart_still_counts(world: World) -> None:
    async with world.daemon() as executor:
        await start(executor)
    async with world.executor(max_runners=1) as executor:
        with pytest.raises(PlacementFailed, match="runners exhausted"):
            await executor.start(new_job(), ENVIRONMENT)


async def test_an_ended_sandboxs_uids_arent_given_away_twice(world: World) -> None:
    async with world.daemon() as executor:
        await start(executor)
        os.kill((await only_record(world)).pid, signal.SIGKILL)
        with trio.fail_after(PATIENCE):
            while list(world.state.glob("sandboxes/*/*")):
                await trio.sleep(0.002)
        await start(executor)  # has the slot of the one before, which is still listed
    async with world.executor() as executor:
        with trio.fail_after(PATIENCE):
            while len(list(world.state.glob("sandboxes/*/*"))) != 1:
                await trio.sleep(0.002)
        await trio.testing.wait_all_tasks_blocked()
        await start(executor)
        slots = [record.slot for record in await world.ledger.load() if record.state == "running"]
    assert len(set(slots)) == len(slots) == 2 or not IS_ROOT


async def test_what_ended_before_a_restart_is_still_told_after_it(world: World) -> None:
    async with world.daemon() as executor:
        job = new_job()
        await executor.start(job, ENVIRONMENT)
        with trio.fail_after(PATIENCE):
            while (await executor.snapshot()).allocations[0].client is not ClientStatus.RUNNING:
                await trio.sleep(0.002)
        os.kill((await only_record(world)).pid, signal.SIGKILL)
        with trio.fail_after(PATIENCE):
            while (await executor.snapshot()).allocations[0].client is not ClientStatus.FAILED:
                await trio.sleep(0.002)
        ended = await executor.snapshot()
    async with world.executor() as executor:
        assert (await executor.snapshot()).allocations == ended.allocations

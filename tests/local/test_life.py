"""The life of a sandbox as the executor tells it: versions, listings, the stream, budgets, refusals."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from poseidon.core.model import Allocation, ClientStatus, EnvironmentId, JobGone, JobId, JobSeen, JobStatus, Value
from poseidon.errors import AllocationGone, ConfigError, PlacementFailed, StoreError, Unsupported
from poseidon.executors.local import network
from poseidon.executors.local.executor import LocalExecutor, open_local
from poseidon.executors.local.ledger import SandboxRecord
from poseidon.executors.local.limits import Group
from poseidon.executors.local.network import PROGRAM, SEARCHED
from poseidon.executors.local.settings import LocalSettings
from tests.local.support import (
    ENVIRONMENT,
    IS_ROOT,
    PATIENCE,
    JsonLedger,
    World,
    new_job,
    reasons,
    run,
    start,
    stop_all,
    until,
    until_gone,
)


async def test_a_life_is_told_from_pending_to_gone(world: World) -> None:
    job = new_job()
    told: list[Value] = []
    async with world.executor() as executor, executor.follow(None) as stream:
        index = await executor.start(job, ENVIRONMENT)
        with trio.fail_after(PATIENCE):
            async for batch in stream:
                told += batch.values
                assert batch.position == max(value.version for value in batch.values)
                if any(isinstance(value, Allocation) and value.client is ClientStatus.RUNNING for value in told):
                    break
        answer = await executor.stop(job)
        gone = await until_gone(stream, job)
    allocations = [value for value in told if isinstance(value, Allocation)]
    seen = [value for value in told if isinstance(value, JobSeen)]
    assert [value.client for value in allocations] == [ClientStatus.PENDING, ClientStatus.RUNNING]
    assert [value.status for value in seen] == [JobStatus.PENDING, JobStatus.RUNNING]
    assert index == allocations[0].created == allocations[1].created == seen[0].version
    assert allocations[0].started is None
    assert allocations[1].started
    assert allocations[1].started.startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip() + ":")
    assert allocations[1].node_name == allocations[1].node_id == os.uname().nodename
    assert index < seen[1].version <= answer < gone.version


async def test_a_listing_says_what_the_stream_says_up_to_its_index(world: World) -> None:
    newest: dict[str, Value] = {}
    async with world.executor() as executor, executor.follow(None) as stream:
        first, second = await start(executor), await start(executor)
        await executor.stop(first.job)
        async for batch in stream:
            for value in batch.values:
                newest[f"{type(value).__name__} {value.id if isinstance(value, Allocation) else value.job}"] = value
            if any(isinstance(value, JobGone) for value in batch.values):
                break
        listing = await executor.snapshot()
        looked_up = await executor.look_up(second.job)
        unknown = await executor.look_up(JobId("7-unknown"))
    gone = newest.pop(f"JobGone {first.job}")
    assert listing.jobs == (newest[f"JobSeen {second.job}"],)
    assert listing.allocations == (newest[f"Allocation {second.id}"],)
    assert listing.jobs_index == listing.allocations_index == gone.version
    assert (looked_up.listing.jobs, looked_up.listing.only) == (listing.jobs, second.job)
    assert not unknown.listing.jobs
    assert unknown.listing.only == "7-unknown"


async def test_starting_a_known_job_again_changes_nothing(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        before = await executor.snapshot()
        assert await executor.start(allocation.job, ENVIRONMENT) == allocation.created
        assert await executor.snapshot() == before


async def test_many_starts_of_one_job_at_once_make_one_sandbox(world: World) -> None:
    job = new_job()
    answers = []

    async def one() -> None:
        answers.append(await executor.start(job, ENVIRONMENT))

    async with world.executor() as executor, executor.follow(None) as stream:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(one)
        await until(stream, job, ClientStatus.RUNNING)
        assert len((await executor.snapshot()).allocations) == 1
    assert len(set(answers)) == 1


async def test_stopping_an_unknown_job_is_fine(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        assert await executor.stop(new_job()) >= allocation.version


async def test_a_job_is_gone_only_when_nothing_of_it_is_left(world: World) -> None:
    async with world.executor() as executor, executor.follow(None) as stream:
        allocation = await start(executor)
        await run(executor, allocation, "setsid sleep 60 >/dev/null 2>&1 </dev/null &")
        assert world.processes()
        await executor.stop(allocation.job)
        await executor.stop(allocation.job)
        await until_gone(stream, allocation.job)
        assert not world.processes()
        assert not [path for folder in world.cgroups() for path in Path(folder).iterdir() if path.is_dir()]
        assert not list(world.state.glob("sandboxes/*/*"))


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.03])
async def test_a_stop_at_any_moment_of_the_launch_leaves_nothing(world: World, delay: float) -> None:
    job = new_job()
    async with world.executor() as executor, executor.follow(None) as stream:
        await executor.start(job, ENVIRONMENT)
        await trio.sleep(delay)
        await executor.stop(job)
        await until_gone(stream, job)
        assert not world.processes()


async def test_what_is_over_the_budget_is_refused_until_there_is_room(world: World) -> None:
    async with world.executor(memory_budget_mb=200, memory_mb=64, overhead_mb=24) as executor:
        first = await start(executor)
        await start(executor)
        with pytest.raises(PlacementFailed, match="memory exhausted: 88 MB needed, 24 of 200 MB free"):
            await executor.start(new_job(), ENVIRONMENT)
        async with executor.follow(None) as stream:
            await executor.stop(first.job)
            await until_gone(stream, first.job)
        await start(executor)


async def test_the_number_of_runners_has_a_limit(world: World) -> None:
    async with world.executor(max_runners=1) as executor:
        await start(executor)
        with pytest.raises(PlacementFailed, match="runners exhausted"):
            await executor.start(new_job(), ENVIRONMENT)


@pytest.mark.skipif(not IS_ROOT, reason="only root gives uids")
async def test_used_up_uids_are_no_room(world: World) -> None:
    async with world.executor(uid_count=2) as executor:
        await start(executor)
        with pytest.raises(PlacementFailed, match="uids exhausted"):
            await executor.start(new_job(), ENVIRONMENT)


class FullLedger(JsonLedger):
    """The disk is full."""

    async def save(self, record: SandboxRecord) -> None:
        raise StoreError("the disk is full")


async def test_a_start_that_cant_be_recorded_hasnt_happened(world: World) -> None:
    ledger = FullLedger(world.folder / "ledger.json")
    async with open_local(replace(world.settings, max_runners=1), world.state, ledger) as executor:
        for _ in range(2):
            with pytest.raises(StoreError, match="the disk is full"):
                await executor.start(new_job(), ENVIRONMENT)
        assert not (await executor.snapshot()).jobs


class FlakyLedger(JsonLedger):
    """Every second write fails."""

    failures = 0

    async def save(self, record: SandboxRecord) -> None:
        if record.state != "asked":
            self.failures += 1
            if self.failures == 1:
                raise StoreError("the disk was full")
        await super().save(record)


async def test_what_happened_to_a_sandbox_is_recorded_as_soon_as_that_works(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.executors.local.book.FIRST_DELAY", 0.01)
    ledger = FlakyLedger(world.folder / "ledger.json")
    async with open_local(world.settings, world.state, ledger) as executor:
        allocation = await start(executor)
        assert (await run(executor, allocation, "echo works")).out == "works\n"
        assert [record.state for record in await world.ledger.load()] == ["running"]
        await stop_all(executor)


async def test_a_launch_that_fails_says_why(world: World, readable: Path) -> None:
    image = readable / "image"
    (image / "bin").mkdir(parents=True)
    (image / "bin/bash").touch()
    job = new_job()
    async with world.executor(images={"some-image": str(image)}, start_timeout=5) as executor:
        async with executor.follow(None) as stream:
            await executor.start(job, ENVIRONMENT)
            shutil.rmtree(image)  # before it is launched
            allocation = await until(stream, job, ClientStatus.FAILED)
            assert "a sandbox" in allocation.trouble
            assert reasons(executor) == [allocation.trouble]
        with pytest.raises(AllocationGone):
            await run(executor, allocation, "true")


async def test_an_image_without_a_shell_is_refused_even_if_it_loses_it_later(world: World, readable: Path) -> None:
    image = readable / "image"
    (image / "usr/bin").mkdir(parents=True)
    (image / "bin").symlink_to("usr/bin")
    async with world.executor(images={"some-image": str(image)}) as executor:
        with pytest.raises(Unsupported, match=r"'some-image' .* no /bin/bash"):
            executor.check(ENVIRONMENT)
        with pytest.raises(Unsupported, match=r"'some-image' .* no /bin/bash"):
            await executor.start(new_job(), ENVIRONMENT)
        (image / "usr/bin/bash").touch()
        executor.check(ENVIRONMENT)


@pytest.mark.skipif(not IS_ROOT, reason="only root has cgroups here")
async def test_a_launch_that_cant_enter_its_cgroup_never_runs_without_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "entrances", lambda _: ["/proc/sys/kernel/ostype"])
    job = new_job()
    async with world.executor() as executor, executor.follow(None) as stream:
        await executor.start(job, ENVIRONMENT)
        await until(stream, job, ClientStatus.FAILED)
        (reason,) = reasons(executor)
    assert reason.startswith("a sandbox didn't come up: ")
    assert "ostype" in reason


async def check_refused(executor: LocalExecutor, message: str, **changes: object) -> None:
    environment = replace(ENVIRONMENT, **changes)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=message):
        executor.check(environment)
    with pytest.raises(Unsupported, match=message):
        await executor.start(new_job(), environment)


async def test_what_an_environment_cant_have_is_refused_with_the_reason(world: World) -> None:
    async with world.executor(images={"broken": "/no/such/folder"}, require_image=True) as executor:
        await check_refused(executor, "memoryLimit 4 is too small: .* at least 16 MB", memory_limit=4)
        await check_refused(executor, "'some-image' isn't one of", memory_limit=64)
        await check_refused(executor, "which is no folder", image="broken")
    async with world.executor(memory_budget_mb=400, overhead_mb=20) as executor:
        await check_refused(executor, "memoryLimit 381 is too large: all runners together have 400", memory_limit=381)
        executor.check(replace(ENVIRONMENT, memory_limit=380))
    async with world.executor(workspace_mb=60, tmp_mb=20) as executor:
        await check_refused(executor, "memoryLimit 150 is too small: .* at least 183 MB", memory_limit=150)
        executor.check(replace(ENVIRONMENT, memory_limit=183))
        executor.check(replace(ENVIRONMENT, memory_limit=200, id=EnvironmentId(1)))


async def test_the_smallest_memory_limit_runs_a_shell(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, replace(ENVIRONMENT, memory_limit=16))
        assert (await run(executor, allocation, "ls / | wc -l; echo fine")).out.endswith("fine\n")


@pytest.mark.parametrize(
    ("required", "message"),
    [(("network",), "'network' doesn't hold on this machine"), (("speed",), "'speed' is none of memory, processes")],
)
async def test_a_required_ability_that_is_missing_keeps_it_from_serving(
    world: World, monkeypatch: pytest.MonkeyPatch, required: Sequence[str], message: str
) -> None:
    monkeypatch.setattr(network, "SEARCHED", "/nowhere")
    with pytest.raises(ConfigError, match=message):
        async with world.daemon(require=required):
            pass


async def test_the_abilities_say_what_holds_and_by_which_means(world: World) -> None:
    async with world.executor() as executor:
        abilities = {ability.name: ability for ability in executor.abilities()}
    assert list(abilities) == ["memory", "processes", "cpu", "users", "network", "isolation"]
    assert all(ability.how for ability in abilities.values())
    assert abilities["users"].holds == IS_ROOT
    assert abilities["network"].holds == (shutil.which(PROGRAM, path=SEARCHED) is not None)


async def test_a_helper_that_nobody_visits_ends_itself(world: World) -> None:
    async with world.daemon(abandon_after=0.3 / 3600) as executor:
        await start(executor)
        assert world.processes()
    with trio.fail_after(PATIENCE):
        while world.processes():
            await trio.sleep(0.01)
    async with world.executor() as executor:
        assert [value.client for value in (await executor.snapshot()).allocations] == [ClientStatus.FAILED]


async def test_a_state_folder_with_a_long_path_works(world: World) -> None:
    world.folder = world.folder / ("deep" * 30) / ("deeper" * 20)
    world.folder.mkdir(parents=True)
    async with world.executor() as executor:
        assert (await run(executor, await start(executor), "echo works")).out == "works\n"


@pytest.mark.skipif(not IS_ROOT, reason="only root has to change uids")
async def test_bwrap_runs_whether_or_not_other_uids_can_reach_it(world: World, readable: Path) -> None:
    for folder, by_descriptor in ((readable, False), (world.folder, True)):
        world.folder = folder
        async with world.executor() as executor:
            assert (await run(executor, await start(executor), "echo works")).out == "works\n"
            programs = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in world.processes()}
        assert any(name.startswith(b"/proc/self/fd/") for name in programs) == by_descriptor


async def test_a_state_folder_that_cant_be_made_is_an_error_with_its_name(world: World) -> None:
    (world.folder / "file").write_text("")
    with pytest.raises(ConfigError, match="can't make its folder"):
        async with open_local(LocalSettings(), world.folder / "file" / "state", world.ledger):
            pass

"""Pools become what they should be, whatever happens to their runners, and back off when it is of no use."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from sqlalchemy import Connection

from poseidon.core.model import ClientStatus, EnvironmentId, JobId, Phase, Reason, Runner
from poseidon.errors import (
    BadRequest,
    EnvironmentNotFound,
    ExecutorUnreachable,
    PlacementFailed,
    PoseidonError,
    StoreError,
    Unsupported,
)
from poseidon.runners import carrier
from poseidon.runners.facts import PoolStatus
from poseidon.store.queries import job_had_runner
from tests.fakes.scripted import RecordingExecutor, ScriptedExecutor
from tests.runners.shell import ONE, open_rig, until


async def test_a_crashed_idle_runner_is_replaced(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(3)
        await rig.full(3)
        rig.executor.die(rig.jobs()[0])
        await until(lambda: rig.idle() == 2)
        await rig.full(3)


async def test_a_change_of_size_only_scales(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        assert await rig.put(4)
        await rig.full(4)
        before = set(rig.jobs())
        assert not await rig.put(6)
        await rig.full(6)
        assert before <= set(rig.jobs())
        await rig.put(1)
        await until(lambda: len(rig.jobs()) == 1)
        assert set(rig.jobs()) <= before


async def test_the_same_again_refreshes_idle_runners_and_spares_used_ones(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(3)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        await rig.full(3)
        before = set(rig.jobs()) - {runner.job}
        await rig.put(3)
        await until(lambda: not before & set(rig.jobs()))
        await rig.full(3)
        assert rig.shell.claims.used(runner.id).phase is Phase.USED


async def test_while_a_pool_refreshes_old_runners_still_serve(tmp_path: Path) -> None:
    async with open_rig(tmp_path, claim_wait=0.05) as rig:
        await rig.put(2)
        await rig.full(2)
        rig.executor.held = True
        await rig.put(2)
        await until(lambda: len(rig.executor.started) == 4)
        assert rig.idle() == 2
        await rig.shell.claims.claim(ONE, timeout=60)


async def test_another_image_replaces_idle_runners_at_once(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(2)
        await rig.full(2)
        before = set(rig.jobs())
        await rig.put(2, image="another")
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        assert runner.job not in before


async def test_a_removed_environment_takes_its_runners_along(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(2)
        await rig.shell.claims.claim(ONE, timeout=60)
        await rig.shell.environments.remove(ONE)
        with pytest.raises(EnvironmentNotFound):
            rig.shell.environments.get(ONE)
        await until(lambda: not rig.executor.jobs)
        await until(lambda: not rig.jobs())
        with pytest.raises(EnvironmentNotFound):
            await rig.shell.environments.remove(ONE)
        assert await rig.put(1)
        await rig.full(1)


async def test_concurrent_puts_leave_one_pool(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(rig.put, 3)
        await rig.full(3)
        await until(lambda: len(rig.jobs()) == 3)


@pytest.mark.parametrize(
    "refusal", [PlacementFailed("memory exhausted on 3 nodes"), Unsupported("its image is no folder any more")]
)
async def test_no_room_backs_off_and_is_told_and_piles_nothing_up(tmp_path: Path, refusal: PoseidonError) -> None:
    executor = ScriptedExecutor(refusal=refusal)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(5)
        await until(lambda: rig.shell.environments.statistics()[ONE].status is PoolStatus.FAILING)
        assert rig.shell.environments.statistics()[ONE].message == refusal.message
        await until(lambda: not rig.jobs())
        assert len(rig.executor.stopped) <= 5
        executor.refusal = None
        await rig.full(5)
        assert rig.shell.environments.statistics()[ONE].status is PoolStatus.OK


async def test_what_the_executor_cannot_do_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        with pytest.raises(Unsupported, match="network"):
            await rig.put(1, network_access=True)
        assert not rig.shell.environments.get(ONE).network_access
        with pytest.raises(BadRequest, match="not enabled"):
            await rig.put(1, executor="nomad")


async def test_removing_what_was_never_there_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        for number in range(10):
            with pytest.raises(EnvironmentNotFound):
                await rig.shell.environments.remove(EnvironmentId(number))
        assert not rig.shell.environments._locks


async def test_unanswered_starts_are_repeated_until_they_are(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(0)
        rig.executor.reachable = False
        await rig.put(2)
        await until(lambda: len(rig.jobs()) == 2)
        rig.executor.reachable = True
        await rig.full(2)
        assert len(set(rig.executor.started)) == 2


async def test_starts_that_couldnt_be_recorded_are_repeated_until_they_are(tmp_path: Path) -> None:
    executor = ScriptedExecutor(refusal=StoreError("the disk is full"))
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(2)
        await until(lambda: len(list(rig.shell.dispatchers["local"].fleet.jobs(ONE))) == 2)
        await trio.sleep(0.05)
        executor.refusal = None
        await rig.full(2)
        assert all(not service.crashes for service in rig.supervisor.status())


async def test_an_overdue_start_is_given_up_and_tried_anew(tmp_path: Path) -> None:
    executor = ScriptedExecutor(held=True, start_timeout=0.1)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await until(lambda: bool(executor.stopped))
        executor.held = False
        await rig.full(1)


async def test_lost_news_is_found_by_the_next_listing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        rig.executor.silent = True
        await rig.put(2)
        await rig.full(2)
        rig.executor.die(rig.jobs()[0])
        await until(lambda: len(rig.executor.started) == 3)
        await rig.full(2)


async def test_a_cut_stream_is_taken_up_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(2)
        await rig.full(2)
        rig.executor.reachable = False
        rig.executor.cut()
        await until(lambda: not rig.shell.dispatchers["local"].reachable)
        rig.executor.reachable = True
        rig.executor.die(rig.jobs()[0])
        await until(lambda: rig.shell.dispatchers["local"].reachable)
        await until(lambda: len(rig.executor.started) == 3)
        await rig.full(2)


async def test_a_job_is_adopted_once_the_disk_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = JobId("1-00000000-0000-4000-8000-000000000001")
    refused = 0

    def refuse(connection: Connection, job: JobId) -> bool:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise StoreError("the disk fails")
        return job_had_runner(connection, job)

    monkeypatch.setattr(carrier, "job_had_runner", refuse)
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        await rig.full(1)
        rig.executor.register(stranger)
        await until(lambda: stranger in rig.executor.stopped)
        assert refused == 2
        assert not any(each.crashes for each in rig.supervisor.status())


async def test_a_strangers_job_of_a_known_environment_is_adopted(tmp_path: Path) -> None:
    stranger = "1-00000000-0000-4000-8000-000000000001"
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        await rig.full(1)
        rig.executor.register(stranger)  # type: ignore[arg-type]
        await until(lambda: stranger in rig.executor.stopped)  # surplus, once it was adopted
        await rig.full(1)


async def test_a_claim_is_marked_where_the_executor_keeps_records(tmp_path: Path) -> None:
    executor = RecordingExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        runner: Runner = await rig.shell.claims.claim(ONE, timeout=60)
        await until(lambda: (runner.job, True) in executor.marks)
        executor.held = True
        await rig.put(2)  # so that the moved runner isn't surplus
        executor.move(runner.job)
        await until(lambda: (runner.job, False) in executor.marks)
        assert executor.marks.count((runner.job, True)) == 1


@dataclass
class LateExecutor(RecordingExecutor):
    """The first request for a mark isn't answered, and carried out when the opposite has been written twice."""

    waiting: JobId | None = None
    records: list[bool] = field(default_factory=list)
    """Of that job, as they were written."""

    async def mark(self, job: JobId, *, used: bool, timeout: int) -> None:
        if self.waiting is None:
            self.waiting = job
            raise ExecutorUnreachable("no answer in time")
        await super().mark(job, used=used, timeout=timeout)
        if job == self.waiting:
            self.records += [used, True] if self.records == [False] else [used]


async def test_a_mark_that_is_written_late_is_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MARK_SURE_AFTER", 0.05)
    executor = LateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        runner: Runner = await rig.shell.claims.claim(ONE, timeout=60)
        await until(lambda: executor.waiting is not None)
        executor.held = True
        await rig.put(2)  # so that the moved runner isn't surplus
        executor.move(runner.job)
        await until(lambda: executor.records[:4] == [False, False, True, False])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"migrate": True}, Reason.MIGRATED),
        ({"client": ClientStatus.LOST}, Reason.LOST),
        ({"client": ClientStatus.UNKNOWN}, Reason.DISCONNECTED),
    ],
)
async def test_what_a_node_does_to_its_runners_is_no_failed_start(
    tmp_path: Path, change: dict[str, object], reason: Reason
) -> None:
    gone: list[Runner] = []
    async with open_rig(tmp_path) as rig:
        rig.shell.dispatchers["local"].on_runner.append(gone.append)
        await rig.put(1)
        await rig.full(1)
        rig.executor.change(rig.jobs()[0], **change)
        await until(lambda: any(runner.reason is reason for runner in gone))
        assert rig.shell.environments.statistics()[ONE].message == ""


async def test_an_idle_runner_that_ends_by_itself_at_once_is_a_failed_start(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        await rig.full(1)
        rig.executor.die(rig.jobs()[0])
        await until(lambda: "ended by itself (failed)" in rig.shell.environments.statistics()[ONE].message)

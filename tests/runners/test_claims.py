"""Each runner gets at most one client, durably, in fair order; who hangs up leaves nothing behind."""

from functools import partial
from pathlib import Path

import pytest
import trio

from poseidon.core.model import EnvironmentId, JobId, Phase, Reason, Runner
from poseidon.errors import Draining, EnvironmentNotFound, Overloaded, RunnerGone
from poseidon.store.queries import load_records
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, Rig, open_rig, until


async def take(rig: Rig, into: list[Runner]) -> None:
    into.append(await rig.shell.claims.claim(ONE, timeout=60))


async def test_a_claim_is_durable_before_it_is_answered(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(2)
        await rig.full(2)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        records = await rig.store.read(partial(load_records, executor="local"))
        assert [known.id for known in records.runners if known.phase is Phase.USED] == [runner.id]


async def test_no_runner_is_claimed_twice_and_the_pool_fills_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(5)
        claimed: list[Runner] = []
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(take, rig, claimed)
        assert len({runner.id for runner in claimed}) == 40
        assert len({runner.allocation for runner in claimed}) == 40
        await rig.full(5)
        assert rig.shell.environments.statistics()[ONE].used == 40


async def test_a_burst_of_claims_starts_no_more_than_it_takes(tmp_path: Path) -> None:
    async with open_rig(tmp_path, ScriptedExecutor(answer_delay=0.02)) as rig:
        await rig.put(10)
        await rig.full(10)
        claimed: list[Runner] = []
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(take, rig, claimed)
        await rig.full(10)
        assert len(rig.executor.started) == 20


async def test_more_runners_that_come_at_once_than_clients_wait_are_given_one_each(tmp_path: Path) -> None:
    executor = ScriptedExecutor(held=True)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(2)
        claimed: list[Runner] = []
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(take, rig, claimed)
                    await until(partial(_is_waiting, rig, number + 1))
                await until(lambda: len(executor.jobs) == 5)
                executor.silent = True  # so that the next listing tells of all five at once
                for job in list(executor.jobs):
                    executor.run(job)
        assert len({runner.id for runner in claimed}) == 3
        assert rig.shell.environments.statistics()[ONE].used == 3
        assert [service.error for service in rig.supervisor.status() if service.error] == []


def _is_waiting(rig: Rig, number: int) -> bool:
    return rig.shell.claims.waiting(ONE) == number


async def test_waiting_clients_are_served_in_their_order(tmp_path: Path) -> None:
    async with open_rig(tmp_path, ScriptedExecutor(held=True)) as rig:
        await rig.put(0)
        served: dict[int, JobId] = {}

        async def wait(number: int) -> None:
            served[number] = (await rig.shell.claims.claim(ONE, timeout=60)).job

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(wait, number)
                await until(partial(_is_waiting, rig, number + 1))
            await until(lambda: len(rig.executor.started) == 5)
            for job in list(rig.executor.started):
                rig.executor.run(job)
                await trio.sleep(0.01)
        assert [served[number] for number in range(5)] == rig.executor.started


async def test_who_leaves_the_queue_costs_the_others_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path, ScriptedExecutor(held=True)) as rig:
        await rig.put(0)
        served: list[int] = []
        ran: set[JobId] = set()
        scopes = {number: trio.CancelScope() for number in range(5)}

        async def wait(number: int) -> None:
            with scopes[number]:
                await rig.shell.claims.claim(ONE, timeout=60)
                served.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(wait, number)
                await until(partial(_is_waiting, rig, number + 1))
            for number in (0, 2):
                scopes[number].cancel()
            await until(lambda: rig.shell.claims.waiting(ONE) == 3)
            for count in range(1, 4):
                await until(lambda: any(job not in ran for job in rig.executor.started))
                ran_now = next(job for job in rig.executor.started if job not in ran)
                ran.add(ran_now)
                rig.executor.run(ran_now)
                await until(partial(_has, served, count))
        assert served == [1, 3, 4]


def _has(served: list[int], count: int) -> bool:
    return len(served) == count


async def test_pool_size_zero_starts_a_runner_on_demand(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(0)
        await rig.shell.claims.claim(ONE, timeout=60)
        await until(lambda: rig.idle() == 0)


async def test_nothing_idle_in_time_is_overload(tmp_path: Path) -> None:
    async with open_rig(tmp_path, ScriptedExecutor(held=True), claim_wait=0.05) as rig:
        await rig.put(1)
        with pytest.raises(Overloaded, match="no runners available"):
            await rig.shell.claims.claim(ONE, timeout=60)
        assert rig.shell.claims.waiting(ONE) == 0


async def test_a_client_that_hangs_up_while_waiting_leaves_no_claim(tmp_path: Path) -> None:
    async with open_rig(tmp_path, ScriptedExecutor(held=True)) as rig:
        await rig.put(1)
        with trio.move_on_after(0.05):
            await rig.shell.claims.claim(ONE, timeout=60)
        await until(lambda: len(rig.executor.started) >= 1)
        for job in rig.executor.started:
            rig.executor.run(job)
        await rig.full(1)
        assert rig.shell.environments.statistics()[ONE].used == 0


async def test_a_client_that_hangs_up_while_its_claim_is_saved_leaves_no_used_runner(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        await rig.full(1)
        with trio.CancelScope() as hang_up:
            hang_up.cancel()
            await rig.shell.claims.claim(ONE, timeout=60)
        await rig.full(1)
        assert rig.shell.environments.statistics()[ONE].used == 0


async def test_an_unknown_environment_is_told_at_once(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        with pytest.raises(EnvironmentNotFound, match="execution environment not found"):
            await rig.shell.claims.claim(EnvironmentId(9999), timeout=60)


async def test_who_waits_is_told_when_the_service_drains(tmp_path: Path) -> None:
    async with open_rig(tmp_path, ScriptedExecutor(held=True)) as rig:
        await rig.put(1)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(Draining):
                    await rig.shell.claims.claim(ONE, timeout=60)

            nursery.start_soon(wait)
            await until(lambda: rig.shell.claims.waiting(ONE) == 1)
            rig.shell.claims.drain()


async def test_a_released_runner_is_gone_at_once_and_its_job_is_stopped(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        await rig.shell.claims.release(runner.id)
        with pytest.raises(RunnerGone, match="released"):
            rig.shell.claims.used(runner.id)
        await until(lambda: runner.job in rig.executor.stopped)
        await until(lambda: runner.job not in rig.jobs())
        told = await rig.shell.claims.tell(runner.id)
        assert told is not None
        assert told.reason == "released"


async def test_the_end_of_a_runner_is_told_once_with_its_reason(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        told: list[Reason] = []
        with rig.shell.claims.on_end(runner.id, told.append):
            rig.executor.move(runner.job)
            await until(lambda: bool(told))
        await rig.full(1)
        assert told == [Reason.MIGRATED]
        with rig.shell.claims.on_end(runner.id, told.append):
            assert len(told) == 2


async def test_idle_ids_are_no_ids_for_clients(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        await rig.full(1)
        idle = next(rig.fleet.runners())
        with pytest.raises(RunnerGone):
            rig.shell.claims.used(idle.id)
        with pytest.raises(RunnerGone):
            await rig.shell.claims.release(idle.id)
        await rig.shell.claims.stop(idle.id)
        await until(lambda: idle.job in rig.executor.stopped)

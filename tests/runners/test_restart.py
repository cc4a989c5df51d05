"""What was answered survives a restart; deadlines go on; what was under way is finished."""

from pathlib import Path

import pytest
import trio

from poseidon.core.model import Phase
from poseidon.errors import RunnerGone
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, open_rig, until


async def test_runners_are_known_again_without_asking_the_executor(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(3)
        used = await rig.shell.claims.claim(ONE, timeout=60)
        await rig.full(3)
        idle = {runner.id for runner in rig.fleet.runners() if runner.phase is Phase.IDLE}
    executor.reachable = False
    async with open_rig(tmp_path, executor) as rig:
        assert rig.shell.claims.used(used.id).claimed_at == pytest.approx(used.claimed_at, abs=0.01)
        claimed = await rig.shell.claims.claim(ONE, timeout=60)
        assert claimed.id in idle
        assert len(executor.started) == 4


async def test_runners_that_ended_meanwhile_are_gone_and_replaced(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(2)
        used = await rig.shell.claims.claim(ONE, timeout=60)
        await rig.full(2)
    executor.remove(used.job)
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: rig.fleet.runner(used.id) is None)
        with pytest.raises(RunnerGone):
            rig.shell.claims.used(used.id)
        await rig.full(2)


async def test_a_stop_that_was_not_answered_is_asked_for_again(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=60)
        executor.reachable = False
        await rig.shell.claims.release(runner.id)
    assert runner.job not in executor.stopped
    executor.reachable = True
    async with open_rig(tmp_path, executor) as rig:
        with pytest.raises(RunnerGone):
            rig.shell.claims.used(runner.id)
        await until(lambda: runner.job in executor.stopped)
        await until(lambda: runner.job not in rig.jobs())


async def test_a_start_that_was_not_answered_is_finished(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(0)
        executor.reachable = False
        await rig.put(2)
        await until(lambda: len(rig.jobs()) == 2)
        wanted = set(rig.jobs())
        await rig.store.flush()
    executor.reachable = True
    async with open_rig(tmp_path, executor) as rig:
        await rig.full(2)
        assert set(executor.started) == wanted


async def test_inactivity_ends_a_runner_and_activity_prolongs_it(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=1)
        claimed = trio.current_time()
        await trio.sleep(0.5)
        rig.shell.claims.active(runner.id)
        await until(lambda: rig.fleet.runner(runner.id) is None)
        assert trio.current_time() - claimed >= 1.45
        with pytest.raises(RunnerGone, match="inactive"):
            rig.shell.claims.used(runner.id)


async def test_a_held_runner_does_not_expire(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=1)
        with rig.shell.claims.hold(runner.id):
            await trio.sleep(1.2)
            assert rig.shell.claims.used(runner.id).phase is Phase.USED
        await until(lambda: rig.fleet.runner(runner.id) is None)


async def test_a_restart_does_not_lengthen_a_runners_life_by_more_than_one_timeout(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=1)
        await rig.store.flush()
    async with open_rig(tmp_path, executor) as rig:
        assert rig.shell.claims.used(runner.id).phase is Phase.USED
        restarted = trio.current_time()
        await until(lambda: rig.fleet.runner(runner.id) is None)
        assert trio.current_time() - restarted < 1.5


async def test_a_crashed_service_takes_up_its_work(tmp_path: Path) -> None:
    """A bug in a carrier costs nothing but time: what it had to do is decided again."""
    async with open_rig(tmp_path) as rig:
        await rig.put(1)
        await rig.full(1)
        await rig.supervisor.stop("carrier local")
        rig.executor.die(rig.jobs()[0])
        await until(lambda: rig.idle() == 0)
        await rig.supervisor.start("carrier local", rig.shell.carriers["local"].run)
        await rig.full(1)

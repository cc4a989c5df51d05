"""Environments are kept in the executor too where it can: taken over from there, put there first, never lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
import trio.testing

from poseidon.core.model import Environment, EnvironmentId, JobId, Phase
from poseidon.errors import ExecutorUnreachable
from poseidon.runners.facts import PoolStatus
from tests.fakes.scripted import RecordingExecutor
from tests.runners.shell import ONE, environment, open_rig, until

OLD = JobId("1-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
TWO = EnvironmentId(2)
USED = JobId("1-9d8eca30-cc4a-4385-94ad-b089bc8bcead")


@dataclass
class TemplateExecutor(RecordingExecutor):
    templates: dict[EnvironmentId, Environment] = field(default_factory=dict)
    asked: int = 0
    read: trio.Event = field(default_factory=trio.Event)
    """The templates have been read, but not handed on: `hand_on` is awaited."""
    hand_on: trio.Event | None = None
    refused_puts: int = 0

    async def put_template(self, environment: Environment) -> None:
        await self._answer()
        if self.refused_puts:
            self.refused_puts -= 1
            raise ExecutorUnreachable("not now")
        self.templates[environment.id] = environment

    async def remove_template(self, environment: EnvironmentId) -> None:
        await self._answer()
        self.templates.pop(environment, None)

    async def environments(self) -> Sequence[Environment]:
        await self._answer()
        self.asked += 1
        found = [replace(each, generation=1, compatible_since=1) for each in self.templates.values()]
        if self.hand_on is not None:
            self.read.set()
            await self.hand_on.wait()
        return found


async def test_a_template_that_nobody_knows_becomes_an_environment_with_its_runners(tmp_path: Path) -> None:
    executor = TemplateExecutor(templates={ONE: environment(2)})
    executor.register(OLD, used=False)
    executor.register(USED, used=True)
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: rig.shell.environments.find(ONE) is not None)
        await rig.full(2)
        assert rig.shell.environments.get(ONE) == environment(2)
        phases = {runner.job: runner.phase for runner in rig.fleet.runners()}
        assert phases[OLD] is Phase.IDLE
        assert phases[USED] is Phase.USED
        assert len(executor.started) == 1
    async with open_rig(tmp_path, executor) as rig:
        assert rig.shell.environments.get(ONE) == environment(2)


async def test_a_template_that_has_vanished_is_registered_again(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        assert set(executor.templates) == {ONE}
    executor.templates.clear()
    async with open_rig(tmp_path, executor):
        await until(lambda: ONE in executor.templates)


async def test_a_removed_environment_has_no_template_and_does_not_come_back(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.shell.environments.remove(ONE)
        assert not executor.templates
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: executor.asked == 2)
        assert rig.shell.environments.find(ONE) is None


async def test_what_the_executor_cannot_be_told_is_not_done_by_halves(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        executor.reachable = False
        with pytest.raises(ExecutorUnreachable):
            await rig.put(7)
        with pytest.raises(ExecutorUnreachable):
            await rig.shell.environments.remove(ONE)
        assert rig.shell.environments.get(ONE).pool_size == 1
        executor.reachable = True
        assert not await rig.put(7)
        assert executor.templates[ONE].pool_size == 7


async def test_what_the_configuration_says_does_not_wait_for_the_executor(tmp_path: Path) -> None:
    executor = TemplateExecutor(reachable=False)
    async with open_rig(tmp_path, executor) as rig:
        await rig.shell.environments.put_if_changed(environment(1))
        assert rig.shell.environments.get(ONE) == environment(1)
        executor.reachable = True
        await until(lambda: ONE in executor.templates)
        assert not rig.shell.environments.untold
        executor.reachable = False
        await rig.shell.environments.put_if_changed(environment(3))
        executor.reachable = True
        await until(lambda: executor.templates[ONE].pool_size == 3)


async def test_an_unreachable_executor_is_asked_for_templates_until_it_answers(tmp_path: Path) -> None:
    executor = TemplateExecutor(reachable=False, templates={ONE: environment(0)})
    async with open_rig(tmp_path, executor) as rig:
        await trio.sleep(0.02)
        executor.reachable = True
        await until(lambda: rig.shell.environments.find(ONE) is not None)
        assert rig.shell.environments.statistics()[ONE].status is PoolStatus.OK


# Fetching


async def test_a_fetch_takes_over_what_others_have_put_there(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: executor.asked == 1)
        executor.templates[ONE] = environment(1)
        executor.register(OLD, used=False)
        assert rig.shell.environments.find(ONE) is None
        await rig.shell.environments.fetch()
        assert rig.shell.environments.get(ONE) == environment(1)
        await rig.full(1)
        assert rig.jobs() == [OLD]


async def test_a_fetch_changes_nothing_of_what_is_known_and_registers_what_has_vanished(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.full(1)
        before = rig.jobs()
        executor.templates[ONE] = environment(7, image="another")
        await rig.shell.environments.fetch()
        assert rig.shell.environments.get(ONE) == environment(1)
        executor.templates.clear()
        await rig.shell.environments.fetch()
        assert executor.templates[ONE] == environment(1)
        assert rig.jobs() == before


async def test_fetches_that_wait_together_ask_once(tmp_path: Path) -> None:
    executor = TemplateExecutor(hand_on=trio.Event())
    async with open_rig(tmp_path, executor) as rig:
        with trio.fail_after(30):
            await executor.read.wait()
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(rig.shell.environments.fetch)
                await trio.testing.wait_all_tasks_blocked()
                assert executor.hand_on is not None
                executor.hand_on.set()
        assert executor.asked == 2


async def test_a_fetch_fails_as_the_executor_does(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: executor.asked == 1)
        executor.reachable = False
        with trio.fail_after(30), pytest.raises(ExecutorUnreachable, match="nobody answers"):
            await rig.shell.environments.fetch()
        executor.reachable = True
        with trio.fail_after(30):
            await rig.shell.environments.fetch()


async def test_who_asked_for_a_fetch_may_leave_and_nothing_stays_half_done(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: executor.asked == 1)
        executor.templates[ONE] = environment(2)
        executor.hand_on = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.shell.environments.fetch)
            with trio.fail_after(30):
                await executor.read.wait()
            nursery.cancel_scope.cancel()
        executor.hand_on.set()
        await until(lambda: rig.shell.environments.find(ONE) == environment(2))


async def test_what_is_removed_while_templates_are_read_does_not_come_back(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await until(lambda: executor.asked == 1)
        executor.hand_on = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.shell.environments.fetch)
            with trio.fail_after(30):
                await executor.read.wait()
            await rig.shell.environments.remove(ONE)
            executor.hand_on.set()
        assert rig.shell.environments.find(ONE) is None
    assert not executor.templates


async def test_what_is_put_while_templates_are_read_is_not_overwritten(tmp_path: Path) -> None:
    executor = TemplateExecutor(templates={ONE: environment(7, image="theirs")}, hand_on=trio.Event())
    async with open_rig(tmp_path, executor) as rig:
        with trio.fail_after(30):
            await executor.read.wait()
        await rig.put(1)
        assert executor.hand_on is not None
        executor.hand_on.set()
        await rig.shell.environments.fetch()
        assert rig.shell.environments.get(ONE) == environment(1)
    executor.hand_on = None
    async with open_rig(tmp_path, executor) as rig:
        assert rig.shell.environments.get(ONE) == environment(1)


async def test_what_is_removed_while_its_template_is_registered_again_stays_removed(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.shell.environments.put(replace(environment(0), id=TWO))
        executor.templates.clear()
        executor.hand_on = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.shell.environments.fetch)
            with trio.fail_after(30):
                await executor.read.wait()
            executor.answer_delay = 0.02
            nursery.start_soon(rig.shell.environments.remove, TWO)
            await trio.testing.wait_all_tasks_blocked()
            executor.hand_on.set()
        assert set(executor.templates) == {ONE}


async def test_a_template_that_had_to_wait_is_put_though_its_environment_was_not_known_yet(tmp_path: Path) -> None:
    executor = TemplateExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: executor.asked == 1)
        executor.refused_puts = 1
        await rig.shell.environments.put_if_changed(environment(1))
        await until(lambda: ONE in executor.templates)

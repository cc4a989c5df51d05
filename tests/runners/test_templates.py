"""Environments are kept in the executor too where it can: taken over from there, put there first, never lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio

from poseidon.core.model import Environment, EnvironmentId, JobId, Phase
from poseidon.errors import ExecutorUnreachable
from poseidon.runners.facts import PoolStatus
from tests.fakes.scripted import RecordingExecutor
from tests.runners.shell import ONE, environment, open_rig, until

OLD = JobId("1-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
USED = JobId("1-9d8eca30-cc4a-4385-94ad-b089bc8bcead")


@dataclass
class TemplateExecutor(RecordingExecutor):
    templates: dict[EnvironmentId, Environment] = field(default_factory=dict)
    asked: int = 0

    async def put_template(self, environment: Environment) -> None:
        await self._answer()
        self.templates[environment.id] = environment

    async def remove_template(self, environment: EnvironmentId) -> None:
        await self._answer()
        self.templates.pop(environment, None)

    async def environments(self) -> Sequence[Environment]:
        await self._answer()
        self.asked += 1
        return [replace(each, generation=1, compatible_since=1) for each in self.templates.values()]


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

"""Health and status tell what ails, and where: the worst first, in words that help."""

from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import PlacementFailed
from poseidon.executors.base import Ability, StreamFigures
from poseidon.runners.facts import Ailment, ExecutorFacts, PoolStatus
from poseidon.runners.overview import Overview
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, Rig, open_rig, until

FIGURES = StreamFigures(connected=True, age=0.5, lag=0.01, index=9, lines=4, events=3, breaks=0)


@dataclass
class FollowingExecutor(ScriptedExecutor):
    def stream_figures(self) -> StreamFigures:
        return FIGURES

    def abilities(self) -> tuple[Ability, ...]:
        return (Ability("users", True, "by the test"),)


def overview(rig: Rig, threshold: float = 0.0) -> Overview:
    return Overview(rig.shell, 0.0, threshold)


async def test_an_executor_that_is_not_reached_is_told_with_the_reason(tmp_path: Path) -> None:
    async with open_rig(tmp_path, FollowingExecutor(reachable=False)) as rig:
        await until(lambda: rig.shell.dispatchers["local"].trouble is not None)
        assert overview(rig).ailment() == Ailment("NOMAD_UNREACHABLE", "executor local: nobody answers")
        [told] = overview(rig).executors()
        assert (told.reachable, told.trouble, told.listed) == (False, "nobody answers", False)
        rig.executor.reachable = True
        await until(lambda: overview(rig).ailment() is None)
        abilities = (Ability("users", True, "by the test"),)
        assert overview(rig).executors() == (ExecutorFacts("local", True, None, True, abilities, FIGURES),)


async def test_an_executor_without_a_stream_has_no_figures(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        assert overview(rig).executors()[0].stream is None


async def test_a_pool_that_finds_no_room_says_so_in_health(tmp_path: Path) -> None:
    refusal = PlacementFailed("nomad has no room: memory exhausted on 2 nodes")
    async with open_rig(tmp_path, ScriptedExecutor(refusal=refusal)) as rig:
        await rig.put(2)
        await until(lambda: rig.shell.environments.statistics()[ONE].status is PoolStatus.FAILING)
        ailment = overview(rig, threshold=0.5).ailment()
        assert ailment is not None
        assert ailment.code == "PREWARMING_POOL_DEPLETING"
        assert ailment.message.endswith("environments 1 (nomad has no room: memory exhausted on 2 nodes)")
        await until(lambda: overview(rig).ailment() is None)

"""Rule 8 on small histories, completely: every order, every loss, every doubling, then a listing."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, permutations

import pytest

from poseidon.core.events import Claim, Listed
from poseidon.core.model import JobGone, JobId, JobSeen, Phase, Runner, RunnerId, Value
from tests.core.scene import TEN, J, Scene, allocation, ends, listing, seen, stops

MIGRATION: tuple[Value, ...] = (
    allocation("a1", 11, migrate=True),
    allocation("a1", 12, desired="stop"),
    allocation("a2", 13, created=12, client="pending"),
    allocation("a2", 14, created=12, started="s2"),
    allocation("a1", 15, desired="stop", client="complete"),
)
RESTARTS: tuple[Value, ...] = (
    allocation("a1", 11),
    allocation("a1", 12, client="pending"),
    allocation("a1", 13, started="s2"),
    allocation("a1", 14, client="pending"),
    allocation("a1", 15, started="s3"),
)
FAILURES: tuple[Value, ...] = (
    allocation("a1", 11),
    allocation("a1", 12, client="failed", follow_up="e1"),
    seen(13, "dead"),
    seen(13, "pending"),
    allocation("a1", 14, client="failed", desired="stop", follow_up="e1", next="a2"),
    allocation("a2", 15, created=14, started="s2"),
)
DEATH: tuple[Value, ...] = (
    allocation("a1", 10, client="pending"),
    seen(10, "running"),
    allocation("a1", 11),
    allocation("a1", 12, client="failed"),
    seen(12, "dead"),
)
PURGE: tuple[Value, ...] = (
    seen(10, "running"),
    allocation("a1", 11),
    JobGone(J, 12),
    allocation("a1", 13, desired="stop"),
    allocation("a1", 14, desired="stop", client="complete"),
)
NEW_LIFE_OF_A_NAME: tuple[Value, ...] = (
    allocation("a1", 11),
    JobGone(J, 12),
    allocation("a1", 13, desired="stop"),
    seen(14, "pending"),
    allocation("a2", 15, created=15, client="pending"),
    allocation("a2", 16, created=15, started="s2"),
)
LOST_AND_BACK: tuple[Value, ...] = (
    allocation("a1", 11),
    allocation("a1", 12, client="lost", desired="stop", next="a2"),
    allocation("a2", 12, created=12, client="pending"),
    allocation("a2", 13, created=12, started="s2"),
    allocation("a1", 14, desired="stop"),
    allocation("a1", 15, desired="stop", client="complete"),
)
SECOND_SLOT: tuple[Value, ...] = (
    allocation("a1", 11),
    allocation("b1", 12, created=12, slot=1, started="s9"),
    allocation("a1", 13, desired="stop"),
    allocation("a1", 14, desired="stop", client="complete"),
    seen(15, "running"),
)

HISTORIES = {
    "migration": MIGRATION,
    "restarts": RESTARTS,
    "failures": FAILURES,
    "death": DEATH,
    "purge": PURGE,
    "new life of a name": NEW_LIFE_OF_A_NAME,
    "lost and back": LOST_AND_BACK,
    "second slot": SECOND_SLOT,
}
histories = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)

Outcome = tuple[str, tuple[str, str] | None]


def truth(history: Sequence[Value]) -> tuple[Value, ...]:
    """The last state of each object; a job that was removed isn't there."""
    gone = max((value.version for value in history if isinstance(value, JobGone)), default=0)
    newest: dict[str, Value] = {}
    for value in [seen(9, "pending"), *history]:
        if isinstance(value, JobGone):
            newest.pop(value.job, None)
        elif not isinstance(value, JobSeen) or value.version > gone:
            newest[value.job if isinstance(value, JobSeen) else value.id] = value
    return tuple(newest.values())


def final(scene: Scene, history: Sequence[Value]) -> Outcome:
    """Where the job stands after a listing, and one more for the doubts that the first one raised."""
    last = [value for value in truth(history) if not isinstance(value, JobGone)]
    scene.lists(*last, index=20)
    scene.lists(*last, index=20)
    again = scene.hand_in(Listed(listing(*last, index=20), scene.fleet.ask(scene.now)))
    assert again == [], "the same input again decides nothing"
    runner = next(iter(scene.fleet.runners()), None)
    return scene.state(), None if runner is None else (runner.allocation, runner.started)


def expected(history: Sequence[Value]) -> Outcome:
    """What the listing alone gives."""
    scene = Scene()
    scene.starts()
    return final(scene, history)


def subsets(history: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
    return chain.from_iterable(combinations(history, kept) for kept in range(len(history) + 1))


@histories
def test_every_order_comes_to_the_same(history: tuple[Value, ...]) -> None:
    wanted = expected(history)
    for order in permutations(history):
        scene = Scene()
        scene.starts()
        scene.hand_in(*order)
        assert final(scene, history) == wanted, order


@histories
def test_every_loss_and_every_doubling_comes_to_the_same(history: tuple[Value, ...]) -> None:
    wanted = expected(history)
    for kept in subsets(history):
        for doubled in subsets(kept):
            scene = Scene()
            scene.starts()
            scene.hand_in(*kept, *doubled)
            assert final(scene, history) == wanted, (kept, doubled)


@pytest.mark.parametrize("name", sorted(HISTORIES.keys() - {"new life of a name"}))
def test_a_listing_anywhere_in_between_comes_to_the_same(name: str) -> None:
    """(Once a listing has proven a job to be over, a new life of its name is a stranger's.)"""
    history = HISTORIES[name]
    wanted = expected(history)
    for asked in range(len(history) + 1):
        index = max((value.version for value in history[:asked]), default=9)
        older = [value for value in truth(history[:asked]) if not isinstance(value, JobGone)]
        for answered in range(asked, len(history) + 1):
            scene = Scene()
            scene.starts()
            scene.hand_in(*history[:asked])
            question = scene.fleet.ask(scene.now)
            scene.hand_in(*history[asked:answered])
            scene.hand_in(Listed(listing(*older, index=index), question))
            scene.hand_in(*history[answered:])
            assert final(scene, history) == wanted, (asked, answered)


@histories
def test_a_daemon_that_restarts_anywhere_comes_to_the_same(history: tuple[Value, ...]) -> None:
    wanted = expected(history)
    for told in range(len(history) + 1):
        scene = Scene()
        scene.starts()
        scene.hand_in(*history[:told])
        scene.restarts()
        scene.hand_in(*history[told:])
        assert final(scene, history) == wanted, told


@histories
def test_in_every_order_a_claimed_life_is_kept_or_its_allocation_spent(history: tuple[Value, ...]) -> None:
    """Whatever is idle after whichever step is claimed, once; it ends once, and nobody else gets its allocation."""
    wanted = expected(history)
    for order in permutations(history):
        scene = Scene()
        scene.starts()
        claimed: list[Runner] = []
        ended: list[tuple[RunnerId, str]] = []
        stopped: list[JobId] = []
        for value in order:
            decisions = scene.hand_in(value)
            idle = scene.fleet.idle(TEN)
            if idle is not None and not claimed:
                claimed.append(idle)
                decisions += scene.hand_in(Claim(idle.id, 0))
            ended += ends(decisions)
            stopped += stops(decisions)
        state, life = final(scene, history)
        check_claimed(scene, wanted, (state, life), [(one.allocation, one.started) for one in claimed], stopped)
        assert len(ended) <= 1


def check_claimed(
    scene: Scene, wanted: Outcome, found: Outcome, claimed: list[tuple[str, str]], stopped: list[JobId]
) -> None:
    if not claimed:
        assert found == wanted
    elif wanted[1] == claimed[0] and not stopped and found[1] is not None:
        assert scene.only.phase is Phase.USED
    elif wanted[1] is not None and wanted[1][0] != claimed[0][0] and not stopped:
        assert found == wanted
    else:
        assert found[0] in ("ended", "gone", wanted[0])
        assert found[1] is None or found[1][0] != claimed[0][0]

"""Every recorded stream of a real cluster against what it is known to mean, in order and under every disorder."""

import json
from collections import Counter
from functools import cache
from random import Random
from typing import Any

import pytest

from poseidon.core.events import Start
from poseidon.core.model import JobId
from tests.core.nomad_values import RECORDINGS, Line, read_recording, truth_of
from tests.core.replay import Life, Replay

EXPECTED: dict[str, Any] = json.loads((RECORDINGS / "expected.json").read_text())["recordings"]

recordings = pytest.mark.parametrize("name", EXPECTED)
claims = pytest.mark.parametrize("claim", ["unclaimed", "first_life_claimed"])

lines_of = cache(read_recording)


def first_lives(name: str) -> dict[JobId, Life]:
    lives = {job: what["lives"] for job, what in EXPECTED[name]["jobs"].items()}
    return {JobId(job): (life[0]["allocation"], life[0]["started"]) for job, life in lives.items() if life}


def replay_of(name: str, claim: str) -> Replay:
    return Replay(truth_of(lines_of(name)), first_lives(name) if claim == "first_life_claimed" else {})


def play_in_order(name: str, claim: str, lines: list[Line]) -> Replay:
    """*lines* from first to last; look-ups are answered by what was true at that place."""
    replay = replay_of(name, claim)
    replay.truth = truth_of([])
    for line in lines:
        replay.truth.take(line)
        replay.play([line])
    replay.list_everything(replay.truth.listing())
    return replay


def check_lives(replay: Replay, name: str, claim: str) -> None:
    """All lives with their ends; a job that was stopped at a line for its spent allocation has no later ones."""
    stopped = {d["job"] for d in EXPECTED[name][claim]["decisions"] if d["decision"] == "StopJob" and d["at"].isdigit()}
    for job, what in EXPECTED[name]["jobs"].items():
        expected = [(life["allocation"], life["started"], life["ended"]) for life in what["lives"]]
        seen = replay.lives.get(JobId(job), {}).values()
        told = [(runner.allocation, runner.started, runner.reason) for runner in seen]
        assert told == (expected[:1] if job in stopped else expected), job


def check_decisions(replay: Replay, name: str, claim: str) -> None:
    expected = Counter((d["at"], d["decision"], d["job"]) for d in EXPECTED[name][claim]["decisions"])
    assert Counter(replay.decisions) == expected
    idle, starting = replay.counts()
    assert (idle, starting) == (EXPECTED[name][claim]["idle"], EXPECTED[name][claim]["starting"])


def check_final(replay: Replay, name: str, claim: str, *, ordered: bool) -> None:
    """Where each job stands at last. Out of order, a claimed life may or may not have been seen at all."""
    decided = {(d["job"], d["decision"]) for d in EXPECTED[name][claim]["decisions"]}
    for job, what in EXPECTED[name]["jobs"].items():
        known = JobId(job)
        final = what["final"]
        claimed = [runner for runner in replay.lives.get(known, {}).values() if runner.claimed_at is not None]
        allowed = {what["state_if_unclaimed"]}
        if claimed and final and (final["allocation"], final["started"]) == replay.claim[known]:
            allowed = {"used"}
        elif claimed and final and final["allocation"] == claimed[0].allocation:
            allowed = {"ended"}
        elif claimed and (job, "StopJob") in decided:
            allowed = {"ended"} if ordered else allowed | {"ended"}
        assert replay.state(known) in allowed, job
        runner = replay.living(known)
        if runner is not None:
            allocation = replay.fleet.allocation(runner)
            assert allocation is not None
            told = (runner.allocation, runner.node_name, runner.started, allocation.restarts)
            assert told == (final["allocation"], final["node"], final["started"], final["restarts"])
            if ordered:
                assert (runner.id == job) == final["id_is_job"]


def check_repeats_decide_nothing(replay: Replay) -> None:
    before = list(replay.decisions)
    replay.list_everything(replay.truth.listing())
    assert replay.decisions == before
    assert all(times == 1 for times in replay.ended.values())


def starts_first(lines: list[Line]) -> list[Line]:
    """Our own starts are recorded before anything can be heard of them."""
    return sorted((line for line in lines if line.steps), key=lambda line: not isinstance(line.steps[0], Start))


@recordings
@claims
def test_a_recording_in_order(name: str, claim: str) -> None:
    replay = play_in_order(name, claim, lines_of(name))
    check_lives(replay, name, claim)
    check_decisions(replay, name, claim)
    check_final(replay, name, claim, ordered=True)
    check_repeats_decide_nothing(replay)


@recordings
@claims
def test_a_recording_with_every_line_doubled(name: str, claim: str) -> None:
    replay = play_in_order(name, claim, [line for line in lines_of(name) for _ in range(2)])
    check_lives(replay, name, claim)
    check_decisions(replay, name, claim)
    check_final(replay, name, claim, ordered=True)
    check_repeats_decide_nothing(replay)


@recordings
@claims
def test_a_recording_played_twice_over(name: str, claim: str) -> None:
    lines = lines_of(name)
    replay = replay_of(name, claim)
    replay.truth = truth_of([])
    for line in lines:
        replay.truth.take(line)
        replay.play([line])
    replay.play(lines)
    replay.list_everything(replay.truth.listing())
    check_lives(replay, name, claim)
    check_decisions(replay, name, claim)
    check_final(replay, name, claim, ordered=True)


@recordings
@claims
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_shuffled_and_listed(name: str, claim: str, seed: int) -> None:
    singles = [Line(line.index, (step,)) for line in lines_of(name) for step in line.steps]
    Random(seed).shuffle(singles)
    replay = replay_of(name, claim)
    replay.play(starts_first(singles))
    replay.list_everything(replay.truth.listing())
    check_final(replay, name, claim, ordered=False)
    check_repeats_decide_nothing(replay)


@recordings
@claims
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_with_losses_and_listed(name: str, claim: str, seed: int) -> None:
    random = Random(seed)
    kept = [line for line in lines_of(name) if line.steps if _is_act(line) or random.random() > 0.3]
    replay = replay_of(name, claim)
    replay.play(kept)
    replay.list_everything(replay.truth.listing())
    replay.list_everything(replay.truth.listing())  # a doubt that the first one raises needs a second one
    check_final(replay, name, claim, ordered=False)
    check_repeats_decide_nothing(replay)


@recordings
@claims
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_with_an_older_listing_in_between(name: str, claim: str, seed: int) -> None:
    random = Random(seed)
    lines = lines_of(name)
    asked_at, answered_at = sorted(random.randrange(len(lines) + 1) for _ in range(2))
    replay = replay_of(name, claim)
    replay.play(lines[:asked_at])
    older, asked = truth_of(lines[:asked_at]).listing(), replay.fleet.ask(replay.now)
    replay.play(lines[asked_at:answered_at])
    replay.list_everything(older, asked)
    replay.play(lines[answered_at:])
    replay.list_everything(replay.truth.listing())
    check_final(replay, name, claim, ordered=False)
    check_repeats_decide_nothing(replay)


def _is_act(line: Line) -> bool:
    """Our own acts can't be lost: a start is kept, and repeated until it is answered."""
    return not hasattr(line.steps[0], "version")

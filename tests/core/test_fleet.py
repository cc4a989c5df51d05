"""What the fleet promises, one sequence a promise. The numbers S and D are those of reports from production."""

from dataclasses import replace

import pytest

from poseidon.core.events import (
    Claim,
    Listed,
    LookUp,
    Mark,
    Marked,
    Overdue,
    PoolChanged,
    Start,
    Started,
    Stop,
    StopJob,
    Stopped,
)
from poseidon.core.model import UNTOLD, AllocationId, JobGone, JobId, Phase, Port, Reason, RunnerId, Value
from tests.core.scene import SETTLE, TEN, J, Scene, allocation, ends, job_id, listing, marks, seen, stops

# Rule 1: the newest of each object wins


def test_a_value_of_a_known_version_changes_nothing() -> None:
    scene = Scene()
    scene.runs(version=11)
    assert scene.hand_in(allocation("a1", 11, client="failed")) == []
    assert scene.state() == "idle"


def test_an_older_value_changes_nothing() -> None:
    scene = Scene()
    scene.runs(version=15)
    assert scene.hand_in(allocation("a1", 12, client="pending"), JobGone(J, 4)) == []
    assert scene.state() == "idle"


@pytest.mark.parametrize("order", [("dead", "pending"), ("pending", "dead")])
def test_of_two_states_at_one_version_the_living_one_wins(order: tuple[str, str]) -> None:
    scene = Scene()
    scene.starts()
    scene.hand_in(*(seen(20, status) for status in order))
    assert scene.state() == "starting"


def test_that_a_started_job_is_pending_is_but_a_guess() -> None:
    scene = Scene()
    scene.starts(index=10)
    scene.hand_in(seen(10, "running"), allocation("a1", 11, client="failed"))
    assert scene.state() == "doubtful"


# Rule 2: a runner is its life


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_a_runner_appears_with_or_without_pending_events(pending: int) -> None:
    """D1"""
    scene = Scene()
    scene.starts()
    for version in range(10, 10 + pending):
        scene.hand_in(allocation("a1", version, client="pending"))
    assert PoolChanged(TEN) in scene.hand_in(allocation("a1", 15))
    assert scene.only.phase is Phase.IDLE


ENDS = {
    "restarted": allocation("a1", 12, started="s2"),
    "out_of_memory": allocation("a1", 12, started="s2", oom_killed=True),
    "failed": allocation("a1", 12, client="failed"),
    "complete": allocation("a1", 12, client="complete"),
    "lost": allocation("a1", 12, client="lost", desired="stop"),
    "disconnected": allocation("a1", 12, client="unknown"),
    "stopped": allocation("a1", 12, desired="stop"),
    "migrated": allocation("a1", 12, migrate=True),
}


@pytest.mark.parametrize("reason", ENDS)
def test_a_runner_is_gone_as_soon_as_its_life_is_over(reason: str) -> None:
    scene = Scene()
    runner = scene.runs()
    scene.claims()
    assert ends(scene.hand_in(ENDS[reason])) == [(runner.id, reason)]
    assert scene.fleet.runner(runner.id) is None


def test_a_runner_is_gone_while_its_task_waits_to_be_restarted() -> None:
    scene = Scene()
    runner = scene.runs()
    scene.claims()
    assert ends(scene.hand_in(allocation("a1", 12, client="pending"))) == [(runner.id, "restarted")]


def test_gone_is_final_even_if_the_very_life_comes_back() -> None:
    scene = Scene()
    first = scene.runs()
    scene.hand_in(allocation("a1", 12, client="unknown"), allocation("a1", 13))
    assert scene.only.id != first.id
    assert (scene.only.allocation, scene.only.started) == (first.allocation, first.started)


def test_a_second_slot_is_none_of_ours() -> None:
    scene = Scene()
    first = scene.runs()
    assert scene.hand_in(allocation("a2", 12, created=12, slot=1, started="s2")) == []
    assert scene.only == first


def test_a_job_removed_by_somebody_else_loses_its_runner_at_once() -> None:
    """D27"""
    scene = Scene()
    runner = scene.runs()
    scene.claims()
    assert ends(scene.hand_in(JobGone(J, 20))) == [(runner.id, "stopped")]
    assert not scene.knows() or scene.state() == "doubtful"


def test_an_instant_restart_on_another_node_leaves_one_idle_runner_there() -> None:
    """S1"""
    scene = Scene()
    scene.runs("84a734a1", 11, node="nomad-agent-4")
    scene.hand_in(
        allocation("84a734a1", 12, desired="stop"),
        allocation("28e08715", 13, created=12, client="pending"),
        allocation("28e08715", 14, created=12, started="s2", node="nomad-agent-1"),
    )
    assert scene.hand_in(allocation("84a734a1", 15, desired="stop", client="complete")) == []
    assert (scene.only.allocation, scene.only.node_name, scene.only.phase) == ("28e08715", "nomad-agent-1", Phase.IDLE)


def test_the_new_start_may_be_heard_of_before_the_old_stop() -> None:
    """S1, as it was handled there"""
    scene = Scene()
    old = scene.runs("84a734a1", 11)
    scene.claims()
    decisions = scene.hand_in(allocation("28e08715", 14, created=12, started="s2"))
    assert ends(decisions) == [(old.id, "migrated")]
    assert scene.hand_in(allocation("84a734a1", 13, desired="stop")) == []
    assert (scene.only.allocation, scene.only.phase) == ("28e08715", Phase.IDLE)


@pytest.mark.parametrize("used", [False, True])
def test_a_migration_without_told_links_makes_one_fresh_idle_runner(used: bool) -> None:
    """S2: the next allocation is told by none of the events."""
    scene = Scene()
    old = scene.runs("a1", 11)
    if used:
        scene.claims()
        scene.hand_in(Marked(J, used=True))
    at_the_stop = scene.hand_in(allocation("a1", 12, desired="stop"))
    assert [runner for runner, _ in ends(at_the_stop)] == ([old.id] if used else [])
    scene.hand_in(allocation("a2", 13, created=13, client="pending"))
    at_the_start = scene.hand_in(allocation("a2", 14, created=13, started="s2"))
    assert marks(at_the_start) == ([False] if used else [])
    assert scene.hand_in(allocation("a1", 15, desired="stop", client="complete")) == []
    assert (scene.only.allocation, scene.only.phase) == ("a2", Phase.IDLE)
    assert scene.only.id != old.id


def test_several_reschedules_in_a_row_end_in_one_runner_on_the_last() -> None:
    """D3"""
    scene = Scene()
    scene.starts()
    scene.hand_in(
        allocation("a1", 10, client="pending"),
        allocation("a2", 12, created=12, client="pending"),
        allocation("a3", 14, created=14),
        allocation("a1", 15, client="complete", desired="stop"),
        allocation("a2", 16, created=12, client="complete", desired="stop"),
    )
    assert scene.only.allocation == "a3"


def test_a_pending_allocation_asked_to_stop_is_no_start() -> None:
    """D5"""
    scene = Scene()
    scene.runs()
    scene.hand_in(allocation("a1", 12, client="pending", desired="stop", next="a2"))
    assert scene.state() == "starting"
    assert list(scene.fleet.runners()) == []


def test_an_older_allocation_doesnt_come_back_when_the_newer_fails() -> None:
    scene = Scene()
    scene.runs("a1", 11)
    scene.hand_in(allocation("a2", 13, created=13), allocation("a2", 14, created=13, client="failed", follow_up="e"))
    assert scene.state() == "starting"
    assert list(scene.fleet.runners()) == []


def test_a_lost_allocation_that_comes_back_is_a_runner_no_more() -> None:
    scene = Scene()
    scene.runs("a1", 11)
    scene.hand_in(allocation("a1", 12, client="lost", desired="stop"), allocation("a2", 13, created=12, started="s2"))
    assert scene.hand_in(allocation("a1", 14, desired="stop")) == []
    assert scene.only.allocation == "a2"


def test_of_two_allocations_that_run_the_newer_one_counts() -> None:
    """As when a node that was cut off is back, and nobody has stopped either yet."""
    scene = Scene()
    scene.runs("a1", 11)
    scene.hand_in(allocation("a2", 13, created=12, started="s2"))
    assert scene.hand_in(allocation("a1", 15)) == []
    assert scene.only.allocation == "a2"


# Rule 3: a listing is everything up to its index


def test_what_a_newer_listing_lacks_is_gone() -> None:
    scene = Scene()
    runner = scene.runs()
    scene.claims()
    assert ends(scene.lists(index=20)) == [(runner.id, "stopped")]
    assert not scene.knows()


def test_what_is_newer_than_a_listing_is_not_gone() -> None:
    scene = Scene()
    runner = scene.runs(version=25, created=24)
    assert stops(scene.lists(index=8)) == []
    assert scene.only == runner


def test_an_allocation_that_a_newer_listing_lacks_is_gone() -> None:
    scene = Scene()
    scene.runs(version=12)
    scene.lists(seen(10), index=20)
    assert scene.state() == "doubtful"


def test_a_listing_counts_as_a_whole() -> None:
    """Old and new allocation are listed together: nobody is in doubt between them."""
    scene = Scene()
    scene.runs("a1", 11)
    old_and_new = allocation("a1", 12, desired="stop"), allocation("a2", 13, created=12, started="s2")
    decisions = scene.lists(seen(10), *old_and_new, index=20)
    assert [type(decision) for decision in decisions] == [PoolChanged]
    assert scene.only.allocation == "a2"


def test_what_a_listing_doesnt_tell_stays_as_it_was_known() -> None:
    scene = Scene()
    scene.starts()
    told = replace(allocation("a1", 11), previous=AllocationId("a0"), ports=(Port(80, "127.0.0.1:4000"),))
    scene.hand_in(told)
    stub = replace(allocation("a1", 12), previous=UNTOLD, next=UNTOLD)
    scene.lists(seen(10), stub, index=12)
    assert scene.fleet.allocation(scene.only) == replace(told, version=12)


def test_a_start_that_isnt_answered_yet_isnt_absent() -> None:
    scene = Scene()
    scene.hand_in(Start(J, TEN, generation=1))
    assert stops(scene.lists(index=50)) == []
    assert scene.state() == "starting"
    scene.hand_in(Started(J, 51), allocation("a1", 53, created=52))
    assert scene.only.id == RunnerId(J)


def test_a_listing_older_than_the_answer_of_a_start_doesnt_undo_it() -> None:
    scene = Scene()
    scene.starts(index=60)
    scene.lists(index=55)
    assert scene.state() == "starting"


def test_news_of_the_unknown_that_a_listing_lacked_is_ignored() -> None:
    scene = Scene()
    scene.lists(index=50)
    stranger = job_id(2)
    assert scene.hand_in(allocation("b1", 40, job=stranger), seen(45, job=stranger)) == []
    assert not scene.knows(stranger)


def test_an_old_allocation_of_a_known_job_stays_absent() -> None:
    scene = Scene()
    scene.starts(index=9)
    scene.lists(seen(9, "pending"), index=50)
    scene.hand_in(allocation("a0", 30, created=10))
    assert scene.state() == "starting"
    assert list(scene.fleet.runners()) == []


def test_one_listing_of_the_past_is_only_late() -> None:
    scene = Scene()
    runner = scene.runs(version=40, created=39)
    scene.claims()
    scene.lists(index=20)
    assert scene.only.id == runner.id
    scene.lists(seen(10), allocation("a1", 40, created=39), index=41)
    scene.lists(index=20)
    assert scene.only.id == runner.id


def test_a_cluster_that_went_back_is_taken_as_it_is() -> None:
    scene = Scene()
    scene.runs(version=40, created=39)
    now = seen(10), allocation("a1", 12, created=11, started="s1")
    assert ends(scene.lists(*now, index=20)) == []
    scene.lists(*now, index=20)
    assert scene.fleet.position.epoch == 1
    scene.hand_in(allocation("a1", 21, created=11, started="s2"))
    assert scene.only.started == "s2"


def test_a_claimed_life_survives_the_clusters_going_back() -> None:
    scene = Scene()
    runner = scene.runs(version=40, created=39)
    scene.claims()
    now = seen(10), allocation("a1", 12, created=11)
    decisions = [*scene.lists(*now, index=20), *scene.lists(*now, index=20)]
    assert ends(decisions) == []
    assert scene.only.id == runner.id
    assert scene.only.phase is Phase.USED


def test_a_cluster_that_went_back_is_noticed_though_nothing_is_left_of_it() -> None:
    """Else all that starts there would be taken for old news."""
    scene = Scene()
    scene.lists(index=500)
    scene.restarts()
    for _ in range(2):
        scene.lists(index=20)
    scene.starts(index=21)
    scene.hand_in(allocation("a1", 23, created=22))
    assert scene.only.id == RunnerId(J)


def test_a_stop_is_asked_for_again_when_the_cluster_went_back() -> None:
    scene = Scene()
    scene.runs(version=40, created=39)
    scene.hand_in(Stop(J, Reason.RELEASED), Stopped(J, 50))
    now = seen(10), allocation("a1", 12, created=11)
    assert stops(scene.lists(*now, index=20)) == []
    assert stops(scene.lists(*now, index=20)) == [J]
    assert stops(scene.lists(*now, index=20)) == []


def test_a_mark_is_written_again_when_the_cluster_went_back() -> None:
    scene = Scene()
    scene.runs(version=40, created=39)
    scene.claims()
    scene.hand_in(Marked(J, used=True))
    now = seen(10), allocation("a1", 12, created=11)
    assert marks([*scene.lists(*now, index=20), *scene.lists(*now, index=20)]) == [True]


def test_a_mark_under_way_is_asked_for_again_when_the_cluster_went_back() -> None:
    """The executor may have had no such job at that time."""
    scene = Scene()
    scene.runs(version=40, created=39)
    scene.claims()
    now = seen(10), allocation("a1", 12, created=11)
    assert marks([*scene.lists(*now, index=20), *scene.lists(*now, index=20)]) == [True]


def test_the_removal_of_an_unknown_job_doesnt_make_the_cluster_go_back() -> None:
    """Such a removal has an index of its own: no table has it."""
    scene = Scene()
    runner = scene.runs(version=12)
    scene.hand_in(JobGone(J, 8), JobGone(J, 9))
    scene.starts(job_id(2), index=13)
    scene.hand_in(JobGone(job_id(2), 99))
    for _ in range(2):
        scene.lists(seen(10), seen(13, job=job_id(2)), allocation("a1", 12), index=13)
    assert scene.fleet.position.epoch == 0
    assert scene.only == runner


# Rule 4: one owner, once


def test_a_runner_is_claimed_once() -> None:
    scene = Scene()
    runner = scene.runs()
    scene.hand_in(Claim(runner.id, 30))
    assert scene.fleet.idle(TEN) is None
    assert scene.hand_in(Claim(runner.id, 60)) == []
    assert scene.only.timeout == 30


def test_the_runner_that_has_waited_longest_is_claimed_first() -> None:
    scene = Scene()
    for number in (3, 1, 2):
        scene.now += 1
        scene.starts(job_id(number))
        scene.hand_in(allocation(f"a{number}", 20 + number, job=job_id(number)))
    assert [scene.claims().job for _ in range(3)] == [job_id(3), job_id(1), job_id(2)]


def test_a_runner_of_an_older_generation_isnt_claimed_when_that_isnt_wanted() -> None:
    scene = Scene()
    scene.runs()
    assert scene.fleet.idle(TEN, oldest_generation=2) is None
    assert scene.fleet.idle(TEN, oldest_generation=1) is not None


@pytest.mark.parametrize("pause", [False, True])
def test_a_spent_allocation_is_never_handed_out_again(pause: bool) -> None:
    """D30"""
    scene = Scene()
    runner = scene.runs()
    scene.claims()
    restarted = allocation("a1", 12, client="pending") if pause else allocation("a1", 12, started="s2")
    decisions = scene.hand_in(restarted)
    assert ends(decisions) == [(runner.id, "restarted")]
    assert stops(decisions) == [J]
    assert list(scene.fleet.runners()) == []


def test_a_spent_allocation_is_known_after_a_restart_of_the_daemon() -> None:
    """D18"""
    scene = Scene()
    scene.runs()
    scene.claims()
    scene.restarts()
    assert stops(scene.hand_in(allocation("a1", 12, started="s2"))) == [J]


def test_an_unclaimed_life_that_restarts_gets_a_new_runner() -> None:
    scene = Scene()
    first = scene.runs()
    assert stops(scene.hand_in(allocation("a1", 12, started="s2"))) == []
    assert (scene.only.allocation, scene.only.started) == ("a1", "s2")
    assert scene.only.id != first.id


def test_a_used_runner_that_is_rescheduled_makes_one_idle_runner_and_no_start() -> None:
    """D4, S3"""
    scene = Scene()
    old = scene.runs()
    assert marks(scene.hand_in(Claim(old.id, 0))) == [True]
    scene.hand_in(Marked(J, used=True))
    decisions = scene.hand_in(
        allocation("a1", 12, client="failed", follow_up="e"), allocation("a2", 13, created=13, started="s2")
    )
    assert ends(decisions) == [(old.id, "failed")]
    assert stops(decisions) == []
    assert marks(decisions) == [False]
    assert (scene.only.phase, scene.state()) == (Phase.IDLE, "idle")


def test_nothing_is_written_for_an_idle_runner_that_moves() -> None:
    """S3: no needless request"""
    scene = Scene()
    scene.runs()
    moved = allocation("a1", 12, desired="stop"), allocation("a2", 13, created=12, started="s2")
    assert marks(scene.hand_in(*moved)) == []


def test_the_same_mark_is_asked_for_once() -> None:
    scene = Scene()
    scene.runs()
    scene.claims()
    assert marks(scene.hand_in(allocation("a1", 12), seen(13))) == []
    assert marks(scene.hand_in(seen(14, used=False))) == []
    assert scene.fleet.wanted_mark(J) is True


def test_a_mark_that_may_have_been_written_is_taken_back() -> None:
    """Its answer was lost, and the runner is gone before it was repeated."""
    scene = Scene()
    scene.runs()
    scene.claims()
    moved = allocation("a1", 12, desired="stop"), allocation("a2", 13, created=12, started="s2")
    assert marks(scene.hand_in(*moved)) == [False]


def test_a_claim_while_unused_is_being_written_is_marked() -> None:
    scene = Scene()
    scene.runs()
    scene.claims()
    scene.hand_in(Marked(J, used=True))
    moved = allocation("a1", 12, desired="stop"), allocation("a2", 13, created=12, started="s2")
    assert marks(scene.hand_in(*moved)) == [False]
    assert marks(scene.hand_in(Claim(scene.only.id, 0))) == [True]


def test_no_mark_is_written_for_a_stopped_job() -> None:
    scene = Scene()
    scene.runs()
    scene.claims()
    scene.hand_in(Marked(J, used=True))
    decisions = scene.hand_in(Stop(J, Reason.RELEASED), seen(15, used=False), Marked(J, used=False))
    assert marks(decisions) == []
    assert scene.fleet.wanted_mark(J) is None


def test_an_executor_that_keeps_no_records_is_never_asked_to_mark() -> None:
    scene = Scene(mark=None)
    scene.runs()
    assert marks(scene.hand_in(Claim(scene.only.id, 0))) == []


# Rule 5: ids


def test_the_first_runner_of_our_job_has_the_jobs_id_and_the_next_a_fresh_one() -> None:
    scene = Scene()
    assert scene.runs().id == RunnerId(J)
    scene.hand_in(allocation("a1", 12, started="s2"))
    assert scene.only.id == "10-new-1"
    scene.hand_in(allocation("a2", 14, created=13, started="s3"))
    assert scene.only.id == "10-new-2"


def test_the_jobs_id_isnt_issued_again_after_a_restart_of_the_daemon() -> None:
    scene = Scene()
    scene.runs()
    scene.hand_in(allocation("a1", 12, client="pending"))
    scene.restarts()
    scene.hand_in(allocation("a1", 13, started="s2"))
    assert scene.only.id != RunnerId(J)


def test_a_job_that_was_over_and_is_there_again_is_stopped() -> None:
    """Its id has been issued, and a client may have had its allocation."""
    for used in (False, True):
        scene = Scene()
        scene.runs()
        scene.claims()
        scene.hand_in(Stop(J, Reason.RELEASED), Stopped(J, 20))
        scene.lists(index=21)
        scene.hand_in(seen(30))
        assert scene.ledger.issued(J)
        decisions = scene.looks_up(seen(30), allocation("a2", 31, created=30), index=31, used=used, issued=True)
        assert stops(decisions) == [J]
        assert list(scene.fleet.runners()) == []


# Rule 6: runners end by the stream, jobs only by proof


def fails(scene: Scene) -> None:
    scene.runs()
    scene.hand_in(allocation("a1", 12, client="failed"), seen(12, "dead"))


def test_a_dead_job_is_looked_up_before_it_is_stopped() -> None:
    """D10: a failed job was recorded dead for 1.3 seconds before it was rescheduled."""
    scene = Scene()
    scene.runs()
    decisions = scene.hand_in(allocation("a1", 12, client="failed"), seen(12, "dead"))
    assert stops(decisions) == []
    assert [one.at for one in decisions if isinstance(one, LookUp)] == [scene.now + SETTLE]
    scene.now += 1.3
    assert stops(scene.hand_in(seen(13, "pending"), allocation("a2", 14, created=14))) == []
    assert scene.state() == "idle"
    assert not scene.fleet.needs_look_up(J)


def test_a_dead_job_is_stopped_when_a_later_look_up_still_says_so() -> None:
    """D10: and replaced, as it is no longer starting."""
    scene = Scene()
    fails(scene)
    assert stops(scene.looks_up(seen(12, "dead"), allocation("a1", 12, client="failed"), index=12, after=SETTLE)) == [J]
    assert scene.state() == "ended"


@pytest.mark.parametrize("after", [0.0, SETTLE - 0.1])
def test_a_doubt_isnt_decided_by_what_was_asked_too_soon(after: float) -> None:
    scene = Scene()
    fails(scene)
    same = seen(12, "dead"), allocation("a1", 12, client="failed")
    assert stops(scene.lists(*same, index=12, after=after)) == []
    assert stops(scene.looks_up(*same, index=12, after=0)) == []
    assert scene.state() == "doubtful"


def test_a_doubt_isnt_decided_by_what_is_older_than_what_is_known() -> None:
    scene = Scene()
    fails(scene)
    scene.hand_in(seen(20, "dead"))
    assert stops(scene.lists(seen(12, "dead"), allocation("a1", 12, client="failed"), index=15)) == []


def test_a_doubt_that_stays_is_looked_up_again() -> None:
    scene = Scene()
    fails(scene)
    scene.hand_in(seen(20, "dead"))
    decisions = scene.looks_up(seen(12, "dead"), allocation("a1", 12, client="failed"), index=15)
    assert [one.job for one in decisions if isinstance(one, LookUp)] == [J]


RETURNS: dict[str, tuple[Value, ...]] = {
    "a follow-up": (allocation("a1", 12, client="failed", follow_up="e"), seen(12, "dead")),
    "a pending job": (seen(12, "pending"), allocation("a1", 12, client="failed")),
    "a next allocation": (allocation("a1", 12, client="lost", desired="stop", next="a2"),),
    "asked to migrate": (allocation("a1", 12, migrate=True),),
}


@pytest.mark.parametrize("sign", RETURNS)
def test_a_job_that_will_come_back_is_starting(sign: str) -> None:
    """D11"""
    scene = Scene()
    scene.runs()
    decisions = scene.hand_in(*RETURNS[sign])
    assert scene.state() == "starting"
    assert stops(decisions) == []
    assert not any(isinstance(decision, LookUp) for decision in decisions)


def test_a_job_too_long_without_a_life_is_overdue_whatever_happened_meanwhile() -> None:
    """D9: an environment whose jobs fail for ever"""
    scene = Scene()
    scene.starts()
    for number in range(5):
        created = 20 + 2 * number
        scene.now += 20
        scene.hand_in(allocation(f"a{number}", created, created=created, client="pending"))
        scene.hand_in(allocation(f"a{number}", created + 1, created=created, client="failed", follow_up="e"))
    assert scene.fleet.overdue(scene.now, 90) == [J]
    assert stops(scene.hand_in(Overdue(J))) == [J]
    assert scene.fleet.overdue(scene.now, 90) == []


def test_a_doubtful_job_can_be_overdue() -> None:
    scene = Scene()
    fails(scene)
    scene.now += 100
    assert scene.fleet.overdue(scene.now, 90) == [J]
    assert stops(scene.hand_in(Overdue(J))) == [J]


def test_a_running_life_is_never_overdue() -> None:
    scene = Scene()
    scene.runs()
    scene.now += 1000
    assert scene.fleet.overdue(scene.now, 90) == []
    assert scene.hand_in(Overdue(J)) == []


def test_a_next_allocation_that_is_gone_again_isnt_waited_for() -> None:
    scene = Scene()
    scene.runs()
    scene.hand_in(allocation("a1", 12, client="lost", desired="stop", next="a2"), seen(13, "dead"))
    scene.lists(seen(13, "dead"), allocation("a1", 12, client="lost", desired="stop", next="a2"), index=20)
    assert scene.state() == "doubtful"


def test_the_follow_up_of_an_allocation_that_is_to_stop_isnt_waited_for() -> None:
    """Its job was removed before it was rescheduled."""
    scene = Scene()
    scene.runs()
    scene.hand_in(allocation("a1", 12, client="failed", follow_up="e"))
    scene.hand_in(allocation("a1", 14, client="failed", desired="stop", follow_up="e"), seen(14, "dead"))
    assert scene.state() == "doubtful"


# Rule 7: intent before action


def test_a_stop_hides_the_runner_at_once() -> None:
    scene = Scene()
    runner = scene.runs()
    scene.claims()
    decisions = scene.hand_in(Stop(J, Reason.RELEASED))
    assert decisions == [decisions[0], StopJob(J), PoolChanged(TEN)]
    assert ends(decisions) == [(runner.id, "released")]
    assert scene.fleet.runner(runner.id) is None


def test_a_job_is_stopped_once() -> None:
    """D6, D55"""
    scene = Scene()
    scene.runs()
    scene.hand_in(Stop(J, Reason.RELEASED))
    assert scene.hand_in(Stop(J, Reason.INACTIVE), allocation("a1", 12), allocation("a1", 13, client="failed")) == []


def test_a_stop_is_kept_until_a_newer_listing_lacks_the_job() -> None:
    scene = Scene()
    scene.runs()
    scene.hand_in(Stop(J, Reason.RELEASED))
    scene.lists(index=30)
    assert scene.knows(), "the executor hasn't answered"
    scene.hand_in(Stopped(J, 40))
    scene.lists(index=39)
    assert scene.knows(), "the listing is older than the answer"
    assert scene.fleet.unproven_stops() == 1
    assert scene.lists(index=40) == [PoolChanged(TEN)]
    assert not scene.knows()


def test_a_job_that_is_still_there_after_the_answer_is_stopped_again() -> None:
    scene = Scene()
    scene.runs()
    scene.hand_in(Stop(J, Reason.RELEASED), Stopped(J, 40))
    assert stops(scene.lists(seen(41), index=42)) == [J]
    assert stops(scene.lists(seen(41), index=43)) == []


def test_stop_beats_start() -> None:
    scene = Scene()
    scene.hand_in(Start(J, TEN, generation=1))
    assert scene.fleet.unanswered_starts() == [J]
    assert stops(scene.hand_in(Stop(J, Reason.SURPLUS))) == [J]
    assert scene.fleet.unanswered_starts() == []
    scene.hand_in(Started(J, 9), allocation("a1", 11))
    assert list(scene.fleet.runners()) == []


def test_a_restarted_daemon_finishes_what_was_asked() -> None:
    """D28"""
    scene = Scene()
    scene.runs()
    scene.hand_in(Stop(J, Reason.RELEASED), Start(job_id(2), TEN, generation=1))
    assert scene.restarts() == [StopJob(J)]
    assert scene.fleet.unanswered_starts() == [job_id(2)]


def test_a_restarted_daemon_knows_its_runners_and_their_clients() -> None:
    """D28"""
    scene = Scene()
    used = scene.runs()
    scene.claims()
    scene.starts(job_id(2))
    scene.hand_in(allocation("b1", 12, job=job_id(2)))
    scene.hand_in(Marked(J, used=True))
    assert scene.restarts() == []
    assert {(runner.id, runner.phase) for runner in scene.fleet.runners()} == {
        (used.id, Phase.USED),
        (job_id(2), Phase.IDLE),
    }
    assert [runner.id for runner in [scene.fleet.idle(TEN)] if runner] == [RunnerId(job_id(2))]


def test_a_mark_that_wasnt_written_is_asked_for_after_a_restart() -> None:
    """D45"""
    scene = Scene()
    scene.runs()
    scene.claims()
    assert scene.restarts() == [Mark(J, used=True)]


def test_a_strangers_job_is_adopted_by_one_look_up() -> None:
    """D12"""
    scene = Scene()
    decisions = scene.hand_in(seen(10), allocation("a1", 11), allocation("a1", 12), seen(13))
    assert [one for one in decisions if isinstance(one, LookUp)] == [LookUp(J, scene.now)]
    assert list(scene.fleet.runners()) == []
    scene.looks_up(seen(13), allocation("a1", 12), index=13)
    assert scene.only.phase is Phase.IDLE
    assert scene.only.id != RunnerId(J)


def test_a_strangers_runner_in_use_keeps_its_id_and_its_timeout() -> None:
    scene = Scene()
    scene.hand_in(seen(10), allocation("a1", 11))
    scene.looks_up(seen(10), allocation("a1", 11), index=11, used=True)
    assert (scene.only.id, scene.only.phase, scene.only.timeout) == (RunnerId(J), Phase.USED, 60)


def test_a_strangers_job_in_use_that_no_longer_runs_is_stopped() -> None:
    scene = Scene()
    scene.hand_in(seen(10), allocation("a1", 11))
    restarting = allocation("a1", 12, client="pending")
    assert stops(scene.looks_up(seen(10), restarting, index=12, used=True)) == [J]


STRANGERS = [
    "11-00000000-0000-0000-0000-000000000001",
    "template-10",
    "10",
    "10-x",
    "1-00000000-0000-0000-0000-00000000001",
]


@pytest.mark.parametrize("name", STRANGERS)
def test_other_strangers_are_left_alone(name: str) -> None:
    """D13"""
    scene = Scene()
    job = JobId(name)
    assert scene.hand_in(seen(10, job=job), allocation("a1", 11, job=job)) == []
    assert scene.lists(seen(10, job=job), allocation("a1", 11, job=job), index=20) == []
    assert not scene.knows(job)


def test_environments_that_share_a_prefix_keep_their_own_runners() -> None:
    """D13"""
    scene = Scene()
    for environment in (1, 10, 100):
        scene.fleet.know(type(TEN)(environment), 1)
        for number in (1, 2, 3):
            job = job_id(environment * 10 + number, environment)
            scene.hand_in(seen(10, job=job), allocation(f"a{job}", 11, job=job))
            scene.looks_up(seen(10, job=job), allocation(f"a{job}", 11, job=job), index=11, job=job)
    counts = {one: len(list(scene.fleet.jobs(type(TEN)(one)))) for one in (1, 10, 100)}
    assert counts == {1: 3, 10: 3, 100: 3}


def test_the_end_of_a_strangers_job_creates_none() -> None:
    scene = Scene()
    over: list[Value] = [
        seen(10, "dead"),
        JobGone(J, 11),
        allocation("a1", 12, desired="stop"),
        allocation("a1", 13, client="failed"),
        allocation("a1", 14, client="complete"),
        allocation("a1", 15, migrate=True),
    ]
    assert scene.hand_in(*over) == []
    assert not scene.knows()


def test_the_allocation_of_a_job_that_a_listing_lacks_creates_none() -> None:
    """It was removed, and its allocation isn't asked to stop yet."""
    scene = Scene()
    assert scene.lists(allocation("a1", 11), index=20) == []
    assert not scene.knows()


def test_the_allocation_of_a_job_that_is_newer_than_a_listings_jobs_is_looked_up() -> None:
    """Jobs and allocations are listed one after the other."""
    scene = Scene()
    decisions = scene.lists(allocation("a1", 12, created=12), index=20, jobs_index=10)
    assert LookUp(J, scene.now) in decisions


def test_a_job_of_an_environment_that_is_no_longer_known_is_left_alone() -> None:
    scene = Scene()
    scene.fleet.forget(TEN)
    assert scene.hand_in(seen(10), allocation("a1", 11)) == []


def test_a_job_that_ended_and_comes_back_at_once_brings_no_old_allocation() -> None:
    """Both may be saved as one change."""
    scene = Scene()
    scene.runs()
    scene.hand_in(allocation("a1", 25))
    scene.fleet.handle(JobGone(J, 20), scene.now)
    scene.fleet.handle(Listed(listing(index=21), scene.fleet.ask(scene.now)), scene.now)
    scene.hand_in(seen(30))
    assert scene.ledger.allocations == {}


# Rule 8 is tried on everything: test_recordings, test_permutations, test_fleet_machine. And what is decided by whom:


def test_the_fleet_never_stops_surplus_runners() -> None:
    """D7: only the pool does."""
    scene = Scene()
    for number in range(1, 6):
        scene.starts(job_id(number))
        assert stops(scene.hand_in(allocation(f"a{number}", 20 + number, job=job_id(number)))) == []


def test_a_claim_makes_the_pool_look_again() -> None:
    """D2: what is starting counts, so that two claims start two."""
    scene = Scene()
    runner = scene.runs()
    assert PoolChanged(TEN) in scene.hand_in(Claim(runner.id, 0))


def test_new_ports_are_those_of_the_new_runner() -> None:
    """D14"""

    scene = Scene()
    scene.starts()
    scene.hand_in(replace(allocation("a1", 11), ports=(Port(80, "127.0.0.1:4000"),)))
    scene.hand_in(replace(allocation("a2", 13, created=12), ports=(Port(80, "127.0.0.1:5000"),)))
    assert scene.only.ports == (Port(80, "127.0.0.1:5000"),)

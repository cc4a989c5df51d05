"""Whether a listing is of the executor that we know: it has something of ours, or nothing must be there."""

from poseidon.core.events import Claim, Start, Started, Stop, Stopped
from poseidon.core.fleet import Fleet
from poseidon.core.forgetting import forgotten
from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    EnvironmentId,
    Job,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Listing,
    Phase,
    Position,
    Reason,
    Records,
    Runner,
    RunnerId,
)

ONE = EnvironmentId(1)
OURS = JobId("1-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
THEIRS = JobId("1-9d8eca30-cc4a-4385-94ad-b089bc8bcead")
LIFE = Allocation(AllocationId("a"), OURS, 6, 6, ClientStatus.RUNNING, started="t", node_name="n")
EMPTY = Listing((), (), 9, 9)
NOW = 900
"""Listings are asked for when all is known."""
ANOTHER = Listing((JobSeen(THEIRS, 5, JobStatus.RUNNING),), (), 900, 900)


def fleet(*, answered: bool = True) -> Fleet:
    """One job that was asked for."""
    made = Fleet(settle=3.0, mint=lambda _: RunnerId("minted"))
    made.know(ONE, 1)
    made.handle(Start(OURS, ONE, 1), 1000.0)
    if answered:
        made.handle(Started(OURS, 5), 1000.0)
    return made


def test_where_nothing_must_be_there_anything_is_recognised() -> None:
    assert Fleet(settle=3.0, mint=lambda _: RunnerId("minted")).recognises(ANOTHER, NOW)
    assert fleet(answered=False).recognises(EMPTY, NOW)


def test_a_listing_without_anything_of_ours_is_of_another_whatever_its_index() -> None:
    known = fleet()
    assert known.expected() == 1
    assert not known.recognises(EMPTY, NOW)
    assert not known.recognises(ANOTHER, NOW)


def test_one_job_of_ours_is_enough_also_an_old_one() -> None:
    known = fleet()
    known.handle(Start(THEIRS, ONE, 1), 1000.0)
    known.handle(Started(THEIRS, 50), 1000.0)
    assert known.recognises(Listing((JobSeen(OURS, 2, JobStatus.DEAD),), (), 3, 3), NOW)


def test_an_allocation_of_ours_is_enough_though_its_job_is_gone() -> None:
    known = fleet()
    known.handle(LIFE, 1000.0)
    assert known.recognises(Listing((), (LIFE,), 9, 9), NOW)
    assert not known.recognises(
        Listing((), (Allocation(AllocationId("b"), OURS, 6, 6, ClientStatus.RUNNING),), 9, 9), NOW
    )


def test_a_job_that_came_after_a_listing_was_asked_for_may_be_missing_in_it() -> None:
    known = fleet()
    assert known.recognises(EMPTY, 4)
    assert not known.recognises(EMPTY, 5)


def test_a_job_whose_end_was_told_needn_t_be_there() -> None:
    known = fleet()
    known.handle(JobGone(OURS, 7), 1000.0)
    assert known.recognises(EMPTY, NOW)


def test_a_stop_needs_its_answer_before_the_job_may_be_missing() -> None:
    known = fleet()
    known.handle(Stop(OURS, Reason.SURPLUS), 1000.0)
    assert not known.recognises(EMPTY, NOW)
    known.handle(Stopped(OURS, 8), 1000.0)
    assert known.recognises(EMPTY, NOW)


def test_what_is_forgotten_is_lost_and_what_was_gone_stays_as_it_was() -> None:
    known = fleet()
    known.handle(LIFE, 1000.0)
    known.handle(Claim(RunnerId(OURS)), 1000.0)
    used = next(known.runners())
    old = Runner(RunnerId("1-x"), ONE, OURS, AllocationId("z"), "s", "", "", Phase.GONE, 1.0, reason=Reason.RESTARTED)
    changes = forgotten(Records((Job(OURS, ONE),), (LIFE,), (old, used), Position(9, 9, 9, 2)), 2000.0)
    assert changes.ended == (OURS,)
    [lost] = changes.runners
    assert (lost.id, lost.phase, lost.reason, lost.gone_at) == (RunnerId(OURS), Phase.GONE, Reason.LOST, 2000.0)
    [told] = changes.transitions
    assert (told.subject, told.before, told.after) == (RunnerId(OURS), Phase.USED, Phase.GONE)
    assert changes.position == Position(epoch=3)

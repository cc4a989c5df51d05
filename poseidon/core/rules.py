"""The rules that tell what one job's values mean. Pure functions of what is known; they decide nothing themselves."""

from collections.abc import Mapping
from dataclasses import replace

from poseidon.core.model import (
    UNTOLD,
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    Job,
    JobStatus,
    Reason,
    Runner,
)

Allocations = Mapping[AllocationId, Allocation]


def lives(allocation: Allocation) -> bool:
    """Whether nothing that the allocation itself tells speaks against its running, now or soon."""
    return (
        allocation.desired is DesiredStatus.RUN
        and not allocation.migrate
        and allocation.client in (ClientStatus.PENDING, ClientStatus.RUNNING)
    )


def runs(allocation: Allocation | None) -> bool:
    """Whether a life of the allocation is under way."""
    return allocation is not None and allocation.client is ClientStatus.RUNNING and allocation.started is not None


def is_life(current: Allocation | None, runner: Runner) -> bool:
    """Whether *runner*'s very life is what runs."""
    return (
        current is not None and runs(current) and current.id == runner.allocation and current.started == runner.started
    )


def current(job: Job, allocations: Allocations) -> Allocation | None:
    """The allocation that is meant to run; None also if the job isn't to run."""
    if job.stop is not None or not allocations:
        return None
    newest = max(allocation.created for allocation in allocations.values())
    meant = [
        allocation
        for allocation in allocations.values()
        if lives(allocation) and allocation.created > job.gone_version and allocation.version >= newest
    ]
    return max(meant, key=_age, default=None)


def will_return(job: Job, allocations: Allocations, listed: int) -> bool:
    """Whether something says that a job without a current allocation will have one. *listed*: the index up to which
    all that isn't among *allocations* is known to be gone."""
    if awaits_start(job) or (job.status is JobStatus.PENDING and job.version > job.gone_version):
        return True
    standing = (allocation for allocation in allocations.values() if allocation.created > job.gone_version)
    newest = max(standing, key=_age, default=None)
    if newest is None:
        return False
    if newest.next is not UNTOLD and newest.next is not None:
        return newest.next not in allocations and newest.version > listed
    return newest.desired is DesiredStatus.RUN and (newest.migrate or newest.follow_up not in (UNTOLD, None))


def awaits_start(job: Job) -> bool:
    """Whether the executor hasn't answered our start yet: the job's absence means nothing then."""
    return job.start is not None and job.start.answered is None


def must_exist(job: Job) -> bool:
    """Whether the executor has told of the job, or taken it, and nothing has told of its end since. A stop that isn't
    answered may not have been heard."""
    stopped = job.stop is not None and job.stop.answered is not None
    return job.version > job.gone_version and not stopped


def merge(new: Allocation, known: Allocation | None) -> Allocation:
    """*new*, with what it doesn't tell taken from what was known."""
    if known is None:
        return new
    return replace(
        new,
        follow_up=known.follow_up if new.follow_up is UNTOLD else new.follow_up,
        previous=known.previous if new.previous is UNTOLD else new.previous,
        next=known.next if new.next is UNTOLD else new.next,
        ports=new.ports or known.ports,
        trouble=new.trouble or known.trouble,
    )


def why_gone(allocation: Allocation | None, now_current: Allocation | None) -> Reason:
    """Why a runner's life is over, from what its *allocation* tells now and what is current instead."""
    if allocation is None:
        return Reason.STOPPED
    if now_current is not None and now_current.id == allocation.id:
        return Reason.OUT_OF_MEMORY if allocation.oom_killed else Reason.RESTARTED
    ended_itself = allocation.client is ClientStatus.COMPLETE and allocation.desired is DesiredStatus.RUN
    if allocation.client is ClientStatus.FAILED or ended_itself:
        if allocation.oom_killed:
            return Reason.OUT_OF_MEMORY
        return Reason.COMPLETE if ended_itself else Reason.FAILED
    if allocation.client is ClientStatus.LOST:
        return Reason.LOST
    if allocation.client is ClientStatus.UNKNOWN:
        return Reason.DISCONNECTED
    replaced = allocation.next is not UNTOLD and allocation.next is not None
    moved = allocation.migrate or replaced or (now_current is not None and now_current.created > allocation.created)
    return Reason.MIGRATED if moved else Reason.STOPPED


def _age(allocation: Allocation) -> tuple[int, str]:
    return allocation.created, allocation.id

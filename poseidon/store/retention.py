"""Prunes what is long over, in small steps between which claims go on.

What stays whatever its age: the id of every runner that was ever issued (as a tombstone), a claimed runner whose job
may still come back (its allocation is spent), a stop that isn't proven yet, and what something younger refers to.
"""
# ruff: noqa: S608 – the statements are put together from constants

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
import trio
from sqlalchemy import Connection

from poseidon.errors import StoreError
from poseidon.store.environments import UNUSED
from poseidon.store.statements import run, select
from poseidon.store.store import Store
from poseidon.store.times import to_text

log = structlog.get_logger(__name__)

INTERVAL = 3600.0
BATCH = 200
"""Rows of a table in one transaction: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Ages:
    """For how many seconds to keep what is over."""

    runners: float
    """Gone runners, with their allocations and jobs."""
    executions: float
    transitions: float


OLD_EXECUTIONS = "SELECT id FROM executions WHERE ended_at < :executions LIMIT :limit"
OLD_RUNNERS = """
SELECT id FROM runners r
WHERE gone_at < :runners AND (
    EXISTS (SELECT 1 FROM jobs j WHERE j.id = r.job AND j.ended_at IS NOT NULL)
    OR claimed_at IS NULL AND EXISTS (SELECT 1 FROM runners n WHERE n.job = r.job AND n.ready_at > r.ready_at))
LIMIT :limit"""
OLD_ALLOCATIONS = """
SELECT id FROM allocations a
WHERE absent_at < :runners AND NOT EXISTS (SELECT 1 FROM runners r WHERE r.allocation = a.id)
LIMIT :limit"""
OLD_JOBS = """
SELECT id FROM jobs j
WHERE ended_at < :runners
  AND NOT EXISTS (SELECT 1 FROM allocations a WHERE a.job = j.id)
  AND NOT EXISTS (SELECT 1 FROM runners r WHERE r.job = j.id)
  AND NOT EXISTS (SELECT 1 FROM intents i WHERE i.job = j.id)
LIMIT :limit"""
OLD_TRANSITIONS = "SELECT id FROM transitions WHERE at < :transitions LIMIT :limit"
OLD_ENVIRONMENTS = f"SELECT id FROM environments WHERE removed_at < :runners AND {UNUSED} LIMIT :limit"

BURY = "INSERT INTO tombstones SELECT id, reason, gone_at FROM runners WHERE id = :id"
STEPS: Sequence[tuple[str, tuple[str, ...]]] = (
    (OLD_EXECUTIONS, ("DELETE FROM executions WHERE id = :id",)),
    (OLD_RUNNERS, (BURY, "DELETE FROM executions WHERE runner = :id", "DELETE FROM runners WHERE id = :id")),
    (OLD_ALLOCATIONS, ("DELETE FROM allocations WHERE id = :id",)),
    (OLD_JOBS, ("DELETE FROM jobs WHERE id = :id",)),
    (OLD_TRANSITIONS, ("DELETE FROM transitions WHERE id = :id",)),
    (OLD_ENVIRONMENTS, ("DELETE FROM environments WHERE id = :id",)),
)
"""What to look for, and what to do with each id; those who refer before those who are referred to."""


async def keep_house(
    store: Store,
    ages: Ages,
    now: Callable[[], float],
    *,
    interval: float = INTERVAL,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The service that prunes for ever. A disk that refuses to write is told elsewhere, and no reason to crash."""
    task_status.started()
    while True:
        try:
            if pruned := await prune(store, ages, now()):
                log.info("old records pruned", rows=pruned)
        except StoreError as error:
            log.warning("old records not pruned", error=error.message)
        await trio.sleep(interval)


async def prune(store: Store, ages: Ages, now: float, *, batch: int = BATCH) -> int:
    """Remove all that is older than *ages* allow. Returns how many rows of history that were."""
    total = 0
    for step in range(len(STEPS)):
        found = batch
        while found == batch:
            found = await store.write(partial(prune_step, step=step, ages=ages, now=now, batch=batch))
            total += found
    return total


def prune_step(connection: Connection, step: int, ages: Ages, now: float, batch: int) -> int:
    """At most *batch* of one kind."""
    find, actions = STEPS[step]
    limits = {
        "runners": to_text(now - ages.runners),
        "executions": to_text(now - ages.executions),
        "transitions": to_text(now - ages.transitions),
        "limit": batch,
    }
    rows = select(connection, find, limits)
    for action in actions:
        run(connection, action, [{"id": row["id"]} for row in rows])
    return len(rows)

"""How many runners an environment should start or stop, given what there is. Pure, level-triggered: no memory but the
back-off's own value."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from poseidon.core.model import Environment, Job, JobId, JobState, Phase, Reason, Runner


@dataclass(frozen=True, slots=True)
class Pool:
    """An environment's jobs by what they are to the pool, each oldest first. Used runners don't count."""

    idle: tuple[JobId, ...] = ()
    starting: tuple[JobId, ...] = ()
    """Starting or doubtful."""
    old_idle: tuple[JobId, ...] = ()
    """Of an earlier generation, and still claimable."""
    outdated: tuple[JobId, ...] = ()
    """Of an earlier generation, idle but not claimable, or still starting."""
    used: int = 0
    strangers: int = 0
    """Jobs that somebody else has started and that aren't looked up yet: each may be in use, so none is stopped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What makes the pool what it should be."""

    start: int = 0
    stop: tuple[tuple[JobId, Reason], ...] = ()


@dataclass(frozen=True, slots=True)
class BackOff:
    """Starts that fail, or lives that end unclaimed too soon, make the next start wait longer."""

    failures: int = 0
    until: float = 0.0

    FIRST = 1.0
    MOST = 60.0

    def failed(self, now: float, jitter: float) -> "BackOff":
        """One more failure. *jitter*: 0 to 1, stretches the wait by up to a half."""
        wait = min(self.MOST, self.FIRST * 2.0 ** min(self.failures, 10))  # a day of failures overflows a float
        return replace(self, failures=self.failures + 1, until=now + wait * (1 + jitter / 2))

    def succeeded(self) -> "BackOff":
        """A runner became ready and stayed, or was claimed."""
        return BackOff()


def survey(environment: Environment, jobs: Iterable[tuple[Job, JobState, Runner | None]]) -> Pool:
    """Sort *jobs* of *environment* into a Pool."""
    idle: list[tuple[float, JobId]] = []
    old_idle: list[tuple[float, JobId]] = []
    starting: list[JobId] = []
    outdated: list[JobId] = []
    used = strangers = 0
    for job, state, runner in jobs:
        current = job.generation >= environment.generation
        if state is JobState.ENDED:
            continue
        if not job.adopted:
            strangers += 1
        elif runner is None:
            (starting if current else outdated).append(job.id)
        elif runner.phase is Phase.USED:
            used += 1
        elif current:
            idle.append((runner.ready_at, job.id))
        elif job.generation >= environment.compatible_since:
            old_idle.append((runner.ready_at, job.id))
        else:
            outdated.append(job.id)
    return Pool(_oldest_first(idle), tuple(starting), _oldest_first(old_idle), tuple(outdated), used, strangers)


def plan(environment: Environment, pool: Pool, waiting: int, *, crowded: bool = False) -> Plan:
    """Compare *pool* with the environment's size and the clients that wait for a runner.

    Old idle runners bridge the time until new ones are ready; each is stopped when a new one has taken its place, or
    at once if there is no room for both (*crowded*).
    """
    wanted = environment.pool_size + waiting
    stop = [(job, Reason.REPLACED) for job in pool.outdated]
    bridge = 0 if crowded else max(0, wanted - len(pool.idle))
    stop += [(job, Reason.REPLACED) for job in pool.old_idle[bridge:]]
    missing = wanted - len(pool.idle) - len(pool.starting)
    if missing < 0:
        youngest_first = [*reversed(pool.starting), *reversed(pool.idle)]
        stop += [(job, Reason.SURPLUS) for job in youngest_first[:-missing]]
    return Plan(max(0, missing - pool.strangers), tuple(stop))


def _oldest_first(found: list[tuple[float, JobId]]) -> tuple[JobId, ...]:
    return tuple(job for _, job in sorted(found))

"""What the core has changed and the store hasn't been told yet. Pure; the last state of each object counts."""

from poseidon.core.model import (
    Allocation,
    AllocationId,
    Changes,
    EnvironmentId,
    Job,
    JobId,
    Position,
    Runner,
    RunnerId,
    Transition,
)


class Journal:
    """Collects changes between two `take`s, each object once, the history complete."""

    def __init__(self) -> None:
        self.position: Position | None = None
        self._jobs: dict[JobId, Job] = {}
        self._ended: dict[JobId, None] = {}
        self._allocations: dict[AllocationId, Allocation] = {}
        self._absent: dict[AllocationId, None] = {}
        self._runners: dict[RunnerId, Runner] = {}
        self._transitions: list[Transition] = []

    def job(self, job: Job) -> None:
        """*job* is new or has changed."""
        self._ended.pop(job.id, None)
        self._jobs[job.id] = job

    def end(self, job: JobId) -> None:
        """*job* is over and proven so."""
        self._ended[job] = None

    def allocation(self, new: Allocation, known: Allocation | None, environment: EnvironmentId, now: float) -> None:
        """*new* has replaced *known*."""
        self._absent.pop(new.id, None)
        self._allocations[new.id] = new
        before, after = "" if known is None else _status(known), _status(new)
        if before != after:
            self._transitions.append(Transition(now, "allocation", new.id, environment, before, after))

    def absent(self, allocation: AllocationId) -> None:
        """The executor no longer has *allocation*."""
        self._absent[allocation] = None

    def runner(self, new: Runner, known: Runner | None, now: float) -> None:
        """*new* has replaced *known* (None, or another runner of the same job)."""
        self._runners[new.id] = new
        before = known.phase if known is not None and known.id == new.id else ""
        reason = "" if new.reason is None else new.reason
        self._transitions.append(Transition(now, "runner", new.id, new.environment, before, new.phase, reason))

    def take(self) -> Changes:
        """All changes since the last call."""
        changes = Changes(
            tuple(self._jobs.values()),
            tuple(self._ended),
            tuple(self._allocations.values()),
            tuple(self._absent),
            tuple(self._runners.values()),
            tuple(self._transitions),
            self.position,
        )
        if changes:
            self.__init__()  # type: ignore[misc]  # back to empty
        return changes


def _status(allocation: Allocation) -> str:
    """One allocation's state in a word or two, e.g. "running", "running, stop", "running, restart 1"."""
    parts = [str(allocation.client)]
    if allocation.desired != "run":
        parts.append(str(allocation.desired))
    if allocation.migrate:
        parts.append("migrate")
    if allocation.restarts:
        parts.append(f"restart {allocation.restarts}")
    return ", ".join(parts)

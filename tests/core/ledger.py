"""A model of the store: what survives a crash, and what is asked of it."""

from dataclasses import dataclass, field

from poseidon.core.model import (
    Allocation,
    AllocationId,
    Changes,
    Job,
    JobId,
    Phase,
    Position,
    Records,
    Runner,
    RunnerId,
)


@dataclass(slots=True)
class Ledger:
    """Retention is at its harshest: an ended job leaves nothing behind but the ids that clients have had."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    allocations: dict[AllocationId, Allocation] = field(default_factory=dict)
    runners: dict[RunnerId, Runner] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    tombstones: dict[RunnerId, JobId] = field(default_factory=dict)
    identities: dict[RunnerId, tuple[str, str, str]] = field(default_factory=dict)
    """The life that each id was ever given to."""

    def save(self, changes: Changes) -> None:
        for job in changes.ended:
            self._prune(job)
        self.jobs |= {job.id: job for job in changes.jobs if job.id not in changes.ended}
        for allocation in changes.allocations:
            self.allocations[allocation.id] = allocation
        for gone in changes.absent:
            self.allocations.pop(gone, None)
        for runner in changes.runners:
            self._save_runner(runner)
        for job in changes.ended:
            self._prune(job)
        if changes.position is not None:
            self.position = changes.position

    def records(self) -> Records:
        return Records(
            tuple(self.jobs.values()), tuple(self.allocations.values()), tuple(self.runners.values()), self.position
        )

    def issued(self, job: JobId) -> bool:
        """Whether there has been a runner of the job."""
        return job in self.tombstones.values() or any(runner.job == job for runner in self.runners.values())

    def _save_runner(self, runner: Runner) -> None:
        life = (runner.job, runner.allocation, runner.started)
        assert self.identities.setdefault(runner.id, life) == life, "an id names one life, for ever"
        known = self.runners.get(runner.id)
        assert known is None or known.phase is not Phase.GONE or runner.phase is Phase.GONE, "gone is final"
        self.runners[runner.id] = runner

    def _prune(self, job: JobId) -> None:
        self.jobs.pop(job, None)
        self.allocations = {id: known for id, known in self.allocations.items() if known.job != job}
        self.tombstones |= {id: job for id, runner in self.runners.items() if runner.job == job}
        self.runners = {id: runner for id, runner in self.runners.items() if runner.job != job}

"""A tiny true cluster: what an executor has, how it changes behind our back, and what it would say of it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count

from poseidon.core.model import (
    UNTOLD,
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Value,
)

Life = tuple[AllocationId, str]
Numbers = Callable[[], int]

TERMINAL = (ClientStatus.COMPLETE, ClientStatus.FAILED, ClientStatus.LOST)


def numbers() -> Numbers:
    counter = count(1)
    return lambda: next(counter)


@dataclass(slots=True)
class Cluster:
    """Every method is one thing that may happen. *log*: what its event stream has told, in true order."""

    number: Numbers = field(default_factory=numbers)
    """Ids are never made twice, even by a cluster that has gone back."""
    index: int = 0
    jobs_index: int = 0
    allocations_index: int = 0
    jobs: dict[JobId, JobSeen] = field(default_factory=dict)
    gone: dict[JobId, int] = field(default_factory=dict)
    allocations: dict[AllocationId, Allocation] = field(default_factory=dict)
    log: list[Value] = field(default_factory=list)
    limbo: set[JobId] = field(default_factory=set)
    """Recorded dead, without a follow-up, though about to be rescheduled: lasts less than `settle`."""

    # What it says

    def list_jobs(self, only: JobId | None = None) -> tuple[tuple[JobSeen, ...], int]:
        """Stubs, as listings hold them: the used mark isn't told."""
        jobs = (replace(seen, used=None) for seen in self.jobs.values() if only in (None, seen.job))
        return tuple(jobs), self.jobs_index

    def list_allocations(self, only: JobId | None = None) -> tuple[tuple[Allocation, ...], int]:
        """Stubs lack previous and next allocation; a look-up of one job tells them."""
        allocations = [known for known in self.allocations.values() if only in (None, known.job)]
        if only is None:
            allocations = [replace(known, previous=UNTOLD, next=UNTOLD) for known in allocations]
        return tuple(allocations), self.allocations_index

    # What is true

    def of(self, job: JobId) -> list[Allocation]:
        return [known for known in self.allocations.values() if known.job == job and known.slot == 0]

    def meant(self, job: JobId) -> Allocation | None:
        """The one allocation of *job* that is meant to run."""
        if job not in self.jobs:
            return None
        meant = [known for known in self.of(job) if self.is_meant(known)]
        return max(meant, key=lambda known: known.created, default=None)

    def is_meant(self, known: Allocation) -> bool:
        return (
            known.desired is DesiredStatus.RUN
            and not known.migrate
            and known.client in (ClientStatus.PENDING, ClientStatus.RUNNING)
            and known.created > self.gone.get(known.job, 0)
        )

    def life(self, job: JobId) -> Life | None:
        meant = self.meant(job)
        return None if meant is None or meant.started is None else (meant.id, meant.started)

    def has_future(self, job: JobId) -> bool:
        """Whether the job runs, or will without anybody's doing."""
        if job not in self.jobs:
            return False
        if self.meant(job) is not None or self.jobs[job].status is JobStatus.PENDING or job in self.limbo:
            return True
        standing = [known for known in self.of(job) if known.created > self.gone.get(job, 0)]
        return any(known.desired is DesiredStatus.RUN and (known.migrate or known.follow_up) for known in standing)

    # What happens

    def register(self, job: JobId, *, used: bool = False) -> int:
        """Create *job*, or revive it if it is dead; unchanged if it lives. The answer is its version."""
        known = self.jobs.get(job)
        if known is None or known.status is JobStatus.DEAD:
            self.limbo.discard(job)
            self._tick()
            self._job(job, JobStatus.PENDING, used=used)
        return self.jobs[job].version

    def place(self, job: JobId) -> Allocation:
        """A pending job gets an allocation, in place of one that failed, if any."""
        failed = [known for known in self.of(job) if known.desired is DesiredStatus.RUN and known.follow_up]
        return self._plan(job, failed[-1] if failed else None)

    def begin(self, known: Allocation) -> None:
        self._tick()
        self._allocation(known, client=ClientStatus.RUNNING, started=f"s{self.number()}")

    def restart(self, known: Allocation, *, at_once: bool) -> None:
        self._tick()
        client = ClientStatus.RUNNING if at_once else ClientStatus.PENDING
        started = f"s{self.number()}" if at_once else None
        self._allocation(known, client=client, started=started, restarts=known.restarts + 1)

    def fail(self, known: Allocation, *, for_good: bool) -> None:
        """Without an end, the job stands as dead for a moment, before `reschedule`."""
        self._tick()
        self._allocation(known, client=ClientStatus.FAILED, started=None)
        if known.job in self.jobs:
            self._job(known.job, JobStatus.DEAD)
            if not for_good:
                self.limbo.add(known.job)

    def reschedule(self, job: JobId) -> None:
        """The job's failed allocation is told to come back; `place` does it."""
        self.limbo.remove(job)
        self._tick()
        failed = max(self.of(job), key=lambda known: known.created)
        self._allocation(failed, follow_up=f"e{self.number()}")
        self._job(job, JobStatus.PENDING)

    def complete(self, known: Allocation) -> None:
        self._tick()
        self._allocation(known, client=ClientStatus.COMPLETE, started=None)
        if known.job in self.jobs:
            self._job(known.job, JobStatus.DEAD)

    def ask_to_migrate(self, known: Allocation) -> None:
        self._tick()
        self._allocation(known, migrate=True)

    def move(self, known: Allocation) -> None:
        self._plan(known.job, known)

    def lose(self, known: Allocation) -> None:
        self._plan(known.job, known, client=ClientStatus.LOST, started=None)

    def come_back(self, known: Allocation) -> None:
        """The node of a lost allocation is there again: the task still runs, for a while."""
        self._tick()
        self._allocation(known, client=ClientStatus.RUNNING, started=f"s{self.number()}")

    def finish(self, known: Allocation) -> None:
        """What was asked to stop has stopped."""
        self._tick()
        self._allocation(known, client=ClientStatus.COMPLETE, started=None)

    def disconnect(self, known: Allocation) -> None:
        self._tick()
        self._allocation(known, client=ClientStatus.UNKNOWN)

    def reconnect(self, known: Allocation) -> None:
        self._tick()
        self._allocation(known, client=ClientStatus.RUNNING)

    def repeat(self, known: Allocation) -> None:
        """Told again with a new version, otherwise the same."""
        self._tick()
        self._allocation(known)

    def scale(self, job: JobId) -> None:
        """Somebody has two run: the second slot is none of ours."""
        self._tick()
        second = self._new(job, slot=1)
        self._tick()
        self._allocation(second, client=ClientStatus.RUNNING, started=f"s{self.number()}")

    def remove(self, job: JobId, *, purge: bool = True) -> int:
        """Deregister *job*, known or not. The answer is the index as of which it is to be gone."""
        self._tick()
        index = self.index
        self.log.append(JobGone(job, index))
        known = job in self.jobs
        if known:
            self.gone[job] = index
            self.limbo.discard(job)
            self._job(job, JobStatus.DEAD, told=not purge)
            if purge:
                del self.jobs[job]
            wanted = [one for one in self.allocations.values() if one.job == job and one.desired is DesiredStatus.RUN]
            if wanted:
                self._tick()
            for one in wanted:
                self._allocation(one, desired=DesiredStatus.STOP)
        return index

    def mark(self, job: JobId, *, used: bool) -> None:
        self._tick()
        self._job(job, self.jobs[job].status, used=used)

    def forget_allocation(self, known: Allocation) -> None:
        """Garbage collection: no event tells it."""
        self._tick()
        self.allocations_index = self.index
        del self.allocations[known.id]

    def forget_job(self, job: JobId) -> None:
        self._tick()
        self.jobs_index = self.index
        del self.jobs[job]

    def snapshot(self) -> "Cluster":
        """Deep, but for the numbers, which go on."""
        return replace(
            self,
            jobs=dict(self.jobs),
            gone=dict(self.gone),
            allocations=dict(self.allocations),
            log=list(self.log),
            limbo=set(deepcopy(self.limbo)),
        )

    def _plan(
        self,
        job: JobId,
        old: Allocation | None,
        client: ClientStatus | None = None,
        started: str | None = "as before",
    ) -> Allocation:
        """One plan: a new allocation, and the old one is asked to stop, in one change."""
        self._tick()
        new = self._new(job, previous=None if old is None else old.id)
        if old is not None:
            self._allocation(
                old,
                desired=DesiredStatus.STOP,
                client=client or old.client,
                started=old.started if started == "as before" else started,
                next=new.id,
            )
        self._job(job, JobStatus.RUNNING)
        return new

    def _new(self, job: JobId, *, slot: int = 0, previous: AllocationId | None = None) -> Allocation:
        number = self.number()
        new = Allocation(
            AllocationId(f"a{number}"),
            job,
            self.index,
            self.index,
            ClientStatus.PENDING,
            slot=slot,
            node_name=f"node-{number}",
            follow_up=None,
            previous=previous,
            next=None,
        )
        self._keep(new)
        return new

    def _allocation(self, known: Allocation, **changes: object) -> None:
        self._keep(replace(known, version=self.index, **changes))  # type: ignore[arg-type]

    def _keep(self, allocation: Allocation) -> None:
        self.allocations[allocation.id] = allocation
        self.allocations_index = self.index
        self.log.append(allocation)

    def _job(self, job: JobId, status: JobStatus, *, used: bool | None = None, told: bool = True) -> None:
        known = self.jobs.get(job)
        mark = used if used is not None else bool(known and known.used)
        self.jobs[job] = JobSeen(job, self.index, status, mark)
        self.jobs_index = self.index
        if told:
            self.log.append(self.jobs[job])

    def _tick(self) -> None:
        self.index += 1

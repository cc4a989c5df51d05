"""What the fake cluster knows: tables with one index over all changes, and the buffer of its event stream.

Synchronous. Each raft entry is one index; each of its transactions is one line of the stream, as in Nomad 1.1.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import msgspec
import trio

from tests.fakes.nomad_shapes import TERMINAL, Clock, Ids, Json, changed

Purges = Literal["untold", "told", "marked"]
"""Whether a purge is a Job event, too: since 1.7.5 the job as it was is told, since 1.11.3 with a mark."""
ENDED_EVALUATIONS = ("complete", "failed", "canceled")


@dataclass(frozen=True, slots=True)
class Event:
    """One event, encoded once for all who follow."""

    topic: str
    keys: tuple[str, ...]
    namespace: str
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Line:
    """The events of one transaction."""

    number: int
    index: int
    events: tuple[Event, ...]


@dataclass
class EventBuffer:
    """The newest lines. Who follows asks for the next by number, and finds out when it was too slow."""

    size: int = 100
    lines: deque[Line] = field(default_factory=deque)
    last: int = 0
    moved: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    def append(self, index: int, events: tuple[Event, ...]) -> None:
        self.last += 1
        self.lines.append(Line(self.last, index, events))
        while len(self.lines) > self.size + 1:
            self.lines.popleft()
        self.moved.unpark_all()

    def clear(self) -> None:
        """Forget all lines, as a server does that starts from a snapshot."""
        self.lines.clear()
        self.last += 1
        self.moved.unpark_all()

    def first_number(self, index: int) -> int:
        """Where a subscription from *index* begins: inclusive, the nearest older line for an index without one."""
        older = [line for line in self.lines if line.index <= index]
        if not older or index == 0:
            return self.lines[0].number if self.lines else self.last + 1
        return next(line.number for line in older if line.index == older[-1].index)

    def get(self, number: int) -> Line | None:
        """That line; None: not yet. Raises KeyError when it has been dropped."""
        if number > self.last:
            return None
        if not self.lines or number < self.lines[0].number:
            raise KeyError(number)
        return self.lines[number - self.lines[0].number]


@dataclass
class Store:
    clock: Clock
    ids: Ids
    index: int = 10
    purges: Purges = "untold"
    leader: bool = True
    jobs: dict[str, Json] = field(default_factory=dict)
    evaluations: dict[str, Json] = field(default_factory=dict)
    allocations: dict[str, Json] = field(default_factory=dict)
    nodes: dict[str, Json] = field(default_factory=dict)
    placed_jobs: dict[str, Json] = field(default_factory=dict)
    """By allocation: its job as of its placement or last update in place."""
    by_job: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids of the allocations and evaluations of a job."""
    indexes: dict[str, int] = field(default_factory=dict)
    """By table: the index of its last change."""
    buffer: EventBuffer = field(default_factory=EventBuffer)
    changes: dict[str, set[str]] = field(default_factory=dict)
    """By node: allocations that its agent has to look at."""
    queue: deque[str] = field(default_factory=deque)
    """Evaluations for the scheduler."""
    moved: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    def entry(self, kind: str) -> "Entry":
        """One raft entry; *kind* is the type of its events."""
        if not self.leader:
            raise RuntimeError("nothing can be written without a leader")
        self.index += 1
        return Entry(self, kind)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.moved.park()

    async def led(self) -> None:
        """Wait for a leader: nothing can be written before."""
        await self.until(lambda: self.leader)

    def of_job(self, job: str) -> list[Json]:
        """Its allocations, oldest first."""
        found = [self.allocations[id] for id in self.by_job[job] if id in self.allocations]
        return sorted(found, key=lambda row: int(row["CreateIndex"]))

    def evaluations_of(self, job: str) -> list[Json]:
        return [self.evaluations[id] for id in self.by_job[job] if id in self.evaluations]

    def enqueue(self, evaluation: str) -> None:
        self.queue.append(evaluation)
        self.moved.unpark_all()

    def table_index(self, *tables: str) -> int:
        return max((self.indexes.get(table, 0) for table in tables), default=0) or 1

    def queued(self, job: str) -> Json:
        """How many allocations of each group of *job* wait for a place, as its last evaluation said."""
        told = [row for row in self.evaluations_of(job) if "QueuedAllocations" in row]
        newest = max(told, key=lambda row: int(row["ModifyIndex"]), default=None)
        return dict(newest["QueuedAllocations"]) if newest else {}

    def collect_garbage(self) -> None:
        """Remove what is over: no event tells of it."""
        over = [id for id, row in self.allocations.items() if row["ClientStatus"] in TERMINAL]
        for id in over:
            row = self.allocations[id]
            if row["DesiredStatus"] == "stop" or self._job_is_over(row["JobID"]):
                self._forget(id)
        for id in [id for id, row in self.evaluations.items() if row["Status"] in ENDED_EVALUATIONS]:
            self.by_job[self.evaluations.pop(id)["JobID"]].discard(id)
        for id in [id for id in self.jobs if self._job_is_over(id) and not self.of_job(id)]:
            del self.jobs[id]
        self.index += 1
        self._touch("jobs", "evaluations", "allocations", "job_summary")
        self.moved.unpark_all()

    def forget_allocation(self, id: str) -> None:
        """Remove one allocation that is over."""
        self._forget(id)
        self.index += 1
        self._touch("allocations")
        self.moved.unpark_all()

    def _job_is_over(self, id: str) -> bool:
        return id not in self.jobs or self.jobs[id]["Status"] == "dead"

    def _forget(self, id: str) -> None:
        row = self.allocations.pop(id)
        self.placed_jobs.pop(id, None)
        self.by_job[row["JobID"]].discard(id)
        self.changes.setdefault(row["NodeID"], set()).add(id)

    def _touch(self, *tables: str) -> None:
        for table in tables:
            self.indexes[table] = self.index

    def snapshot(self) -> "Store":
        """A copy to go back to. Rows are shared: they never change."""
        kept = copy(self)
        for name in ("jobs", "evaluations", "allocations", "nodes", "placed_jobs", "indexes"):
            setattr(kept, name, dict(getattr(self, name)))
        return kept

    def restore(self, kept: "Store") -> None:
        """Go back: all that happened since is unknown, and the index counts from there again."""
        for name in ("jobs", "evaluations", "allocations", "placed_jobs", "indexes"):
            setattr(self, name, dict(getattr(kept, name)))
        self.index = kept.index
        self.by_job.clear()
        for id, row in [*self.allocations.items(), *self.evaluations.items()]:
            self.by_job[row["JobID"]].add(id)
        self.buffer.clear()
        self.queue.clear()
        for node in self.nodes:
            self.changes[node] = {id for id, row in self.allocations.items() if row["NodeID"] == node}
        self.moved.unpark_all()


@dataclass
class Entry:
    """Changes of one index. What is put between two `flush`es is one transaction, one line of the stream."""

    store: Store
    kind: str
    _rows: dict[tuple[str, str], Json] = field(default_factory=dict)
    _jobs: set[str] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()

    @property
    def index(self) -> int:
        return self.store.index

    def job(self, row: Json) -> Json:
        """Register or change a job. Its status is what its allocations and evaluations make it."""
        known = self.store.jobs.get(row["ID"])
        created = known["CreateIndex"] if known else self.index
        row = {**row, "CreateIndex": created, "ModifyIndex": self.index, "JobModifyIndex": self.index}
        row = {**row, "Status": self._status(row["ID"])}
        self.store.jobs[row["ID"]] = row
        self.store._touch("jobs", "job_summary")
        self._rows["Job", row["ID"]] = row
        return row

    def purge(self, id: str) -> None:
        row = self.store.jobs.pop(id, None)
        self.store._touch("jobs", "job_summary")
        if row is not None and self.store.purges != "untold":
            self._rows["Job", id] = row

    def evaluation(self, row: Json) -> Json:
        known = self.store.evaluations.get(row["ID"])
        created = known["CreateIndex"] if known else self.index
        row = {**row, "CreateIndex": created, "ModifyIndex": self.index}
        self.store.evaluations[row["ID"]] = row
        self.store.by_job[row["JobID"]].add(row["ID"])
        self.store._touch("evaluations")
        self._rows["Evaluation", row["ID"]] = row
        self._jobs.add(row["JobID"])
        return row

    def place(self, row: Json, job: Json) -> Json:
        """A new allocation, or one that the scheduler has changed with its job."""
        self.store.placed_jobs[row["ID"]] = job
        return self.desire(row)

    def desire(self, row: Json) -> Json:
        """A change of what the scheduler wants of an allocation. The one that it replaced is told again with it."""
        row = self._allocation({**row, "AllocModifyIndex": self.index})
        previous = self.store.allocations.get(row.get("PreviousAllocation", ""))
        if previous is not None and ("Allocation", previous["ID"]) not in self._rows:
            self._allocation(changed(previous, NextAllocation=row["ID"]))
        return row

    def report(self, row: Json) -> Json:
        """What an agent tells of an allocation."""
        return self._allocation(row)

    def node(self, row: Json) -> Json:
        known = self.store.nodes.get(row["ID"])
        created = known["CreateIndex"] if known else self.index
        row = {**row, "CreateIndex": created, "ModifyIndex": self.index}
        self.store.nodes[row["ID"]] = row
        self.store._touch("nodes")
        self._rows["Node", row["ID"]] = row
        return row

    def _allocation(self, row: Json) -> Json:
        known = self.store.allocations.get(row["ID"])
        created = known["CreateIndex"] if known else self.index
        now = self.store.clock.ns()
        row = {**row, "CreateIndex": created, "ModifyIndex": self.index, "ModifyTime": now}
        self.store.allocations[row["ID"]] = row
        self.store.by_job[row["JobID"]].add(row["ID"])
        self.store._touch("allocations", "job_summary")
        self.store.changes.setdefault(row["NodeID"], set()).add(row["ID"])
        self._rows["Allocation", row["ID"]] = row
        self._jobs.add(row["JobID"])
        return row

    def flush(self) -> None:
        """End the transaction: jobs follow their allocations and evaluations, and the line is told."""
        for id in sorted(self._jobs):
            self._update_status(id)
        if self._rows:
            events = tuple(self._event(topic, row) for (topic, _), row in self._rows.items())
            self.store.buffer.append(self.index, events)
        self._rows, self._jobs = {}, set()
        self.store.moved.unpark_all()

    def _update_status(self, id: str) -> None:
        row = self.store.jobs.get(id)
        if row is not None and (status := self._status(id)) != row["Status"]:
            row = {**row, "Status": status, "ModifyIndex": self.index}
            self.store.jobs[id] = row
            self.store._touch("jobs")
            self._rows["Job", id] = row

    def _status(self, id: str) -> str:
        allocations = self.store.of_job(id)
        evaluations = self.store.evaluations_of(id)
        if not all(is_over(row) for row in allocations):
            return "running"
        if any(row["Status"] not in ENDED_EVALUATIONS for row in evaluations) or not (allocations or evaluations):
            return "pending"
        return "dead"

    def _event(self, topic: str, row: Json) -> Event:
        purged = topic == "Job" and row["ID"] not in self.store.jobs
        marks = {"Deleted": True} if purged and self.store.purges == "marked" else {}
        owner = (row["JobID"],) if topic in ("Allocation", "Evaluation") else ()
        told: Json = {
            "Topic": topic,
            "Type": self.kind,
            "Key": row["ID"],
            "Namespace": row.get("Namespace", ""),
            "FilterKeys": [*owner, ""] if owner else None,
            "Index": self.index,
            "Payload": {topic: row, **marks},
        }
        return Event(topic, (row["ID"], *owner), told["Namespace"], msgspec.json.encode(told))


def is_over(row: Json) -> bool:
    """As the scheduler sees it: an allocation that is to stop is as good as stopped."""
    return row["DesiredStatus"] != "run" or row["ClientStatus"] in TERMINAL


def encode_line(index: int, events: Iterable[Event]) -> bytes:
    """One line of the stream, without its newline."""
    return b'{"Index":%d,"Events":[%s]}' % (index, b",".join(event.encoded for event in events))

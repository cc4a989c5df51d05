"""Recorded lines of Nomad's event stream → the core's values. Test code: the real edge is the Nomad executor's own."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poseidon.core import rules
from poseidon.core.events import Start, Started
from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Listing,
    Value,
    environment_of,
)

RECORDINGS = Path(__file__).parent.parent / "recordings"
GROUP, TASK = "default-group", "default-task"

Json = Mapping[str, Any]
Step = Start | Started | Value


@dataclass(frozen=True, slots=True)
class Line:
    """All that happened at one place of a recording: a stream line's values, or one act of ours."""

    index: int
    steps: tuple[Step, ...]


@dataclass(slots=True)
class Truth:
    """What the executor has, as the values so far tell: the newest state of each object."""

    index: int = 0
    jobs: dict[JobId, JobSeen] = field(default_factory=dict)
    gone: dict[JobId, int] = field(default_factory=dict)
    allocations: dict[AllocationId, Allocation] = field(default_factory=dict)

    def take(self, line: Line) -> None:
        self.index = max(self.index, line.index)
        for step in line.steps:
            match step:
                case JobSeen(job):
                    self.jobs[job] = step
                case JobGone(job, version):
                    self.gone[job] = version
                case Allocation(id=id):
                    self.allocations[id] = step

    def listing(self, only: JobId | None = None) -> Listing:
        jobs = [seen for seen in self._jobs() if seen.version > self.gone.get(seen.job, 0)]
        allocations = list(self.allocations.values())
        if only is not None:
            jobs = [seen for seen in jobs if seen.job == only]
            allocations = [allocation for allocation in allocations if allocation.job == only]
        return Listing(tuple(jobs), tuple(allocations), self.index, self.index, only)

    def _jobs(self) -> Iterator[JobSeen]:
        """A recording may begin when a job is long there: it isn't told again, but its allocations are."""
        yield from self.jobs.values()
        untold = {allocation.job for allocation in self.allocations.values() if rules.lives(allocation)} - set(
            self.jobs
        )
        yield from (JobSeen(job, 1, JobStatus.RUNNING) for job in sorted(untold))


def truth_of(lines: Iterable[Line]) -> Truth:
    """What the executor has after *lines*."""
    truth = Truth()
    for line in lines:
        truth.take(line)
    return truth


def read_recording(name: str) -> list[Line]:
    """The lines of one recording, our own acts included. A job that the recording itself puts is ours."""
    with (RECORDINGS / f"{name}.ndjson").open() as file:
        entries: list[Json] = [json.loads(raw) for raw in file]
    evaluations = [
        event["Payload"]["Evaluation"]
        for line in _stream_lines(entries)
        for event in line["Events"]
        if event["Topic"] == "Evaluation"
    ]
    registrations = {
        evaluation["ID"]: JobId(evaluation["JobID"])
        for evaluation in evaluations
        if evaluation["TriggeredBy"] == "job-register"
    }
    return list(_lines(entries, registrations))


def _age(value: Step) -> int:
    """The order within a line means nothing; the old allocation first tells better why it is replaced."""
    return value.created if isinstance(value, Allocation) else 0


def _stream_lines(entries: Iterable[Json]) -> Iterator[Json]:
    for entry in entries:
        line = entry.get("line")
        if isinstance(line, dict) and "Events" in line:
            yield line


def _lines(entries: Iterable[Json], registrations: Mapping[str, JobId]) -> Iterator[Line]:
    """*registrations*: the jobs by the evaluations that their registration made, as the API's answers name them."""
    index = 0
    for entry in entries:
        for line in _stream_lines([entry]):
            index = line["Index"]
            values = [value for event in line["Events"] for value in values_of(event)]
            yield Line(index, tuple(sorted(values, key=_age)))
        for act in _acts(entry.get("act", ""), registrations):
            yield Line(index, (act,))


def _acts(act: str, registrations: Mapping[str, JobId]) -> Iterator[Start | Started]:
    if act.startswith("PUT /v1/jobs id="):
        job = JobId(act.split("id=")[1].split(maxsplit=1)[0])
        environment = environment_of(job)
        if environment is not None and job in registrations.values():
            yield Start(job, environment, generation=1, mark=False)
    elif act.startswith("  -> {"):
        answer = json.loads(act.removeprefix("  -> "))
        if answer.get("EvalID") in registrations:
            yield Started(registrations[answer["EvalID"]], answer["JobModifyIndex"])


def values_of(event: Json) -> Iterator[Value]:
    """The values that one event of the stream tells, if any."""
    match event["Topic"]:
        case "Allocation":
            raw = event["Payload"]["Allocation"]
            if raw["TaskGroup"] == GROUP:
                yield allocation_of(raw)
        case "Job":
            raw = event["Payload"]["Job"]
            status = JobStatus.DEAD if raw["Stop"] else JobStatus(raw["Status"])
            yield JobSeen(JobId(raw["ID"]), raw["ModifyIndex"], status)
        case "Evaluation":
            raw = event["Payload"]["Evaluation"]
            if raw["TriggeredBy"] == "job-deregister":
                yield JobGone(JobId(raw["JobID"]), raw["CreateIndex"])


def allocation_of(raw: Json) -> Allocation:
    """One allocation as an event tells it: what is absent there is known to be empty."""
    task: Json = (raw.get("TaskStates") or {}).get(TASK, {})
    transition: Json = raw.get("DesiredTransition") or {}
    return Allocation(
        id=AllocationId(raw["ID"]),
        job=JobId(raw["JobID"]),
        version=raw["ModifyIndex"],
        created=raw["CreateIndex"],
        client=ClientStatus(raw["ClientStatus"]),
        desired=DesiredStatus(raw["DesiredStatus"]),
        slot=int(raw["Name"].rpartition("[")[2].rstrip("]")),
        started=task.get("StartedAt") if task.get("State") == "running" else None,
        node_id=raw["NodeID"],
        node_name=raw.get("NodeName", ""),
        restarts=task.get("Restarts", 0),
        migrate=bool(transition.get("Migrate")),
        oom_killed=_newest_end_was_out_of_memory(task),
        follow_up=raw.get("FollowupEvalID") or None,
        previous=raw.get("PreviousAllocation") or None,
        next=raw.get("NextAllocation") or None,
    )


def _newest_end_was_out_of_memory(task: Json) -> bool:
    ends = [event for event in task.get("Events") or [] if event["Type"] == "Terminated"]
    return bool(ends) and (ends[-1].get("Details") or {}).get("oom_killed") == "true"

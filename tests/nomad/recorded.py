"""Recorded lines of the stream as they came, and what the lists would have said at the end of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from poseidon.core.events import Start, Started
from poseidon.core.model import JobStatus
from tests.core.nomad_values import RECORDINGS, Line, read_recording

Json = dict[str, Any]
DOCKER = RECORDINGS / "docker"


def stream_lines(file: Path) -> Iterator[Json]:
    """The lines that hold events."""
    for raw in file.read_bytes().splitlines():
        told = msgspec.json.decode(raw).get("line")
        if isinstance(told, dict) and "Events" in told:
            yield told


def events_of(file: Path, topic: str) -> Iterator[Json]:
    """What the events of one topic hold."""
    for told in stream_lines(file):
        yield from (event["Payload"][topic] for event in told["Events"] if event["Topic"] == topic)


@dataclass(frozen=True)
class Played:
    """One thing to be played: a raw line, or an act of ours (then there are no *bytes*), and what it means."""

    meaning: Line
    bytes: bytes = b""


def script(name: str) -> list[Played]:
    """A recording as it is to be played: raw lines, and our own acts between them."""
    lines = iter(stream_lines(RECORDINGS / f"{name}.ndjson"))
    played: list[Played] = []
    for line in read_recording(name):
        ours = line.steps and isinstance(line.steps[0], Start | Started)
        played.append(Played(line) if ours else Played(line, msgspec.json.encode(next(lines)) + b"\n"))
    return played


@dataclass
class Lists:
    """What Nomad's lists say after some lines: stubs, which know less than events."""

    index: int = 1
    jobs: dict[str, Json] = field(default_factory=dict)
    allocations: dict[str, Json] = field(default_factory=dict)

    def take(self, played: Iterable[Played]) -> None:
        for line in (msgspec.json.decode(each.bytes) for each in played if each.bytes):
            self.index = max(self.index, line["Index"])
            for event in line["Events"]:
                self._take(event["Topic"], event["Payload"])

    def _take(self, topic: str, payload: Json) -> None:
        if topic == "Job":
            self.jobs[payload["Job"]["ID"]] = payload["Job"]
        elif topic == "Allocation":
            allocation = payload["Allocation"]
            self.allocations[allocation["ID"]] = allocation
            if allocation["DesiredStatus"] == "run" and allocation["ClientStatus"] in ("pending", "running"):
                self.jobs.setdefault(allocation["JobID"], _untold(allocation["JobID"]))
        elif topic == "Evaluation" and payload["Evaluation"]["TriggeredBy"] == "job-deregister":
            job = self.jobs.get(payload["Evaluation"]["JobID"], {})
            if job.get("ModifyIndex", 0) < payload["Evaluation"]["CreateIndex"]:
                self.jobs.pop(payload["Evaluation"]["JobID"], None)

    def job_list(self) -> list[Json]:
        keys = ("ID", "Stop", "Status", "ModifyIndex", "JobModifyIndex")
        return [{key: job[key] for key in keys} for job in self.jobs.values()]

    def allocation_list(self) -> list[Json]:
        return [stub_of(allocation) for allocation in self.allocations.values()]


def _untold(job: str) -> Json:
    """A recording may begin when a job is long there."""
    return {"ID": job, "Stop": False, "Status": str(JobStatus.RUNNING), "ModifyIndex": 1, "JobModifyIndex": 1}


def stub_of(allocation: Json) -> Json:
    """As in a list: previous and next allocations aren't told, and what is empty is null or an empty string."""
    stub = {key: value for key, value in allocation.items() if key not in ("PreviousAllocation", "NextAllocation")}
    stub.setdefault("FollowupEvalID", "")
    stub.setdefault("TaskStates", None)
    stub.setdefault("DesiredTransition", {"Migrate": None, "Reschedule": None, "ForceReschedule": None})
    return stub

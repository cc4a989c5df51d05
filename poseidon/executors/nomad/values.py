"""What Nomad says → the core's values. The only place that knows what Nomad's fields mean."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from poseidon.core.model import (
    UNTOLD,
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    EnvironmentId,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Port,
    Untold,
    Value,
    environment_of,
)
from poseidon.executors.nomad import wire
from poseidon.executors.nomad.job import template_id
from poseidon.executors.nomad.settings import NomadSettings

CLIENT = {str(status): status for status in ClientStatus}
DESIRED = {str(status): status for status in DesiredStatus}
JOB = {str(status): status for status in JobStatus}
UNREADY = ("pending", "failed")
FAILURES = ("Driver Failure", "Setup Failure", "Failed Validation", "Failed Artifact Download", "Terminated")
LONGEST = 500
"""Characters of what a driver says of a failure."""
ENDED_ON_PURPOSE = ("Killing", "Restart Signaled")
DEREGISTERED = "job-deregister"
"""Told of an evaluation: a purge of Nomad 1.1 has no event of the job itself."""

_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
_allocation = msgspec.json.Decoder(wire.Allocation)
_stub = msgspec.json.Decoder(wire.JobStub)


@lru_cache(maxsize=16384)
def is_ours(job: str) -> bool:
    """Whether a job is a runner's by its name."""
    return environment_of(job) is not None


@dataclass(frozen=True, slots=True)
class JobTable:
    """The list of jobs. *running*: runners' jobs whose task runs, as Nomad counts. *others*: names of other jobs."""

    seen: tuple[JobSeen, ...]
    running: frozenset[JobId] = frozenset()
    templates: Mapping[EnvironmentId, int] = field(default_factory=dict)
    """Indexes of their registrations."""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads what is about runners; of other jobs, groups and tasks it tells nothing."""

    settings: NomadSettings
    _tells_use: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tells_use", self.settings.mark_used)

    def values(self, index: int, events: Iterable[wire.Event]) -> list[Value]:
        """What one line of the stream tells. The order in a line means nothing: older allocations come first, as
        their ends are better understood then."""
        values = [value for event in events if event.payload is not None for value in self._of(index, event.payload)]
        if len(values) > 1:
            values.sort(key=_age)
        return values

    def _of(self, index: int, payload: wire.Payload) -> Iterator[Value]:
        if (allocation := payload.allocation) is not None:
            if self.concerns(allocation):
                yield self.allocation(allocation, complete=True)
        elif (job := payload.job) is not None:
            if not is_ours(job.id):
                return
            if payload.deleted or payload.purge:
                yield JobGone(JobId(job.id), index)
            else:
                yield self.job(job)
        elif (gone := payload.evaluation) is not None and gone.triggered_by == DEREGISTERED and is_ours(gone.job_id):
            yield JobGone(JobId(gone.job_id), gone.create_index)

    def concerns(self, raw: wire.Allocation) -> bool:
        """Whether this is a runner's allocation."""
        return raw.task_group == self.settings.group and is_ours(raw.job_id)

    def allocation(self, raw: wire.Allocation, *, complete: bool) -> Allocation:
        """*complete*: empty fields are known to be empty; lists don't tell of previous and next allocations."""
        task = raw.task_states.get(self.settings.task) if raw.task_states else None
        untold: Untold | None = None if complete else UNTOLD
        return Allocation(
            id=AllocationId(raw.id),
            job=JobId(raw.job_id),
            version=raw.modify_index,
            created=raw.create_index,
            client=CLIENT.get(raw.client_status, ClientStatus.UNKNOWN),
            desired=DESIRED.get(raw.desired_status, DesiredStatus.EVICT),
            slot=_slot(raw.name),
            started=task.started_at if task is not None and task.state == "running" else None,
            node_id=raw.node_id,
            node_name=raw.node_name or "",
            restarts=task.restarts if task is not None else 0,
            migrate=raw.desired_transition is not None and bool(raw.desired_transition.migrate),
            oom_killed=task is not None and _ran_out_of_memory(task),
            follow_up=raw.followup_eval_id or None,
            previous=AllocationId(raw.previous_allocation) if raw.previous_allocation else untold,
            next=AllocationId(raw.next_allocation) if raw.next_allocation else untold,
            ports=_ports(raw),
            trouble=_trouble(task) if task is not None and raw.client_status in UNREADY else "",
        )

    def job(self, raw: wire.Job) -> JobSeen:
        """A job in full, with its mark."""
        used = self.meta(raw).get("used") == "true" if self._tells_use else None
        return JobSeen(JobId(raw.id), raw.modify_index, _job_status(raw.stop, raw.status), used)

    def meta(self, raw: wire.Job) -> dict[str, str]:
        """What the job has on record about itself."""
        for group in raw.task_groups or ():
            if group.name == self.settings.config_group:
                return group.meta or {}
        return {}

    def job_table(self, body: bytes) -> JobTable:
        """The body of a list of jobs. Takes long for many: not for the event loop."""
        seen: list[JobSeen] = []
        running: set[JobId] = set()
        templates: dict[EnvironmentId, int] = {}
        others: list[str] = []
        for raw in _raw_list.decode(body):
            stub = _stub.decode(raw)
            if not is_ours(stub.id):
                known = template_id(stub.id)
                if known is None:
                    others.append(stub.id)
                elif not stub.stop:
                    templates[known] = stub.job_modify_index
                continue
            seen.append(JobSeen(JobId(stub.id), stub.modify_index, _job_status(stub.stop, stub.status)))
            if self._runs(stub):
                running.add(JobId(stub.id))
        return JobTable(tuple(seen), frozenset(running), templates, tuple(others))

    def allocations(self, body: bytes) -> tuple[Allocation, ...]:
        """The body of a list of allocations, read one by one, so that other threads have their turns."""
        found = (_allocation.decode(raw) for raw in _raw_list.decode(body))
        return tuple(self.allocation(raw, complete=False) for raw in found if self.concerns(raw))

    def _runs(self, stub: wire.JobStub) -> bool:
        groups = (stub.job_summary.summary if stub.job_summary is not None else None) or {}
        return self.settings.group in groups and groups[self.settings.group].running > 0


def _age(value: Value) -> int:
    return value.created if isinstance(value, Allocation) else 0


def _slot(name: str) -> int:
    """The number at the end of `job.group[0]`."""
    number = name[name.rfind("[") + 1 : -1]
    return int(number) if number.isdecimal() else 0


def _job_status(stop: bool | None, status: str) -> JobStatus:
    return JobStatus.DEAD if stop else JOB.get(status, JobStatus.RUNNING)


def _ran_out_of_memory(task: wire.TaskState) -> bool:
    """Docker's flag belongs to the container and sticks, whatever its end: one that was asked to end didn't end so."""
    events = task.events or ()
    if not any(event.type == "Terminated" for event in events):
        return False
    newest, asked_to_end = None, False
    for event in sorted(events, key=lambda event: event.time):
        if event.type == "Terminated":
            newest = None if asked_to_end else event
        if event.type in ENDED_ON_PURPOSE:
            asked_to_end = True
        elif event.type == "Started":
            asked_to_end = False
    return newest is not None and (newest.details or {}).get("oom_killed") == "true"


def _trouble(task: wire.TaskState) -> str:
    """What its newest failure was."""
    failures = [event for event in task.events or () if event.type in FAILURES]
    return max(failures, key=lambda event: event.time).display_message[:LONGEST] if failures else ""


def _ports(raw: wire.Allocation) -> tuple[Port, ...]:
    shared = raw.allocated_resources.shared if raw.allocated_resources is not None else None
    ports = shared.ports if shared is not None else None
    if not ports:
        return ()
    return tuple(Port(_exposed(port), _address(port)) for port in ports)


def _exposed(port: wire.AllocatedPort) -> int:
    return port.to or (int(port.label) if port.label.isdecimal() else port.value)


def _address(port: wire.AllocatedPort) -> str:
    host = f"[{port.host_ip}]" if ":" in port.host_ip else port.host_ip
    return f"{host}:{port.value}"

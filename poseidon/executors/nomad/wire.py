"""What Nomad says, as far as it is used: newer versions may say more, and lists say null where events say nothing."""

from typing import Annotated, Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What Go and SQLite hold; JSON itself has no bounds."""


class Struct(msgspec.Struct, gc=False, rename="pascal"):
    """Names are Nomad's; those with capitals of their own are given one by one."""


class TaskEvent(Struct):
    """Something that happened to a task."""

    type: str = ""
    time: Number = 0
    details: dict[str, str] | None = None
    display_message: str = ""


class TaskState(Struct):
    """Where a task stands. Only its last ten events are kept."""

    state: str = ""
    restarts: Number = 0
    started_at: str | None = None
    events: list[TaskEvent] | None = None


class AllocatedPort(Struct):
    """A port of the node that leads into the allocation."""

    label: str = ""
    value: Number = 0
    to: Number = 0
    host_ip: str = msgspec.field(default="", name="HostIP")


class SharedResources(Struct):
    ports: list[AllocatedPort] | None = None


class AllocatedResources(Struct):
    shared: SharedResources | None = None


class DesiredTransition(Struct):
    migrate: bool | None = None


class Allocation(Struct):
    """From an event, a list or by itself; which of them decides what an empty field means."""

    id: str = msgspec.field(name="ID")
    job_id: str = msgspec.field(name="JobID")
    create_index: Number
    modify_index: Number
    name: str = ""
    task_group: str = ""
    node_id: str = msgspec.field(default="", name="NodeID")
    node_name: str | None = ""
    desired_status: str = ""
    client_status: str = ""
    desired_transition: DesiredTransition | None = None
    task_states: dict[str, TaskState] | None = None
    allocated_resources: AllocatedResources | None = None
    followup_eval_id: str | None = msgspec.field(default=None, name="FollowupEvalID")
    previous_allocation: str | None = None
    next_allocation: str | None = None
    modify_time: Number = 0


class Metric(Struct):
    """Why a group wasn't placed."""

    nodes_evaluated: Number = 0
    nodes_filtered: Number = 0
    nodes_exhausted: Number = 0
    nodes_available: dict[str, Number] | None = None
    constraint_filtered: dict[str, Number] | None = None
    dimension_exhausted: dict[str, Number] | None = None
    quota_exhausted: list[str] | None = None


class Evaluation(Struct):
    id: str = msgspec.field(name="ID")
    job_id: str = msgspec.field(name="JobID")
    create_index: Number
    triggered_by: str = ""
    status: str = ""
    failed_groups: dict[str, Metric] | None = msgspec.field(default=None, name="FailedTGAllocs")
    blocked_eval: str | None = None
    modify_time: Number = 0


class TaskGroup(Struct):
    name: str | None = ""
    meta: dict[str, str] | None = None


class Job(Struct):
    id: str = msgspec.field(name="ID")
    modify_index: Number
    status: str = ""
    stop: bool | None = False
    job_modify_index: Number = 0
    task_groups: list[TaskGroup] | None = None


class _Port(Struct):
    to: Number = 0


class _Network(Struct):
    dynamic_ports: list[_Port] | None = None


class _Resources(Struct):
    cpu: Number = msgspec.field(default=0, name="CPU")
    memory_max: Number = msgspec.field(default=0, name="MemoryMaxMB")


class _WholeTask(Struct):
    name: str = ""
    driver: str = ""
    config: dict[str, Any] | None = None
    resources: _Resources | None = None


class _WholeGroup(Struct):
    name: str | None = ""
    meta: dict[str, str] | None = None
    networks: list[_Network] | None = None
    tasks: list[_WholeTask] | None = None


class WholeJob(Struct):
    """What is relied upon in a job that is kept as it is, to be registered again."""

    id: str = msgspec.field(name="ID")
    job_modify_index: Number = 0
    stop: bool | None = False
    task_groups: list[_WholeGroup] | None = None


class GroupSummary(Struct):
    running: Number = 0


class JobSummary(Struct):
    summary: dict[str, GroupSummary] | None = None


class JobStub(Struct):
    """A job in a list."""

    id: str = msgspec.field(name="ID")
    modify_index: Number
    job_modify_index: Number = 0
    """As of the newest registration that changed it."""
    status: str = ""
    stop: bool | None = False
    job_summary: JobSummary | None = None


class Payload(Struct):
    """Just one of these is there."""

    allocation: Allocation | None = None
    evaluation: Evaluation | None = None
    job: Job | None = None
    deleted: bool = False
    """Newer versions tell so that a job was purged, not just stopped."""
    purge: bool = False


class Event(Struct):
    topic: str = ""
    payload: Payload | None = None


class Line(Struct):
    """A line of the event stream; an empty object is a heartbeat."""

    index: Number = 0
    events: list[Event] | None = None


class Registered(Struct):
    """The answer to a registration."""

    job_modify_index: Number
    eval_id: str = msgspec.field(default="", name="EvalID")
    warnings: str | None = ""


class Deregistered(Struct):
    """The answer to a deregistration."""

    eval_id: str = msgspec.field(default="", name="EvalID")


class Node(Struct):
    http_addr: str = msgspec.field(default="", name="HTTPAddr")
    tls_enabled: bool = msgspec.field(default=False, name="TLSEnabled")


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """What was asked for, and the index as of which it is true (0: not told)."""

    body: T
    index: int

"""The bodies of answers as types: `schemas.py` makes them, and `openapi.py` tells clients of them."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"}, description="ISO 8601, UTC")]
ErrorCode = Literal[
    "NOMAD_OVERLOAD",
    "NOMAD_UNREACHABLE",
    "NOMAD_INTERNAL_SERVER_ERROR",
    "PREWARMING_POOL_DEPLETING",
    "UNKNOWN",
]


class Problem(TypedDict):
    """What the client did wrong, or met."""

    message: str


class Fault(TypedDict):
    """What keeps the service from doing it."""

    message: str
    errorCode: ErrorCode


class Environment(TypedDict):
    """What to run in, and how its pool is doing."""

    prewarmingPoolSize: int
    cpuLimit: Annotated[int, Field(description="MHz; 0: the executor's default")]
    memoryLimit: Annotated[int, Field(description="MB; 0: the executor's default")]
    image: str
    networkAccess: bool
    exposedPorts: list[int]
    id: int
    status: Annotated[Literal["ok", "filling", "failing"], Field(description="of the pool")]
    message: Annotated[str, Field(description="why starts fail, if they do")]


class EnvironmentList(TypedDict):
    """All environments."""

    executionEnvironments: list[Environment]


class Pool(TypedDict):
    """A pool in numbers."""

    id: int
    prewarmingPoolSize: int
    idleRunners: int
    usedRunners: int


class MappedPort(TypedDict):
    """A port of the runner that can be reached from outside."""

    exposedPort: int
    hostAddress: Annotated[str, Field(description="host:port")]


class Claim(TypedDict):
    """A runner for its new owner."""

    runnerId: str
    mappedPorts: list[MappedPort]


class Runner(TypedDict):
    """One runner, living or gone. Of one that has been gone for very long only the end is known."""

    id: str
    environmentId: int | None
    phase: Literal["idle", "used", "gone"]
    node: str | None
    allocation: str | None
    job: str | None
    readyAt: Moment | None
    claimedAt: Moment | None
    expiresAt: Moment | None
    reason: NotRequired[Annotated[str | None, Field(description="why it is gone")]]
    goneAt: NotRequired[Moment | None]


class FileEntry(TypedDict):
    """A file, folder, link or anything else that has a name."""

    name: str
    entryType: Annotated[str, Field(description="`-` file, `d` folder, `l` link, `b`, `c`, `p`, `s`", max_length=1)]
    size: int
    modificationTime: Annotated[int, Field(description="seconds since the epoch")]
    permissions: Annotated[str, Field(min_length=9, max_length=9, examples=["rwxr--r--"])]
    owner: str
    group: str
    linkTarget: NotRequired[str]


class FileList(TypedDict):
    """What lies there, sorted by name."""

    files: list[FileEntry]


class Executions(TypedDict):
    """What ran in a runner."""

    count: int
    lastOutcome: Annotated[str | None, Field(description="of the one that ended last")]


class RunnerInDetail(Runner):
    """One runner, and what ran in it."""

    executions: Executions


class RunnerList(TypedDict):
    """All runners that live."""

    runners: list[Runner]


class Gone(TypedDict):
    """No runner in use has this id. *runner*: what is known of it, if it ever was."""

    message: str
    runner: NotRequired[Runner]


class PreparedExecution(TypedDict):
    """Where to connect."""

    websocketUrl: str


class RunTimes(TypedDict):
    """When what happened."""

    queuedAt: Moment | None
    claimedAt: Moment | None
    copiedAt: Moment | None
    startedAt: Moment | None
    endedAt: Moment | None


class RunDurations(TypedDict):
    """In milliseconds."""

    waiting: Annotated[float, Field(description="for a runner")]
    copying: float
    running: float


class RunResources(TypedDict):
    """What the run has used."""

    cpuSeconds: float | None
    memoryPeakBytes: Annotated[int | None, Field(description="the most that the runner ever held, its files included")]


class Run(TypedDict):
    """How a one-shot run went."""

    runnerId: str
    node: str
    outcome: Annotated[
        Literal["exit", "timeout", "out_of_memory", "runner_gone", "client_gone", "failed"],
        Field(description="`exit`: the command ended by itself"),
    ]
    exitCode: Annotated[int | None, Field(description="of `exit`; 128 + n for signal n")]
    detail: Annotated[str | None, Field(description="why the runner is gone, or what failed")]
    stdout: str
    stderr: str
    stdoutTruncated: bool
    stderrTruncated: bool
    times: RunTimes
    durations: RunDurations
    resources: Annotated[RunResources | None, Field(description="null where the executor doesn't measure it")]


class ServiceState(TypedDict):
    """One of the daemon's supervised parts."""

    name: str
    state: str
    since: Moment | None
    crashes: int
    error: str | None


class PoolState(TypedDict):
    """One environment's pool, for operators."""

    id: int
    image: str
    wanted: int
    idle: int
    starting: int
    used: int
    waiting: Annotated[int, Field(description="clients that wait for a runner")]
    status: str
    message: str


class RunnerCounts(TypedDict):
    """Over all environments."""

    idle: int
    used: int
    starting: int


class StreamState(TypedDict):
    """How fresh an executor's news are."""

    connected: bool
    age: Annotated[float | None, Field(description="seconds since anything came")]
    lag: Annotated[float | None, Field(description="seconds by which the newest change was late")]
    index: int
    lines: int
    events: int
    breaks: int


class ExecutorState(TypedDict):
    """How an executor is doing."""

    name: str
    reachable: bool
    trouble: str | None
    listed: bool
    stream: StreamState | None


class AbilityState(TypedDict):
    """One promise of an executor, and whether it holds."""

    executor: str
    name: str
    holds: bool
    how: str


class Status(TypedDict):
    """Everything, for operators."""

    version: str
    started_at: Moment | None
    draining: bool
    services: list[ServiceState]
    environments: list[PoolState]
    runners: RunnerCounts
    executors: list[ExecutorState]
    abilities: list[AbilityState]
    store: dict[str, object]

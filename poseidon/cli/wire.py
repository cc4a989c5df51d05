"""The daemon's answers as the command line reads them. Only what makes an answer ours is required, more is ignored."""

from typing import Literal

from msgspec import Struct


class Environment(Struct, frozen=True, rename="camel"):
    """One entry of GET /execution-environments."""

    id: int
    image: str = ""
    prewarming_pool_size: int = 0
    cpu_limit: int = 0
    memory_limit: int = 0
    network_access: bool = False
    exposed_ports: list[int] | None = None


class Environments(Struct, frozen=True, rename="camel"):
    """GET /execution-environments."""

    execution_environments: list[Environment] | None


class Claimed(Struct, frozen=True, rename="camel"):
    """POST /runners."""

    runner_id: str


class Created(Struct, frozen=True, rename="camel"):
    """POST /runners/{id}/execute."""

    websocket_url: str


class Problem(Struct, frozen=True, rename="camel"):
    """The body of an error."""

    message: str
    error_code: str = ""


class Message(Struct, frozen=True):
    """One message of an execution's WebSocket."""

    type: Literal["start", "stdout", "stderr", "exit", "timeout", "error"]
    data: str | int = ""


class Runner(Struct, frozen=True, rename="camel"):
    """One entry of GET /runners."""

    id: str
    environment_id: int = 0
    phase: str = ""
    node: str | None = None
    allocation: str | None = None
    ready_at: str | None = None
    claimed_at: str | None = None
    expires_at: str | None = None


class Runners(Struct, frozen=True):
    """GET /runners."""

    runners: list[Runner]


class Service(Struct, frozen=True):
    """A supervised part of the daemon."""

    name: str
    state: str = ""
    since: str | float | None = None
    crashes: int = 0
    error: str | None = None


class Pool(Struct, frozen=True):
    """An environment with its pool, as GET /status tells it."""

    id: int
    image: str = ""
    wanted: int = 0
    idle: int = 0
    starting: int = 0
    used: int = 0
    waiting: int = 0
    status: str | None = None
    message: str | None = None


class Ability(Struct, frozen=True):
    """A promise of an executor, and whether it holds."""

    name: str
    holds: bool
    how: str = ""
    executor: str = ""


class Stream(Struct, frozen=True):
    """How an executor's event stream does."""

    connected: bool = False
    age: float | None = None
    lag: float | None = None
    breaks: int = 0


class Executor(Struct, frozen=True):
    """What runs the runners. Without a stream, its news can't be late."""

    name: str
    reachable: bool = False
    trouble: str | None = None
    stream: Stream | None = None


class Status(Struct, frozen=True):
    """GET /status."""

    version: str = ""
    started_at: str | float | None = None
    draining: bool = False
    services: list[Service] = []
    environments: list[Pool] = []
    runners: dict[str, int] = {}
    executors: list[Executor] = []
    abilities: list[Ability] = []
    store: dict[str, object] = {}

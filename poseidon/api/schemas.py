"""The bodies of requests and answers: the only place where the wire's names appear."""

import binascii
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from poseidon.api import shapes
from poseidon.api.bodies import Body
from poseidon.api.long_strings import EXPECTED
from poseidon.api.parts import Overview
from poseidon.api.queries import Flag, Query
from poseidon.core.command import Command
from poseidon.core.model import Environment, EnvironmentId, Phase, Runner
from poseidon.executors.base import StreamFigures
from poseidon.runners.facts import ExecutionFacts, ExecutorFacts, PoolStatistics, RunnerFacts
from poseidon.runners.files_archive import File
from poseidon.runners.runs import Order, Report

MOST = 2**31 - 1
RUN_TIME_LIMIT = 60
"""Seconds that a one-shot run may take if it doesn't say."""
OUTPUT_LIMIT, LARGEST_OUTPUT = 1024 * 1024, 16 * 1024 * 1024
"""Bytes of each stream that a one-shot run answers."""


def _zero_text(value: object) -> object:
    return "" if value is None else value


def _no_nulls(value: object) -> object:
    return {name: "" if each is None else each for name, each in value.items()} if isinstance(value, Mapping) else value


def _is_name(value: str, info: ValidationInfo) -> bool:
    """Does it stand for something that was taken out of the body (`long_strings.py`)?"""
    return value.encode() in (info.context or {})


def _path(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and _is_name(value, info):
        raise ValueError("no path is that long")
    return _zero_text(value)


def _from_base64(value: object, info: ValidationInfo) -> object:
    """What was taken out of the body keeps its name: it is decoded later, piece by piece."""
    if not isinstance(value, str):
        return value
    if _is_name(value, info):
        return value.encode()
    try:
        plain = value.replace("\r", "").replace("\n", "") if "\n" in value or "\r" in value else value
        return binascii.a2b_base64(plain, strict_mode=True)
    except (binascii.Error, ValueError):
        raise ValueError(EXPECTED) from None


def _nameable(image: str) -> str:
    if image != image.strip() or not image.isprintable():
        raise ValueError("expected without control characters, and without spaces round it")
    return image


def _distinct(ports: list[int]) -> list[int]:
    if len(set(ports)) < len(ports):
        raise ValueError("each port may be named only once")
    return ports


Count = Annotated[int, Field(ge=0, le=MOST)]
Port = Annotated[int, Field(ge=1, le=65535)]
Path = Annotated[str, BeforeValidator(_path)]
Image = Annotated[str, Field(max_length=1024), AfterValidator(_nameable)]
Text = Annotated[str, BeforeValidator(_zero_text)]


class EnvironmentBody(Body):
    """PUT /execution-environments/{id}. An id in it doesn't count."""

    prewarming_pool_size: Annotated[Count, Field(description="runners that wait for clients")] = 0
    cpu_limit: Annotated[Count, Field(description="MHz; 0: the executor's default")] = 0
    memory_limit: Annotated[Count, Field(description="MB; 0: the executor's default")] = 0
    image: Annotated[Image, Field(description="none: the executor's own root")] = ""
    network_access: bool = False
    exposed_ports: Annotated[list[Port], AfterValidator(_distinct)] = Field(default=[])

    def environment(self, identity: EnvironmentId, executor: str) -> Environment:
        """The environment that is wanted."""
        return Environment(
            id=identity,
            image=self.image,
            pool_size=self.prewarming_pool_size,
            cpu_limit=self.cpu_limit,
            memory_limit=self.memory_limit,
            network_access=self.network_access,
            exposed_ports=tuple(self.exposed_ports),
            executor=executor,
        )


class ClaimBody(Body):
    """POST /runners."""

    execution_environment_id: int = 0
    inactivity_timeout: Annotated[Count, Field(description="seconds; 0: never")] = 0


class ExecuteBody(Body):
    """POST /runners/{id}/execute. The original knows the first four; rows and columns are the terminal's first size."""

    command: Annotated[str, Field(description="for `/bin/bash -c`, passed on as it is")] = ""
    privileged_execution: Annotated[bool, Field(description="as root of the runner")] = False
    time_limit: Annotated[Count, Field(description="seconds from the opening of the WebSocket; 0: none")] = 0
    environment: Annotated[dict[str, str], BeforeValidator(_no_nulls)] = Field(default={})
    tty: Annotated[bool, Field(description="false: pipes instead of a terminal")] = True
    rows: Annotated[int, Field(ge=0, le=65535)] = 0
    columns: Annotated[int, Field(ge=0, le=65535)] = 0

    def as_command(self) -> Command:
        """What to run."""
        return Command(
            line=self.command,
            environment=self.environment,
            privileged=self.privileged_execution,
            tty=self.tty,
            rows=self.rows,
            columns=self.columns,
        )


class FileBody(Body):
    """One entry of `copy`. A path that ends in a slash is a folder."""

    path: Path = ""
    content: Annotated[bytes, BeforeValidator(_from_base64)] = b""


class FilesBody(Body):
    """PATCH /runners/{id}/files."""

    delete: list[Path] = Field(default=[])
    copy_: list[FileBody] = Field(default=[], alias="copy")


class RunBody(Body):
    """POST /runs."""

    execution_environment_id: int = 0
    command: Annotated[str, Field(description="for `/bin/bash -c`")] = ""
    files: Annotated[list[FileBody], Field(description="copied before, as by `copy` of the runner's files")] = Field(
        default=[]
    )
    environment: Annotated[dict[str, str], BeforeValidator(_no_nulls)] = Field(default={})
    stdin: Annotated[str, Field(description="all input; then it ends")] = ""
    time_limit: Annotated[int, Field(ge=0, le=MOST, description="seconds; 0 or none: 60")] = 0
    privileged_execution: bool = False
    network_access: Annotated[bool, Field(description="refuse the run if the environment has none")] = False
    output_limit: Annotated[
        int, Field(ge=0, le=LARGEST_OUTPUT, description="bytes that are kept of each stream; 0 or none: 1 MiB")
    ] = 0

    def order(self, files: list[File], whole: Callable[[str], str]) -> Order:
        """What is wanted, with the contents of its *files*. *whole* gives what a text stands for."""
        variables = {whole(name): whole(value) for name, value in self.environment.items()}
        command = Command(
            line=whole(self.command), environment=variables, privileged=self.privileged_execution, tty=False
        )
        return Order(
            EnvironmentId(self.execution_environment_id),
            command,
            self.time_limit or RUN_TIME_LIMIT,
            self.output_limit or OUTPUT_LIMIT,
            files,
            whole(self.stdin).encode("utf-8", "replace"),
        )


class FetchQuery(Query):
    """GET /execution-environments."""

    fetch: Annotated[Flag, Field(description="First take over what others have put into a Nomad cluster.")] = False


class WaitQuery(Query):
    """PUT /execution-environments/{id}."""

    wait: Annotated[Flag, Field(description="Answer when the pool is filled, or after 50 seconds.")] = False


class AnyQuery(Query):
    """DELETE /runners/{id}."""

    any: Annotated[Flag, Field(description="Stop it also if it is idle.")] = False


class ExecutionQuery(Query):
    """GET /runners/{id}/websocket."""

    execution: Annotated[str, Field(alias="executionID", description="From the URL that `execute` has answered.")] = ""


# Answers


def environment_answer(environment: Environment, pool: PoolStatistics) -> shapes.Environment:
    """One environment."""
    return {
        "prewarmingPoolSize": environment.pool_size,
        "cpuLimit": environment.cpu_limit,
        "memoryLimit": environment.memory_limit,
        "image": environment.image,
        "networkAccess": environment.network_access,
        "exposedPorts": list(environment.exposed_ports),
        "id": environment.id,
        "status": pool.status.value,
        "message": pool.message,
    }


def statistics_answer(statistics: Mapping[EnvironmentId, PoolStatistics]) -> dict[str, shapes.Pool]:
    """The pools in the numbers that the contract knows."""
    return {
        str(identity): {
            "id": identity,
            "prewarmingPoolSize": pool.size,
            "idleRunners": pool.idle,
            "usedRunners": pool.used,
        }
        for identity, pool in statistics.items()
    }


def claim_answer(runner: Runner) -> shapes.Claim:
    """A runner for its new owner."""
    ports: list[shapes.MappedPort] = [
        {"exposedPort": port.exposed, "hostAddress": port.address} for port in runner.ports
    ]
    return {"runnerId": runner.id, "mappedPorts": ports}


def runner_answer(facts: RunnerFacts) -> shapes.Runner:
    """One runner, living or gone."""
    answer: shapes.Runner = {
        "id": facts.id,
        "environmentId": facts.environment,
        "phase": facts.phase.value,
        "node": facts.node,
        "allocation": facts.allocation,
        "job": facts.job,
        "readyAt": moment(facts.ready_at),
        "claimedAt": moment(facts.claimed_at),
        "expiresAt": moment(facts.expires_at),
    }
    if facts.phase is Phase.GONE:
        answer["reason"] = facts.reason
        answer["goneAt"] = moment(facts.gone_at)
    return answer


def report_answer(report: Report) -> shapes.Run:
    """How a run went."""
    usage = report.usage
    return {
        "runnerId": report.runner.id,
        "node": report.runner.node_name,
        "outcome": report.outcome.ending.value,
        "exitCode": report.outcome.code,
        "detail": report.outcome.detail or None,
        "stdout": report.stdout.text,
        "stderr": report.stderr.text,
        "stdoutTruncated": report.stdout.is_cut,
        "stderrTruncated": report.stderr.is_cut,
        "times": {
            "queuedAt": moment(report.queued_at),
            "claimedAt": moment(report.claimed_at),
            "copiedAt": moment(report.copied_at),
            "startedAt": moment(report.started_at),
            "endedAt": moment(report.ended_at),
        },
        "durations": {
            "waiting": _milliseconds(report.claimed_at - report.queued_at),
            "copying": _milliseconds(report.copied_at - report.claimed_at),
            "running": _milliseconds(report.ended_at - report.started_at),
        },
        "resources": None
        if usage is None
        else {"cpuSeconds": _rounded(usage.cpu_seconds), "memoryPeakBytes": usage.memory_peak},
    }


def _milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 1)


def detailed_answer(facts: RunnerFacts, executions: ExecutionFacts) -> shapes.RunnerInDetail:
    """One runner, and what ran in it."""
    return {
        **runner_answer(facts),
        "executions": {"count": executions.count, "lastOutcome": executions.last_outcome},
    }


def status_answer(
    version: str,
    overview: Overview,
    environments: list[Environment],
    statistics: Mapping[EnvironmentId, PoolStatistics],
) -> shapes.Status:
    """Everything, for operators."""
    pools = [_pool(environment, statistics[environment.id]) for environment in environments]
    return {
        "version": version,
        "started_at": moment(overview.started_at),
        "draining": overview.draining,
        "services": [
            {
                "name": service.name,
                "state": service.state,
                "since": moment(service.since),
                "crashes": service.crashes,
                "error": service.error,
            }
            for service in overview.services()
        ],
        "environments": pools,
        "runners": {
            "idle": sum(pool["idle"] for pool in pools),
            "used": sum(pool["used"] for pool in pools),
            "starting": sum(pool["starting"] for pool in pools),
        },
        "executors": [_executor(each) for each in overview.executors()],
        "abilities": [
            {"executor": each.name, "name": ability.name, "holds": ability.holds, "how": ability.how}
            for each in overview.executors()
            for ability in each.abilities
        ],
        "store": dict(overview.store()),
    }


def _pool(environment: Environment, pool: PoolStatistics) -> shapes.PoolState:
    return {
        "id": environment.id,
        "image": environment.image,
        "wanted": pool.size,
        "idle": pool.idle,
        "starting": pool.starting,
        "used": pool.used,
        "waiting": pool.waiting,
        "status": pool.status,
        "message": pool.message,
    }


def _executor(facts: ExecutorFacts) -> shapes.ExecutorState:
    return {
        "name": facts.name,
        "reachable": facts.reachable,
        "trouble": facts.trouble,
        "listed": facts.listed,
        "stream": None if facts.stream is None else _stream(facts.stream),
    }


def _stream(figures: StreamFigures) -> shapes.StreamState:
    return {
        "connected": figures.connected,
        "age": _rounded(figures.age),
        "lag": _rounded(figures.lag),
        "index": figures.index,
        "lines": figures.lines,
        "events": figures.events,
        "breaks": figures.breaks,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def moment(seconds: float | None) -> str | None:
    """A date in ISO 8601, UTC, with milliseconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

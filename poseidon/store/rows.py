"""Core values as rows and back. What isn't told is NULL; what is told to be none is the empty text."""

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from poseidon.core.model import (
    UNTOLD,
    Allocation,
    AllocationId,
    ClientStatus,
    DesiredStatus,
    Environment,
    EnvironmentId,
    Intent,
    Job,
    JobId,
    JobStatus,
    Phase,
    Port,
    Reason,
    Runner,
    RunnerId,
    Transition,
    Untold,
)
from poseidon.store.statements import Row
from poseidon.store.times import from_text, to_text

R = TypeVar("R")
NO_PORTS: Final = "[]"


def environment_row(environment: Environment, at: float) -> Row:
    return {
        "id": environment.id,
        "image": environment.image,
        "pool_size": environment.pool_size,
        "cpu_limit": environment.cpu_limit,
        "memory_limit": environment.memory_limit,
        "network_access": environment.network_access,
        "exposed_ports": json.dumps(environment.exposed_ports),
        "executor": environment.executor,
        "generation": environment.generation,
        "compatible_since": environment.compatible_since,
        "created_at": to_text(at),
        "changed_at": to_text(at),
        "removed_at": None,
    }


def environment_of(row: Row) -> Environment:
    return Environment(
        id=EnvironmentId(row["id"]),
        image=row["image"],
        pool_size=row["pool_size"],
        cpu_limit=row["cpu_limit"],
        memory_limit=row["memory_limit"],
        network_access=bool(row["network_access"]),
        exposed_ports=tuple(json.loads(row["exposed_ports"])),
        executor=row["executor"],
        generation=row["generation"],
        compatible_since=row["compatible_since"],
    )


def job_row(job: Job, executor: str, at: str) -> Row:
    return {
        "id": job.id,
        "environment": job.environment,
        "executor": executor,
        "generation": job.generation,
        "ours": job.ours,
        "adopted": job.adopted,
        "id_issued": job.id_issued,
        "version": job.version,
        "status": job.status,
        "gone_version": job.gone_version,
        "mark": job.mark,
        "stop_reason": job.stop_reason,
        "doubtful_since": to_text(job.doubtful_since),
        "lifeless_since": to_text(job.lifeless_since),
        "first_seen_at": at,
        "changed_at": at,
        "ended_at": None,
    }


def intent_rows(job: Job) -> list[Row]:
    return [
        {"job": job.id, "kind": kind, "asked_at": to_text(intent.asked_at), "answered": intent.answered}
        for kind, intent in (("start", job.start), ("stop", job.stop))
        if intent is not None
    ]


def job_of(row: Row, start: Intent | None, stop: Intent | None) -> Job:
    return Job(
        id=JobId(row["id"]),
        environment=EnvironmentId(row["environment"]),
        generation=row["generation"],
        ours=bool(row["ours"]),
        adopted=bool(row["adopted"]),
        id_issued=bool(row["id_issued"]),
        version=row["version"],
        status=_maybe(JobStatus, row["status"]),
        gone_version=row["gone_version"],
        mark=_maybe(bool, row["mark"]),
        start=start,
        stop=stop,
        stop_reason=_maybe(Reason, row["stop_reason"]),
        doubtful_since=from_text(row["doubtful_since"]),
        lifeless_since=from_text(row["lifeless_since"]),
    )


def intent_of(row: Row) -> Intent:
    return Intent(asked_at=from_text(row["asked_at"]), answered=row["answered"])


def allocation_row(allocation: Allocation, at: str) -> Row:
    return {
        "id": allocation.id,
        "job": allocation.job,
        "version": allocation.version,
        "created": allocation.created,
        "client": allocation.client,
        "desired": allocation.desired,
        "slot": allocation.slot,
        "started": allocation.started,
        "node_id": allocation.node_id,
        "node_name": allocation.node_name,
        "restarts": allocation.restarts,
        "migrate": allocation.migrate,
        "oom_killed": allocation.oom_killed,
        "follow_up": _told(allocation.follow_up),
        "previous": _told(allocation.previous),
        "next": _told(allocation.next),
        "ports": _ports_text(allocation.ports),
        "first_seen_at": at,
        "changed_at": at,
        "absent_at": None,
    }


def allocation_of(row: Row) -> Allocation:
    return Allocation(
        id=AllocationId(row["id"]),
        job=JobId(row["job"]),
        version=row["version"],
        created=row["created"],
        client=ClientStatus(row["client"]),
        desired=DesiredStatus(row["desired"]),
        slot=row["slot"],
        started=row["started"],
        node_id=row["node_id"],
        node_name=row["node_name"],
        restarts=row["restarts"],
        migrate=bool(row["migrate"]),
        oom_killed=bool(row["oom_killed"]),
        follow_up=_telling(str, row["follow_up"]),
        previous=_telling(AllocationId, row["previous"]),
        next=_telling(AllocationId, row["next"]),
        ports=_ports_of(row["ports"]),
    )


def runner_row(runner: Runner) -> Row:
    expires = runner.phase is Phase.USED and runner.timeout > 0 and runner.claimed_at is not None
    return {
        "id": runner.id,
        "environment": runner.environment,
        "job": runner.job,
        "allocation": runner.allocation,
        "started": runner.started,
        "node_id": runner.node_id,
        "node_name": runner.node_name,
        "phase": runner.phase,
        "reason": runner.reason,
        "timeout": runner.timeout,
        "ready_at": to_text(runner.ready_at),
        "claimed_at": to_text(runner.claimed_at),
        "expires_at": to_text((runner.claimed_at or 0) + runner.timeout) if expires else None,
        "gone_at": to_text(runner.gone_at),
        "startup_ms": None if runner.startup is None else round(runner.startup * 1000),
        "ports": _ports_text(runner.ports),
    }


def runner_of(row: Row) -> Runner:
    return Runner(
        id=RunnerId(row["id"]),
        environment=EnvironmentId(row["environment"]),
        job=JobId(row["job"]),
        allocation=AllocationId(row["allocation"]),
        started=row["started"],
        node_id=row["node_id"],
        node_name=row["node_name"],
        phase=Phase(row["phase"]),
        ready_at=from_text(row["ready_at"]),
        startup=None if row["startup_ms"] is None else row["startup_ms"] / 1000,
        reason=_maybe(Reason, row["reason"]),
        timeout=row["timeout"],
        claimed_at=from_text(row["claimed_at"]),
        gone_at=from_text(row["gone_at"]),
        ports=_ports_of(row["ports"]),
    )


def transition_row(transition: Transition) -> Row:
    return {
        "at": to_text(transition.at),
        "kind": transition.kind,
        "subject": transition.subject,
        "environment": transition.environment,
        "before": transition.before,
        "after": transition.after,
        "reason": transition.reason,
    }


def transition_of(row: Row) -> Transition:
    return Transition(
        at=from_text(row["at"]),
        kind=row["kind"],
        subject=row["subject"],
        environment=EnvironmentId(row["environment"]),
        before=row["before"],
        after=row["after"],
        reason=row["reason"],
    )


def _maybe(make: Callable[[Any], R], value: Any) -> R | None:
    return None if value is None else make(value)


def _told(value: str | Untold | None) -> str | None:
    return None if value is UNTOLD else value or ""


def _telling(make: Callable[[str], R], text: str | None) -> R | Untold | None:
    if text is None:
        return UNTOLD
    return make(text) if text else None


def _ports_text(ports: tuple[Port, ...]) -> str:
    return json.dumps([[port.exposed, port.address] for port in ports]) if ports else NO_PORTS


def _ports_of(text: str) -> tuple[Port, ...]:
    return () if text == NO_PORTS else tuple(Port(exposed, address) for exposed, address in json.loads(text))

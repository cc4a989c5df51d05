"""The JSON that Nomad 1.1 keeps and tells: allocations, evaluations, nodes (jobs: nomad_jobs).

Rows are never changed, only replaced. A row is stored as an event tells it: what is empty is absent. Lists tell the
same rows as stubs, which send null instead.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any
from uuid import UUID

Json = dict[str, Any]

SECOND = 1_000_000_000
TERMINAL = ("complete", "failed", "lost")


@dataclass
class Clock:
    """Durations are Nomad's, divided by *speed*; times of day are real, and never the same twice."""

    speed: float = 1.0
    _last: int = 0

    def scaled(self, seconds: float) -> float:
        return seconds / self.speed

    def ns(self) -> int:
        self._last = max(self._last + 1, time.time_ns())
        return self._last


@dataclass
class Ids:
    """Ids as Nomad makes them (not of version 4), the same for the same seed."""

    random: Random = field(default_factory=Random)

    def new(self) -> str:
        return str(UUID(int=self.random.getrandbits(128)))


def rfc3339(ns: int) -> str:
    """As Go writes times: nanoseconds, without trailing zeros."""
    seconds, fraction = divmod(ns, SECOND)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    digits = f"{fraction:09}".rstrip("0")
    return f"{text}.{digits}Z" if digits else f"{text}Z"


def changed(row: Json, **changes: Any) -> Json:
    """*row* with *changes*; None removes a key."""
    merged = {**row, **changes}
    return {key: value for key, value in merged.items() if value is not None or (key in row and key not in changes)}


def filled(defaults: Json, given: Json | None) -> Json:
    """*defaults* with what *given* tells; what Nomad doesn't know is left out."""
    known = given or {}
    return {key: known[key] if known.get(key) is not None else value for key, value in defaults.items()}


RESOURCES: Json = {
    "CPU": 100,
    "Cores": 0,
    "MemoryMB": 300,
    "MemoryMaxMB": 0,
    "DiskMB": 0,
    "IOPS": 0,
    "Networks": None,
    "Devices": None,
}


# -- evaluations ------------------------------------------------------------------------------------------------------


def evaluation(id: str, job: Json | None, job_id: str, by: str, now: int, **more: Any) -> Json:
    return {
        "ID": id,
        "Namespace": "default",
        "Priority": job["Priority"] if job else 50,
        "Type": job["Type"] if job else "batch",
        "TriggeredBy": by,
        "JobID": job_id,
        "Status": "pending",
        "CreateTime": now,
        "ModifyTime": now,
        **more,
    }


def metrics(evaluated: int, available: int, **more: Any) -> Json:
    """What a placement, or its failure, tells about the nodes looked at."""
    return {
        "NodesEvaluated": evaluated,
        "NodesFiltered": 0,
        "NodesAvailable": {"dc1": available},
        "ClassFiltered": None,
        "ConstraintFiltered": None,
        "NodesExhausted": 0,
        "ClassExhausted": None,
        "DimensionExhausted": None,
        "QuotaExhausted": None,
        "ResourcesExhausted": None,
        "Scores": None,
        "ScoreMetaData": None,
        "AllocationTime": 51330,
        "CoalescedFailures": 0,
        **more,
    }


# -- allocations ------------------------------------------------------------------------------------------------------


def allocation(
    id: str, evaluation_id: str, job: Json, group: Json, slot: int, node: Json, ports: list[Json], told: Json, now: int
) -> Json:
    """A new placement: pending, and nothing told by its agent yet."""
    tasks = {task["Name"]: task["Resources"] for task in group["Tasks"]}
    disk = group["EphemeralDisk"]["SizeMB"]
    networks = _placed_networks(group, ports)
    shared = {**RESOURCES, "CPU": 0, "MemoryMB": 0, "DiskMB": disk, "Networks": networks}
    return {
        "ID": id,
        "Namespace": job["Namespace"],
        "EvalID": evaluation_id,
        "Name": f"{job['ID']}.{group['Name']}[{slot}]",
        "NodeID": node["ID"],
        "NodeName": node["Name"],
        "JobID": job["ID"],
        "TaskGroup": group["Name"],
        "Resources": {
            **shared,
            "CPU": sum(task["CPU"] for task in tasks.values()),
            "MemoryMB": sum(task["MemoryMB"] for task in tasks.values()),
            "MemoryMaxMB": sum(task["MemoryMaxMB"] or task["MemoryMB"] for task in tasks.values()),
        },
        "SharedResources": shared,
        "TaskResources": tasks,
        "AllocatedResources": {
            "Tasks": {name: _allocated_task(task) for name, task in tasks.items()},
            "TaskLifecycles": dict.fromkeys(tasks),
            "Shared": {"Networks": networks, "DiskMB": disk, "Ports": ports or None},
        },
        "Metrics": told,
        "DesiredStatus": "run",
        "ClientStatus": "pending",
        "CreateTime": now,
        "ModifyTime": now,
    }


def _allocated_task(task: Json) -> Json:
    return {
        "Cpu": {"CpuShares": task["CPU"], "ReservedCores": None},
        "Memory": {"MemoryMB": task["MemoryMB"], "MemoryMaxMB": task["MemoryMaxMB"]},
        "Networks": None,
        "Devices": None,
    }


def _placed_networks(group: Json, ports: list[Json]) -> list[Json] | None:
    if not group["Networks"]:
        return None
    dynamic = [
        {"Label": port["Label"], "Value": port["Value"], "To": port["To"], "HostNetwork": "default"} for port in ports
    ]
    return [{**group["Networks"][0], "IP": "127.0.0.1", "DynamicPorts": dynamic or None}]


def slot_of(row: Json) -> int:
    return int(row["Name"].rpartition("[")[2].rstrip("]"))


def allocation_stub(row: Json, job: Json, *, resources: bool, task_states: bool) -> Json:
    kept = ("ID", "EvalID", "Name", "Namespace", "NodeID", "NodeName", "JobID", "TaskGroup", "DesiredStatus")
    indexes = ("ClientStatus", "CreateIndex", "ModifyIndex", "CreateTime", "ModifyTime")
    words = ("DesiredDescription", "ClientDescription", "FollowupEvalID")
    nulls = {"Migrate": None, "Reschedule": None, "ForceReschedule": None}
    return {
        **{key: row[key] for key in kept + indexes},
        **{key: row.get(key, "") for key in words},
        "JobType": job["Type"],
        "JobVersion": job["Version"],
        "AllocatedResources": row["AllocatedResources"] if resources else None,
        "DesiredTransition": row.get("DesiredTransition", nulls),
        "TaskStates": row.get("TaskStates") if task_states else None,
        "DeploymentStatus": row.get("DeploymentStatus"),
        "RescheduleTracker": row.get("RescheduleTracker"),
        "PreemptedAllocations": None,
        "PreemptedByAllocation": "",
    }


def network_status(group: Json, number: int) -> Json:
    if not group.get("Networks"):
        return {"InterfaceName": "", "Address": "", "DNS": None}
    dns: Json = {"Servers": [], "Searches": [], "Options": []}
    return {"InterfaceName": "eth0", "Address": f"172.26.{number // 250}.{number % 250 + 2}", "DNS": dns}


def task_event(kind: str, now: int, **more: Any) -> Json:
    """One entry of a task's history, by the names that Nomad gives its kinds."""
    texts = ("RestartReason", "SetupError", "DriverError", "KillError", "KillReason", "DownloadError")
    more_texts = ("ValidationError", "FailedSibling", "VaultError", "TaskSignalReason", "TaskSignal", "DriverMessage")
    numbers = ("ExitCode", "Signal", "KillTimeout", "StartDelay", "DiskLimit")
    return {
        "Type": kind,
        "Time": now,
        "Message": "",
        "DisplayMessage": "",
        "Details": {},
        "FailsTask": False,
        **dict.fromkeys((*texts, *more_texts, "GenericSource"), ""),
        **dict.fromkeys(numbers, 0),
        **more,
    }


def task_state(state: str = "pending", **more: Any) -> Json:
    return {
        "State": state,
        "Failed": False,
        "Restarts": 0,
        "LastRestart": None,
        "StartedAt": None,
        "FinishedAt": None,
        "Events": [],
        "TaskHandle": None,
        **more,
    }


# -- nodes ------------------------------------------------------------------------------------------------------------


def node_row(id: str, number: int, address: str, cpu: int, memory: int, drivers: Iterable[str], now: int) -> Json:
    network = {
        "Mode": "host",
        "Device": "lo",
        "CIDR": "127.0.0.1/32",
        "IP": "127.0.0.1",
        "MBits": 1000,
        "DNS": None,
        "ReservedPorts": None,
        "DynamicPorts": None,
    }
    ipv4 = {"Family": "ipv4", "Alias": "default", "Address": "127.0.0.1", "ReservedPorts": "", "Gateway": ""}
    lo = {"Mode": "host", "Device": "lo", "MacAddress": "", "Speed": 1000, "Addresses": [ipv4]}
    return {
        "ID": id,
        "Name": f"nomad-agent-{number}",
        "Attributes": {
            "kernel.name": "linux",
            "cpu.arch": "amd64",
            "nomad.version": "1.1.0",
            "os.signals": "SIGHUP,SIGINT,SIGQUIT,SIGKILL,SIGTERM,SIGUSR1,SIGUSR2",
        },
        "CSIControllerPlugins": None,
        "CSINodePlugins": None,
        "ComputedClass": f"v1:{number}",
        "Datacenter": "dc1",
        "Drain": False,
        "DrainStrategy": None,
        "Drivers": {driver: driver_health(driver, now, healthy=True) for driver in drivers},
        "Events": [node_event("Node registered", now)],
        "HTTPAddr": address,
        "HostVolumes": None,
        "LastDrain": None,
        "Links": None,
        "Meta": {"rank": str(number)},
        "NodeClass": "",
        "NodeResources": {
            "Cpu": {"CpuShares": cpu, "TotalCpuCores": 2, "ReservableCpuCores": [0, 1]},
            "Memory": {"MemoryMB": memory},
            "Disk": {"DiskMB": 78764},
            "Networks": [network],
            "NodeNetworks": [lo],
            "Devices": None,
        },
        "Reserved": {**RESOURCES, "CPU": 0, "MemoryMB": 0},
        "ReservedResources": {
            "Cpu": {"CpuShares": 0, "ReservedCpuCores": None},
            "Memory": {"MemoryMB": 0},
            "Disk": {"DiskMB": 0},
            "Networks": {"ReservedHostPorts": ""},
        },
        "Resources": {**RESOURCES, "CPU": cpu, "MemoryMB": memory, "DiskMB": 78764, "Networks": [network]},
        "SchedulingEligibility": "eligible",
        "SecretID": "",
        "Status": "ready",
        "StatusDescription": "",
        "StatusUpdatedAt": now // SECOND,
        "TLSEnabled": False,
    }


def driver_health(driver: str, now: int, *, healthy: bool) -> Json:
    return {
        "Attributes": {f"driver.{driver}": "true"} if healthy else None,
        "Detected": True,
        "Healthy": healthy,
        "HealthDescription": "Healthy" if healthy else f"Failed to connect to {driver} daemon",
        "UpdateTime": rfc3339(now),
    }


def node_event(message: str, now: int, subsystem: str = "Cluster", details: Json | None = None) -> Json:
    return {
        "Message": message,
        "Subsystem": subsystem,
        "Details": details,
        "Timestamp": rfc3339(now),
        "CreateIndex": 0,
    }


def node_stub(node: Json) -> Json:
    kept = ("ID", "Datacenter", "Name", "NodeClass", "Drain", "SchedulingEligibility", "Status", "StatusDescription")
    more = ("Drivers", "HostVolumes", "LastDrain", "CreateIndex", "ModifyIndex")
    told = {key: node[key] for key in kept + more}
    return {**told, "Address": "127.0.0.1", "Version": "1.1.0", "NodeResources": None, "ReservedResources": None}

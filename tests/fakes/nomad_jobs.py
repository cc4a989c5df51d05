"""Jobs as Nomad 1.1 keeps them: defaults, checks, and what a change of one means."""

import re
from collections.abc import Iterable

from tests.fakes.nomad_shapes import RESOURCES, SECOND, Json, filled

POLICIES: dict[str, tuple[Json, Json]] = {
    "batch": (
        {"Attempts": 3, "Interval": 86400 * SECOND, "Delay": 15 * SECOND, "Mode": "fail"},
        {
            "Attempts": 1,
            "Interval": 86400 * SECOND,
            "Delay": 5 * SECOND,
            "DelayFunction": "constant",
            "MaxDelay": 0,
            "Unlimited": False,
        },
    ),
    "service": (
        {"Attempts": 2, "Interval": 1800 * SECOND, "Delay": 15 * SECOND, "Mode": "fail"},
        {
            "Attempts": 0,
            "Interval": 0,
            "Delay": 30 * SECOND,
            "DelayFunction": "exponential",
            "MaxDelay": 3600 * SECOND,
            "Unlimited": True,
        },
    ),
}


def canonical_job(given: Json) -> Json:
    """A job as Nomad stores it, with its defaults."""
    kind = given.get("Type") or "service"
    job = filled(
        {
            "Stop": False,
            "Region": "global",
            "Namespace": "default",
            "ID": "",
            "ParentID": "",
            "Name": given.get("ID") or "",
            "Type": "service",
            "Priority": 50,
            "AllAtOnce": False,
            "Datacenters": ["dc1"],
            "Constraints": None,
            "Affinities": None,
            "Spreads": None,
            "TaskGroups": None,
            "Update": {
                "Stagger": 0,
                "MaxParallel": 0,
                "HealthCheck": "",
                "MinHealthyTime": 0,
                "HealthyDeadline": 0,
                "ProgressDeadline": 0,
                "AutoRevert": False,
                "AutoPromote": False,
                "Canary": 0,
            },
            "Multiregion": None,
            "Periodic": None,
            "ParameterizedJob": None,
            "Dispatched": False,
            "Payload": None,
            "Meta": None,
            "ConsulToken": "",
            "ConsulNamespace": "",
            "VaultToken": "",
            "VaultNamespace": "",
            "NomadTokenID": "",
        },
        given,
    )
    groups = [_canonical_group(group, kind) for group in given.get("TaskGroups") or []]
    job["Constraints"] = job["Constraints"] or None
    return {**job, "TaskGroups": groups, "Status": "", "StatusDescription": "", "Stable": False, "Version": 0}


def _canonical_group(given: Json, kind: str) -> Json:
    restart, reschedule = POLICIES.get(kind, POLICIES["service"])
    group = filled(
        {
            "Name": "",
            "Count": 1,
            "Update": None,
            "Migrate": None,
            "Constraints": None,
            "Scaling": None,
            "RestartPolicy": restart,
            "Tasks": [],
            "EphemeralDisk": {"Sticky": False, "SizeMB": 300, "Migrate": False},
            "Meta": None,
            "ReschedulePolicy": reschedule,
            "Affinities": None,
            "Spreads": None,
            "Networks": None,
            "Consul": {"Namespace": ""},
            "Services": None,
            "Volumes": None,
            "ShutdownDelay": None,
            "StopAfterClientDisconnect": None,
        },
        given,
    )
    restart = filled(restart, given.get("RestartPolicy"))
    return {
        **group,
        "Constraints": [*(group["Constraints"] or []), *_implied(group)] or None,
        "RestartPolicy": restart,
        "ReschedulePolicy": filled(reschedule, given.get("ReschedulePolicy")),
        "EphemeralDisk": filled({"Sticky": False, "SizeMB": 300, "Migrate": False}, given.get("EphemeralDisk")),
        "Networks": [_canonical_network(network) for network in given.get("Networks") or []] or None,
        "Tasks": [_canonical_task(task, restart) for task in given.get("Tasks") or []],
    }


def _implied(group: Json) -> list[Json]:
    """A task with a signal to kill it by can only run where that is known."""
    signals = {task.get("KillSignal") for task in group["Tasks"]} - {"", None}
    wanted = [{"LTarget": "${attr.os.signals}", "RTarget": name, "Operand": "set_contains"} for name in sorted(signals)]
    return [constraint for constraint in wanted if constraint not in (group["Constraints"] or [])]


def _canonical_network(given: Json) -> Json:
    network = filled(
        {
            "Mode": "host",
            "Device": "",
            "CIDR": "",
            "IP": "",
            "MBits": 0,
            "DNS": None,
            "ReservedPorts": None,
            "DynamicPorts": None,
        },
        given,
    )
    port = {"Label": "", "Value": 0, "To": 0, "HostNetwork": "default"}
    return {**network, "DynamicPorts": [filled(port, known) for known in given.get("DynamicPorts") or []] or None}


def _canonical_task(given: Json, restart: Json) -> Json:
    task = filled(
        {
            "Name": "",
            "Driver": "",
            "User": "",
            "Config": None,
            "Env": None,
            "Services": None,
            "Vault": None,
            "Templates": None,
            "Constraints": None,
            "Affinities": None,
            "Resources": None,
            "RestartPolicy": restart,
            "DispatchPayload": None,
            "Lifecycle": None,
            "Meta": None,
            "KillTimeout": 5 * SECOND,
            "LogConfig": None,
            "Artifacts": None,
            "Leader": False,
            "ShutdownDelay": 0,
            "VolumeMounts": None,
            "ScalingPolicies": None,
            "KillSignal": "",
            "Kind": "",
            "CSIPluginConfig": None,
        },
        given,
    )
    return {
        **task,
        "Resources": filled(RESOURCES, given.get("Resources")),
        "LogConfig": filled({"MaxFiles": 10, "MaxFileSizeMB": 10}, given.get("LogConfig")),
        "RestartPolicy": filled(restart, given.get("RestartPolicy")),
        "KillTimeout": given.get("KillTimeout") or 5 * SECOND,
    }


def job_faults(job: Json) -> str:
    """Why Nomad refuses *job*, in its words; "" if it doesn't."""
    own = _own_faults(job)
    if own:
        return _errors(own)
    found = [fault for group in job["TaskGroups"] for fault in _group_faults(group)]
    return _errors(found) if found else ""


def _own_faults(job: Json) -> list[str]:
    faults = []
    if not job["ID"]:
        faults.append("Missing job ID")
    if " " in job["ID"]:
        faults.append("Job ID contains a space")
    if job["Type"] not in ("batch", "service", "system"):
        faults.append(f'Invalid job type: "{job["Type"]}"')
    elif not job["TaskGroups"]:
        faults.append("Missing job task groups")
    return faults


def _group_faults(group: Json) -> list[str]:
    policy = group["ReschedulePolicy"]
    faults = [fault for task in group["Tasks"] for fault in _task_faults(task)]
    if policy["Unlimited"] and policy["Attempts"]:
        times = f"Attempts = {policy['Attempts']}, Interval = {duration(policy['Interval'])}"
        ambiguous = f"Reschedule Policy with {times}, and Unlimited = true is ambiguous"
        faults.append(_errors([ambiguous, "If Attempts >0, Unlimited cannot also be set to true"]))
    return [f"Task group {group['Name']} validation failed: {_errors(faults)}"] if faults else []


def _task_faults(task: Json) -> list[str]:
    memory, most, cpu = (task["Resources"][key] for key in ("MemoryMB", "MemoryMaxMB", "CPU"))
    if memory < 10:
        fault = _errors([_errors([f"minimum MemoryMB value is 10; got {memory}"])])
    elif cpu < 1:
        fault = _errors([_errors([f"minimum CPU value is 1; got {cpu}"])])
    elif most and most < memory:
        fault = _errors([f"MemoryMaxMB value ({most}) should be larger than MemoryMB value ({memory})"])
    else:
        return []
    return [f"Task {task['Name']} validation failed: {_errors([fault])}"]


def _errors(faults: list[str]) -> str:
    head = "1 error occurred:" if len(faults) == 1 else f"{len(faults)} errors occurred:"
    return head + "".join(f"\n\t* {fault}" for fault in faults) + "\n\n"


def same_job(known: Json, given: Json) -> bool:
    """Registering *given* would change nothing."""
    volatile = ("Status", "StatusDescription", "Stable", "Version", "SubmitTime", "CreateIndex", "ModifyIndex")
    ignored = {*volatile, "JobModifyIndex"}
    return {key: known.get(key) for key in known if key not in ignored} == {
        key: given.get(key) for key in given if key not in ignored
    }


def destructive(known: Json, given: Json, group: str) -> bool:
    """A change of the job's meta, or of anything in the group, replaces the group's allocations."""
    return known["Meta"] != given["Meta"] or group_of(known, group) != group_of(given, group)


def group_of(job: Json, name: str) -> Json:
    return next((group for group in job["TaskGroups"] if group["Name"] == name), {})


def job_stub(job: Json, summary: Json) -> Json:
    kept = ("ID", "ParentID", "Name", "Namespace", "Datacenters", "Multiregion", "Type", "Priority", "Stop", "Status")
    indexes = ("StatusDescription", "CreateIndex", "ModifyIndex", "JobModifyIndex", "SubmitTime")
    told = {key: job[key] for key in kept + indexes}
    return {**told, "Periodic": False, "ParameterizedJob": False, "JobSummary": summary}


def job_summary(job: Json, allocations: Iterable[Json], queued: Json, index: int) -> Json:
    words = {"complete": "Complete", "failed": "Failed", "running": "Running", "pending": "Starting", "lost": "Lost"}
    groups: Json = {}
    for group in job["TaskGroups"]:
        counts = dict.fromkeys(("Queued", "Complete", "Failed", "Running", "Starting", "Lost"), 0)
        groups[group["Name"]] = {**counts, "Queued": queued.get(group["Name"], 0)}
    for allocation in allocations:
        if allocation["TaskGroup"] in groups:
            groups[allocation["TaskGroup"]][words[allocation["ClientStatus"]]] += 1
    return {
        "JobID": job["ID"],
        "Namespace": job["Namespace"],
        "Summary": groups,
        "Children": {"Pending": 0, "Running": 0, "Dead": 0},
        "CreateIndex": job["CreateIndex"],
        "ModifyIndex": index,
    }


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND}


def nanoseconds(text: str) -> int:
    """A duration as Go writes it ("1h30m")."""
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        raise ValueError(text)
    return int(sum(float(number) * _UNITS[unit] for number, unit in parts))


def duration(ns: int) -> str:
    """As Go would print it."""
    seconds = ns / SECOND
    if seconds < 1:
        return f"{ns}ns" if ns < 1_000_000 else f"{ns / 1_000_000:.9g}ms"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    head = f"{hours:.0f}h{minutes:.0f}m" if hours else f"{minutes:.0f}m" if minutes else ""
    return f"{head}{rest:.9g}s"

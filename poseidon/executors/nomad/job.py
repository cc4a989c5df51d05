"""Job specifications, as the original registers them: a running cluster can be taken over, and handed back. Pure.

A job has two groups: one that runs, and one of count 0 whose meta can be changed without touching what runs.
"""

import json
import re
from copy import deepcopy
from typing import Any

from poseidon.core.model import Environment, EnvironmentId, JobId
from poseidon.errors import ConfigError, Unsupported
from poseidon.executors.nomad.settings import NomadSettings

Json = dict[str, Any]

NAME = "nomad"
MINUTE, HOUR = 60 * 10**9, 3600 * 10**9
LEAST_MEMORY_MB = 10
"""Nomad takes no less."""
LEAST_CPU = 2
"""Nomad takes less, but runc doesn't: the container never starts, and no event says why."""
LARGEST = 2**31 - 1
IMAGES = ("docker", "podman")
"""Drivers that run images, with the same names for what is set here."""
USED, TIMEOUT, POOL_SIZE, IMAGE = "used", "timeout", "prewarmingPoolSize", "image"

_template_name = re.compile(r"template-(0|[1-9][0-9]{0,18})")


def built_in(settings: NomadSettings) -> Json:
    """What is run if no template job file is given."""
    logs = {"MaxFiles": 1, "MaxFileSizeMB": 1}
    runs = {
        "Name": settings.group,
        "EphemeralDisk": {"SizeMB": 10, "Migrate": False, "Sticky": False},
        "Spreads": [{"Attribute": "${node.unique.name}", "Weight": 100}],
        "RestartPolicy": {"Attempts": 3, "Delay": 15 * 10**9, "Interval": HOUR, "Mode": "fail"},
        "ReschedulePolicy": {
            "Attempts": 3,
            "Interval": 6 * HOUR,
            "Delay": MINUTE,
            "MaxDelay": 4 * MINUTE,
            "DelayFunction": "exponential",
            "Unlimited": False,
        },
        "Tasks": [
            {
                "Name": settings.task,
                "Driver": "docker",
                "KillTimeout": 0,
                "KillSignal": "SIGKILL",
                "Config": {},
                "LogConfig": logs,
                "Resources": {"CPU": 40, "MemoryMB": 50},
            }
        ],
    }
    return completed({"Type": "batch", "Datacenters": ["dc1"], "TaskGroups": [runs]}, settings)


def read_json(text: str, file: str) -> Json | None:
    """The job of a template file in JSON; None if it is HCL. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    job = found.get("Job", found)
    if not isinstance(job, dict) or not isinstance(job.get("TaskGroups", []), list):
        raise ConfigError(f"{file}: expected a job with TaskGroups")
    return job


def completed(template: Json, settings: NomadSettings) -> Json:
    """*template* with the groups, tasks and commands that there must be."""
    job = deepcopy(template)
    groups: list[Json] = job.setdefault("TaskGroups", [])
    runs = _named(groups, settings.group)
    runs["Count"] = 1
    task = _named(_list(runs, "Tasks"), settings.task)
    config = _dict(task, "Config")
    if not config.get("command"):
        config.update(command="sleep", args=["infinity"])
    keeps = _named(groups, settings.config_group)
    keeps["Count"] = 0
    _complete_config_task(_named(_list(keeps, "Tasks"), settings.config_group))
    _dict(keeps, "Meta")
    for group in groups:
        _settle_rescheduling(group)
    return job


def _complete_config_task(task: Json) -> None:
    """It never runs, but must be valid."""
    task["Driver"] = task.get("Driver") or "exec"
    _dict(task, "Config").setdefault("command", "true")
    if not task.get("Resources"):
        task["Resources"] = {"CPU": 1, "MemoryMB": LEAST_MEMORY_MB}
    if not task.get("LogConfig"):
        task["LogConfig"] = {"MaxFiles": 1, "MaxFileSizeMB": 1}


def _settle_rescheduling(group: Json) -> None:
    """Nomad's own parser leaves the attempts of an unlimited policy open, and its registration refuses that."""
    policy = group.get("ReschedulePolicy")
    if policy and policy.get("Unlimited") and policy.get("Attempts") is None:
        policy["Attempts"] = 0


def task_of(base: Json, settings: NomadSettings) -> Json:
    """The task of runners; empty if the template lacks it."""
    return _find(_find(base.get("TaskGroups"), settings.group).get("Tasks"), settings.task)


def template_of(base: Json, environment: Environment, settings: NomadSettings) -> Json:
    """The job that keeps *environment* in Nomad. It runs too, as the original takes it back only then."""
    job = _job_of(base, template_name(environment.id), environment, settings, force_pull=True)
    _config_meta(job, settings)[POOL_SIZE] = str(environment.pool_size)
    return job


def runner_of(base: Json, job_id: JobId, environment: Environment, settings: NomadSettings, *, pull: bool) -> Json:
    """The job of a runner. *pull* its image even if the node has it."""
    job = _job_of(base, job_id, environment, settings, force_pull=pull)
    _config_meta(job, settings).pop(POOL_SIZE, None)
    return job


def _job_of(base: Json, name: str, environment: Environment, settings: NomadSettings, *, force_pull: bool) -> Json:
    job = completed(base, settings)
    job.update(ID=name, Name=name, Namespace=settings.namespace)
    if settings.region:
        job["Region"] = settings.region
    group = _named(job["TaskGroups"], settings.group)
    task = _named(group["Tasks"], settings.task)
    _set_limits(task, environment)
    group["Networks"] = [_network(group, environment, settings)] if environment.network_access else []
    meta = _config_meta(job, settings)
    meta.clear()
    meta[USED] = "false"
    if task.get("Driver") in IMAGES:
        _set_image(task["Config"], environment, force_pull=force_pull and not settings.disable_force_pull)
    else:
        meta[IMAGE] = environment.image
    return job


def _set_image(config: Json, environment: Environment, *, force_pull: bool) -> None:
    config["image"] = environment.image
    config["force_pull"] = force_pull
    config["network_mode"] = "" if environment.network_access else "none"


def _set_limits(task: Json, environment: Environment) -> None:
    """The memory limit is a ceiling; what is reserved is as the template says, but never above it."""
    resources = _dict(task, "Resources")
    if environment.cpu_limit:
        resources["CPU"] = max(LEAST_CPU, environment.cpu_limit)
    if environment.memory_limit:
        reserved = resources.get("MemoryMB") or environment.memory_limit
        resources["MemoryMB"] = min(reserved, environment.memory_limit)
        resources["MemoryMaxMB"] = environment.memory_limit
    else:
        resources.pop("MemoryMaxMB", None)


def _network(group: Json, environment: Environment, settings: NomadSettings) -> Json:
    """A network in the template may say more, such as its DNS servers."""
    network: Json = dict((group.get("Networks") or [{}])[0])
    ports = [{"Label": str(port), "To": port} for port in dict.fromkeys(environment.exposed_ports)]
    return {**network, "Mode": settings.network_mode, "DynamicPorts": ports}


def check(environment: Environment) -> None:
    """Raise Unsupported for limits that Nomad would refuse, or silently never run."""
    if not 0 <= environment.cpu_limit <= LARGEST:
        raise Unsupported(f"cpuLimit must be at least 1 and at most {LARGEST}, not {environment.cpu_limit}")
    if environment.memory_limit and not LEAST_MEMORY_MB <= environment.memory_limit <= LARGEST:
        raise Unsupported(
            f"memoryLimit must be 0 or from {LEAST_MEMORY_MB} to {LARGEST} MB, not {environment.memory_limit}"
        )
    for port in environment.exposed_ports:
        if not 1 <= port <= 65535:
            raise Unsupported(f"exposedPorts must be from 1 to 65535, not {port}")


def template_name(environment: EnvironmentId) -> str:
    """Of the job that keeps an environment."""
    return f"template-{environment}"


def template_id(name: str) -> EnvironmentId | None:
    """The environment of a template's name; None for any other name."""
    found = _template_name.fullmatch(name)
    number = int(found[1]) if found else 2**63
    return EnvironmentId(number) if number < 2**63 else None


def environment_of_template(job: Json, settings: NomadSettings) -> Environment | None:
    """What a template says; None if it isn't one, or lacks what there must be."""
    known = template_id(str(job.get("ID", "")))
    group = _find(job.get("TaskGroups"), settings.group)
    task = _find(group.get("Tasks"), settings.task)
    config, resources = task.get("Config") or {}, task.get("Resources") or {}
    meta = _find(job.get("TaskGroups"), settings.config_group).get("Meta") or {}
    image = config.get("image") or meta.get(IMAGE)
    if known is None or not task or not isinstance(image, str):
        return None
    networks = group.get("Networks") or []
    isolated = config.get("network_mode") == "none" if task.get("Driver") in IMAGES else not networks
    size = str(meta.get(POOL_SIZE, "0"))
    return Environment(
        known,
        image,
        pool_size=count_of(size) or 0,
        cpu_limit=int(resources.get("CPU") or 0),
        memory_limit=int(resources.get("MemoryMaxMB") or 0),
        network_access=not isolated,
        exposed_ports=() if isolated else _exposed_ports(networks),
        executor=NAME,
    )


def count_of(text: str) -> int | None:
    """The number that a meta value is; None for anything else, and for what is beyond all reason: operators can write
    what they like there."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else LARGEST + 1
    return number if number <= LARGEST else None


def _exposed_ports(networks: list[Json]) -> tuple[int, ...]:
    ports = (networks[0].get("DynamicPorts") or []) if networks else []
    return tuple(int(port["To"]) for port in ports if port.get("To"))


def marked(job: Json, settings: NomadSettings, *, used: bool, timeout: int) -> Json | None:
    """*job* with its mark changed; None if there is nothing to change, or no place for it."""
    group = _find(job.get("TaskGroups"), settings.config_group)
    if not group:
        return None
    wanted = {USED: "true", TIMEOUT: str(timeout)} if used else {USED: "false"}
    meta = group.get("Meta") or {}
    if all(meta.get(key) == value for key, value in wanted.items()):
        return None
    changed = deepcopy(job)
    _find(changed["TaskGroups"], settings.config_group)["Meta"] = {**meta, **wanted}
    return changed


def _config_meta(job: Json, settings: NomadSettings) -> Json:
    return _dict(_named(job["TaskGroups"], settings.config_group), "Meta")


def _find(items: Any, name: str) -> Json:
    return next((item for item in items or () if item.get("Name") == name), {})


def _named(items: list[Json], name: str) -> Json:
    found = _find(items, name)
    if not found:
        found["Name"] = name
        items.append(found)
    return found


def _list(owner: Json, key: str) -> list[Json]:
    if owner.get(key) is None:
        owner[key] = []
    found: list[Json] = owner[key]
    return found


def _dict(owner: Json, key: str) -> Json:
    if owner.get(key) is None:
        owner[key] = {}
    found: Json = owner[key]
    return found

"""A small part of HCL, enough for job files: blocks with labels, attributes, strings, numbers, lists and maps.

`parse_job` turns one into what Nomad's /v1/jobs/parse answers. Expressions and functions aren't known.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fakes.nomad_jobs import nanoseconds
from tests.fakes.nomad_shapes import Json

TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*|//[^\n]*|/\*.*?\*/)|(?P<line>\n)|(?P<heredoc><<-?(?P<tag>\w+)\n.*?\n\s*(?P=tag)\b)
    |(?P<text>"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?)|(?P<word>[A-Za-z_][\w.-]*)|(?P<sign>[{}\[\]=,:()])""",
    re.VERBOSE | re.DOTALL,
)


class HclError(Exception):
    """The text isn't what we understand; the message is as Nomad would word it."""


@dataclass
class Block:
    """One block: its kind, its labels and what stands in it."""

    kind: str
    labels: list[str] = field(default_factory=list)
    values: Json = field(default_factory=dict)
    blocks: list["Block"] = field(default_factory=list)

    def all(self, kind: str) -> list["Block"]:
        return [block for block in self.blocks if block.kind == kind]

    def one(self, kind: str) -> "Block | None":
        return next(iter(self.all(kind)), None)

    def map(self, kind: str) -> Json | None:
        """A map, written as a block or as an attribute, with blocks in it as maps."""
        block = self.one(kind)
        found: Json | None = self.values.get(kind) if block is None else block.plain()
        return found

    def plain(self) -> Json:
        return {**self.values, **{block.kind: block.plain() for block in self.blocks}}


@dataclass
class Reader:
    tokens: list[tuple[str, str, int]]
    at: int = 0

    def peek(self) -> tuple[str, str]:
        kind, text, _ = self.tokens[self.at] if self.at < len(self.tokens) else ("end", "", 0)
        return kind, text

    def take(self, *expected: str) -> str:
        kind, text = self.peek()
        if expected and text not in expected and kind not in expected:
            raise HclError(f"input.hcl:{self.line()},1-2: Invalid expression; Expected {' or '.join(expected)}.")
        self.at += 1
        return text

    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)][2] if self.tokens else 1

    def skip_lines(self) -> None:
        while self.peek()[0] == "line":
            self.at += 1

    def body(self, block: Block, end: str) -> Block:
        self.skip_lines()
        while self.peek() != (("end", "") if end == "end" else ("sign", end)):
            self._entry(block)
            self.skip_lines()
        self.take()
        return block

    def _entry(self, block: Block) -> None:
        name = _unquoted(self.take("word", "text"))
        labels = []
        while self.peek()[0] in ("text", "word"):
            labels.append(_unquoted(self.take()))
        if not labels and self.peek()[1] in ("=", ":"):
            self.take()
            block.values[name] = self.value()
        else:
            self.take("{")
            block.blocks.append(self.body(Block(name, labels), "}"))

    def value(self) -> Any:
        kind, text = self.peek()
        self.at += 1
        if kind == "text":
            return _unquoted(text)
        if kind == "heredoc":
            return text.split("\n", 1)[1].rsplit("\n", 1)[0] + "\n"
        if kind == "number":
            return float(text) if "." in text else int(text)
        if text in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[text]
        if text == "[":
            return list(self._items())
        if text == "{":
            return self._map()
        raise HclError(f"input.hcl:{self.line()},1-2: Unsupported expression; {text!r} isn't known here.")

    def _items(self) -> Iterator[Any]:
        self.skip_lines()
        while self.peek()[1] != "]":
            yield self.value()
            self.skip_lines()
            if self.peek()[1] == ",":
                self.take()
            self.skip_lines()
        self.take()

    def _map(self) -> Json:
        found: Json = {}
        self.skip_lines()
        while self.peek()[1] != "}":
            name = _unquoted(self.take("word", "text"))
            self.take("=", ":")
            found[name] = self.value()
            if self.peek()[1] == ",":
                self.take()
            self.skip_lines()
        self.take()
        return found


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    unquoted: str = json.loads(text.replace("\n", "\\n"))
    return unquoted


def parse(text: str) -> Block:
    """The whole of *text* as one block without a kind."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise HclError(f"input.hcl:{line},1-2: Invalid character; This character is not used within the language.")
        kind = match.lastgroup if match.lastgroup != "tag" else "heredoc"
        if kind != "space":
            tokens.append((str(kind), match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    return Reader(tokens).body(Block(""), "end")


# -- a job ------------------------------------------------------------------------------------------------------------

JOB: Final = ("datacenters", "type", "region", "namespace", "priority", "all_at_once", "id", "name", "meta")
GROUP: Final = ("count", "shutdown_delay", "stop_after_client_disconnect", "meta")
TASK: Final = (
    "driver",
    "user",
    "kill_timeout",
    "kill_signal",
    "leader",
    "shutdown_delay",
    "kind",
    "config",
    "env",
    "meta",
)
NULL_JOB: Final = (
    "Affinities AllAtOnce Constraints ConsulNamespace ConsulToken CreateIndex JobModifyIndex Meta Migrate ModifyIndex "
    "Multiregion Namespace NomadTokenID ParameterizedJob ParentID Payload Periodic Priority Region Reschedule Spreads "
    "Stable Status StatusDescription Stop SubmitTime Type Update VaultNamespace VaultToken Version Datacenters"
)
NULL_GROUP: Final = (
    "Affinities Constraints Consul Count EphemeralDisk Meta Migrate Networks ReschedulePolicy RestartPolicy Scaling "
    "Services ShutdownDelay Spreads StopAfterClientDisconnect Update Volumes"
)
NULL_TASK: Final = (
    "Affinities Artifacts Config Constraints DispatchPayload Env KillTimeout Lifecycle LogConfig Meta Resources "
    "RestartPolicy ScalingPolicies Services Templates Vault VolumeMounts"
)
NULL_RESOURCES: Final = ("CPU", "Cores", "Devices", "DiskMB", "IOPS", "MemoryMB", "MemoryMaxMB", "Networks")


def parse_job(text: str) -> Json:
    """The job in *text* (HCL, or JSON), as the API tells it: null where nothing is set."""
    if not text.strip():
        raise HclError("Job spec is empty")
    if text.lstrip().startswith("{"):
        given: Json = json.loads(text)
        return dict(given.get("Job", given))
    block = parse(text).one("job")
    if block is None:
        raise HclError("input.hcl:1,1-2: Missing job block; A job block is required.")
    _refuse_unknown(block, JOB, ("group", "constraint", "spread", "update", "meta", "reschedule", "restart"))
    values = block.values
    return {
        **dict.fromkeys(NULL_JOB.split()),
        "ID": values.get("id", block.labels[0]),
        "Name": values.get("name", block.labels[0]),
        "Dispatched": False,
        "Datacenters": values.get("datacenters"),
        "Type": values.get("type"),
        "Region": values.get("region"),
        "Namespace": values.get("namespace"),
        "Priority": values.get("priority"),
        "Meta": _texts(block.map("meta")),
        "Constraints": _constraints(block),
        "Spreads": _spreads(block),
        "TaskGroups": [_group(group) for group in block.all("group")],
    }


def _group(block: Block) -> Json:
    known = ("task", "restart", "reschedule", "ephemeral_disk", "network", "constraint", "spread", "meta", "update")
    _refuse_unknown(block, GROUP, (*known, "migrate", "service", "volume", "consul"))
    disk = block.one("ephemeral_disk")
    return {
        **dict.fromkeys(NULL_GROUP.split()),
        "Name": block.labels[0],
        "Count": block.values.get("count"),
        "Meta": _texts(block.map("meta")),
        "Constraints": _constraints(block),
        "Spreads": _spreads(block),
        "EphemeralDisk": _named(disk, {"migrate": "Migrate", "size": "SizeMB", "sticky": "Sticky"}),
        "RestartPolicy": _policy(block.one("restart"), ("Attempts", "Delay", "Interval", "Mode")),
        "ReschedulePolicy": _policy(
            block.one("reschedule"), ("Attempts", "Delay", "DelayFunction", "Interval", "MaxDelay", "Unlimited")
        ),
        "Networks": [_network(network) for network in block.all("network")] or None,
        "Tasks": [_task(task) for task in block.all("task")],
    }


def _task(block: Block) -> Json:
    _refuse_unknown(block, TASK, ("config", "resources", "logs", "env", "meta", "constraint", "restart", "template"))
    values = block.values
    logs = {"max_file_size": "MaxFileSizeMB", "max_files": "MaxFiles"}
    return {
        **dict.fromkeys(NULL_TASK.split()),
        "Name": block.labels[0],
        "Driver": values.get("driver", ""),
        "User": values.get("user", ""),
        "Kind": values.get("kind", ""),
        "Leader": values.get("leader", False),
        "KillSignal": values.get("kill_signal", ""),
        "KillTimeout": _time(values.get("kill_timeout")),
        "ShutdownDelay": _time(values.get("shutdown_delay", "0s")),
        "Config": block.map("config"),
        "Env": _texts(block.map("env")),
        "Meta": _texts(block.map("meta")),
        "Constraints": _constraints(block),
        "LogConfig": _named(block.one("logs"), logs),
        "Resources": _resources(block.one("resources")),
        "RestartPolicy": _policy(block.one("restart"), ("Attempts", "Delay", "Interval", "Mode")),
    }


def _resources(block: Block | None) -> Json | None:
    if block is None:
        return None
    names = {"CPU": "cpu", "Cores": "cores", "MemoryMB": "memory", "MemoryMaxMB": "memory_max"}
    return {**dict.fromkeys(NULL_RESOURCES), **{name: block.values.get(key) for name, key in names.items()}}


def _network(block: Block) -> Json:
    ports = block.all("port")
    dynamic = [_port(port) for port in ports if "static" not in port.values]
    static = [{**_port(port), "Value": port.values["static"]} for port in ports if "static" in port.values]
    return {
        "Mode": block.values.get("mode", ""),
        "Device": "",
        "CIDR": "",
        "IP": "",
        "MBits": None,
        "DNS": None,
        "ReservedPorts": static or None,
        "DynamicPorts": dynamic or None,
    }


def _port(block: Block) -> Json:
    network = block.values.get("host_network", "")
    return {"Label": block.labels[0], "Value": 0, "To": block.values.get("to", 0), "HostNetwork": network}


def _constraints(block: Block) -> list[Json] | None:
    found = [
        {
            "LTarget": one.values.get("attribute", ""),
            "Operand": one.values.get("operator", "="),
            "RTarget": str(one.values.get("value", "")),
        }
        for one in block.all("constraint")
    ]
    return found or None


def _spreads(block: Block) -> list[Json] | None:
    found = [
        {"Attribute": one.values.get("attribute", ""), "SpreadTarget": None, "Weight": one.values.get("weight")}
        for one in block.all("spread")
    ]
    return found or None


def _policy(block: Block | None, names: tuple[str, ...]) -> Json | None:
    if block is None:
        return None
    given = {key.replace("_", ""): value for key, value in block.values.items()}
    found = {name: given.get(name.lower()) for name in names}
    return {name: _time(value) if name in ("Delay", "Interval", "MaxDelay") else value for name, value in found.items()}


def _named(block: Block | None, names: dict[str, str]) -> Json | None:
    return None if block is None else {name: block.values.get(key) for key, name in names.items()}


def _texts(values: Json | None) -> Json | None:
    if values is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def _time(value: object) -> int | None:
    return None if value is None else nanoseconds(str(value))


def _refuse_unknown(block: Block, values: tuple[str, ...], blocks: tuple[str, ...]) -> None:
    for name in block.values:
        if name not in values and name not in blocks:
            raise HclError(
                f"input.hcl:1,1-2: Unsupported argument; An argument named {json.dumps(name)} is not expected here."
            )
    for inner in block.blocks:
        if inner.kind not in blocks:
            words = f"Blocks of type {json.dumps(inner.kind)} are not expected here."
            raise HclError(f"input.hcl:1,1-2: Unsupported block type; {words}")


def with_defaults(parsed: Json, canonical: Json) -> Json:
    """A parsed job with the defaults of its *canonical* form, as far as the parser's answer has them."""
    numbers = dict.fromkeys(("CreateIndex", "JobModifyIndex", "ModifyIndex"), 0)
    given = {key: value if value is not None else canonical.get(key) for key, value in parsed.items()}
    groups = [
        {**{key: one[key] for key in group}, "Tasks": [_only(task, known) for task, known in _tasks(group, one)]}
        for group, one in zip(parsed["TaskGroups"], canonical["TaskGroups"], strict=True)
    ]
    return {**given, **numbers, "Update": None, "TaskGroups": groups}


def _tasks(group: Json, canonical: Json) -> Iterator[tuple[Json, Json]]:
    return zip(group["Tasks"], canonical["Tasks"], strict=True)


def _only(task: Json, canonical: Json) -> Json:
    resources = {**canonical["Resources"], "DiskMB": None, "IOPS": None}
    if not (task["Resources"] or {}).get("MemoryMaxMB"):
        resources["MemoryMaxMB"] = None
    return {**{key: canonical[key] for key in task}, "Resources": resources}

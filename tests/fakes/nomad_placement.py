"""Where the fake cluster's scheduler places what it has to place, and why it can't."""

from dataclasses import dataclass, field
from fnmatch import fnmatch
from random import Random

from tests.fakes.nomad_shapes import RESOURCES, TERMINAL, Json, metrics
from tests.fakes.nomad_store import Store


@dataclass
class Refusal:
    """A placement that nodes refuse, on order of a test: by a *dimension* exhausted, or filtered by a *constraint*."""

    jobs: str = "*"
    dimension: str = ""
    constraint: str = ""


@dataclass
class Placement:
    store: Store
    random: Random
    refusals: list[Refusal] = field(default_factory=list)

    def choose(self, job: str, group: Json, avoid: str) -> tuple[Json | None, Json]:
        """A node with room (not *avoid* if there is another), or None; with what is told about the choice."""
        ready = [
            node
            for node in self.store.nodes.values()
            if node["Status"] == "ready" and node["SchedulingEligibility"] == "eligible"
        ]
        filtered: dict[str, int] = {}
        exhausted: dict[str, int] = {}
        fitting = []
        for node in ready:
            if constraint := self._filtered(job, group, node):
                filtered[constraint] = filtered.get(constraint, 0) + 1
            elif dimension := self._exhausted(job, group, node):
                exhausted[dimension] = exhausted.get(dimension, 0) + 1
            else:
                fitting.append(node)
        if not fitting:
            return None, metrics(
                len(ready),
                len(ready),
                NodesFiltered=sum(filtered.values()),
                ConstraintFiltered=filtered or None,
                NodesExhausted=sum(exhausted.values()),
                DimensionExhausted=exhausted or None,
                ResourcesExhausted=_exhausted_resources(group, exhausted) or None,
            )
        others = [node for node in fitting if node["ID"] != avoid]
        return self.random.choice(others or fitting), metrics(
            len(ready), len(ready), ScoreMetaData=self._scores(fitting)
        )

    def _scores(self, nodes: list[Json]) -> list[Json]:
        names = ("binpack", "job-anti-affinity", "node-reschedule-penalty", "node-affinity")
        return [{"NodeID": node["ID"], "Scores": dict.fromkeys(names, 0.5), "NormScore": 0.5} for node in nodes]

    def _filtered(self, job: str, group: Json, node: Json) -> str:
        for refusal in self.refusals:
            if refusal.constraint and fnmatch(job, refusal.jobs):
                return refusal.constraint
        for constraint in (group["Constraints"] or []) + (self.store.jobs[job]["Constraints"] or []):
            if not self._holds(constraint, node):
                return f"{constraint['LTarget']} {constraint.get('Operand') or '='} {constraint['RTarget']}"
        drivers = [node["Drivers"].get(task["Driver"], {}).get("Healthy") for task in group["Tasks"]]
        return "" if all(drivers) else "missing drivers"

    def _holds(self, constraint: Json, node: Json) -> bool:
        kind, _, name = constraint["LTarget"].removeprefix("${").removesuffix("}").partition(".")
        known = {"attr": node["Attributes"], "meta": node["Meta"]}.get(kind, {"unique.name": node["Name"]}).get(name)
        operand = constraint.get("Operand") or "="
        if operand == "set_contains":
            return set(constraint["RTarget"].split(",")) <= set(str(known).split(","))
        return bool(known == constraint["RTarget"]) != (operand == "!=")

    def _exhausted(self, job: str, group: Json, node: Json) -> str:
        for refusal in self.refusals:
            if refusal.dimension and fnmatch(job, refusal.jobs):
                return refusal.dimension
        used = [
            row["Resources"]
            for row in self.store.allocations.values()
            if row["NodeID"] == node["ID"] and row["ClientStatus"] not in TERMINAL
        ]
        for key, dimension in (("CPU", "cpu"), ("MemoryMB", "memory")):
            wanted = sum(task["Resources"][key] for task in group["Tasks"])
            if sum(resources[key] for resources in used) + wanted > node["Resources"][key]:
                return dimension
        return ""


def _exhausted_resources(group: Json, dimensions: dict[str, int]) -> Json:
    """What each task wanted of what there wasn't enough of."""
    keys = [key for dimension, key in (("cpu", "CPU"), ("memory", "MemoryMB")) if dimension in dimensions]
    nothing = {**RESOURCES, "CPU": 0, "MemoryMB": 0}
    wanted = {task["Name"]: {key: task["Resources"][key] for key in keys} for task in group["Tasks"]}
    return {name: {**nothing, **resources} for name, resources in wanted.items() if keys}

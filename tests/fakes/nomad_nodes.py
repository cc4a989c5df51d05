"""The fake cluster's nodes: their agents and ports, drains, deaths and returns, and the health of drivers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from tests.fakes.nomad_agents import Agent
from tests.fakes.nomad_api import migrate
from tests.fakes.nomad_http import Handler, Server
from tests.fakes.nomad_scheduler import Scheduler
from tests.fakes.nomad_shapes import SECOND, TERMINAL, Json, driver_health, node_event, node_row, rfc3339
from tests.fakes.nomad_store import Store

GRACE: Final = 6.0
"""From the death of an agent until its node is down."""
FORCE: Final = 1.0
RETURN: Final = 0.016


@dataclass
class Nodes:
    store: Store
    scheduler: Scheduler
    nursery: trio.Nursery
    random: Random
    ended: Callable[[str], None]
    """Told of each allocation whose task has ended."""
    agents: dict[str, Agent] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)

    async def add(self, number: int, handler: Handler, drivers: Iterable[str], cpu: int, memory: int) -> None:
        server = Server(handler)
        await self.nursery.start(server.listen)
        id = self.store.ids.new()
        with self.store.entry("NodeRegistration") as entry:
            now = self.store.clock.ns()
            entry.node(node_row(id, number, server.address, cpu, memory, drivers, now))
        self.servers[id] = server
        self.agents[id] = Agent(id, self.store, self.scheduler, Random(self.random.random()), self.ended)
        await self.nursery.start(self.agents[id].work)

    def find(self, name: str) -> str:
        """A node's id, by its id or its name."""
        return next(id for id, node in self.store.nodes.items() if name in (id, node["Name"]))

    def _write(self, kind: str, id: str, message: str = "", subsystem: str = "Cluster", **changes: object) -> Json:
        now = self.store.clock.ns()
        with self.store.entry(kind) as entry:
            node = {**self.store.nodes[id], **changes, "StatusUpdatedAt": now // SECOND}
            if message:
                event = {**node_event(message, now, subsystem), "CreateIndex": entry.index}
                node["Events"] = [*node["Events"], event][-10:]
            return entry.node(node)

    def _evaluate(self, id: str) -> None:
        """One evaluation for each job that ever had an allocation there, in one line."""
        self.scheduler.capacity()
        if not any(row["NodeID"] == id for row in self.store.allocations.values()):
            return
        with self.store.entry("EvaluationUpdated") as entry:
            made = self.scheduler.node_evaluations(entry, self.store.nodes[id])
        for row in made:
            self.store.enqueue(row["ID"])

    # -- drains -------------------------------------------------------------------------------------------------------

    def drain(self, id: str, spec: Json, mark_eligible: bool) -> None:
        """What PUT /v1/node/:id/drain does: without a spec the drain ends."""
        if not spec:
            self.end_drain(id, mark_eligible=mark_eligible)
            return
        deadline = int(spec.get("Deadline") or 0)
        now = rfc3339(self.store.clock.ns())
        strategy = {"Deadline": deadline, "IgnoreSystemJobs": True, "ForceDeadline": None, "StartedAt": now}
        drained = {"Drain": True, "DrainStrategy": strategy, "SchedulingEligibility": "ineligible"}
        self._write("NodeDrain", id, "Node drain strategy set", "Drain", LastDrain=_last("draining", now), **drained)
        self.nursery.start_soon(self._drain, id, FORCE if deadline < 0 else deadline / SECOND)

    def end_drain(self, id: str, *, mark_eligible: bool = True) -> None:
        eligible = "eligible" if mark_eligible else "ineligible"
        self._write("NodeDrain", id, Drain=False, DrainStrategy=None, SchedulingEligibility=eligible)
        if mark_eligible:
            self._evaluate(id)

    async def _drain(self, id: str, seconds: float) -> None:
        """Batch jobs stay until the deadline; the drain is over before what it moves has moved."""
        await trio.sleep(self.store.clock.scaled(seconds))
        await self.store.led()
        if not self.store.nodes[id]["Drain"]:
            return
        leaving = [
            row["ID"]
            for row in self.store.allocations.values()
            if row["NodeID"] == id and row["ClientStatus"] not in TERMINAL and row["DesiredStatus"] == "run"
        ]
        if leaving:
            migrate(self.store, leaving, "node-drain")
        now = rfc3339(self.store.clock.ns())
        done = {"Drain": False, "DrainStrategy": None, "LastDrain": _last("complete", now)}
        self._write("NodeDrain", id, "Node drain complete", "Drain", **done)

    # -- deaths -------------------------------------------------------------------------------------------------------

    def kill(self, id: str) -> None:
        """kill -9 of the agent: its tasks live on; its node is down when its heartbeats have been missed."""
        self.agents[id].die()
        self.servers[id].stop()
        self.nursery.start_soon(self._miss_heartbeats, id)

    async def _miss_heartbeats(self, id: str) -> None:
        await trio.sleep(self.store.clock.scaled(GRACE))
        await self.store.led()
        if not self.agents[id].alive and self.store.nodes[id]["Status"] != "down":
            self._write("NodeStreamEvent", id, "Node heartbeat missed", Status="down")
            self._evaluate(id)

    async def revive(self, id: str) -> None:
        """Start the agent again: it tells of all that has ended, and finds out what it is to stop."""
        await self.store.until(lambda: self.agents[id].down)
        await self.nursery.start(self.servers[id].listen)
        await self.store.led()
        self._write("NodeRegistration", id, "Node re-registered", Status="initializing")
        await trio.sleep(self.store.clock.scaled(RETURN))
        await self.store.led()
        self._write("NodeStreamEvent", id, Status="ready")
        self._evaluate(id)
        agent = self.agents[id]
        for run in agent.runs.values():
            if run.over:
                agent.repeat(run.id)
        await self.nursery.start(agent.work)

    # -- drivers ------------------------------------------------------------------------------------------------------

    def set_driver(self, driver: str, *, healthy: bool, id: str | None = None) -> None:
        """Of one node, or of all."""
        for node in [id] if id is not None else list(self.store.nodes):
            known = self.store.nodes[node]["Drivers"]
            told = driver_health(driver, self.store.clock.ns(), healthy=healthy)
            self._write("NodeStreamEvent", node, told["HealthDescription"], "Driver", Drivers={**known, driver: told})
        if healthy:
            self.scheduler.capacity()


def _last(status: str, now: str) -> Json:
    return {"StartedAt": now, "UpdatedAt": now, "Status": status, "AccessorID": "", "Meta": None}

"""Executions in the fake cluster: each life of a task has a box where commands really run, opened when first used."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

import trio

from tests.fakes.nomad_agents import Agent
from tests.fakes.nomad_exec import Behaviour, Box, Head, Refused, serve_exec
from tests.fakes.nomad_http import Exchange, Gone
from tests.fakes.nomad_shapes import TERMINAL, Json
from tests.fakes.nomad_store import Store

CLOSE_1000: Final = b"\x88\x02\x03\xe8"


@dataclass
class Rooms:
    store: Store
    agents: dict[str, Agent]
    nursery: trio.Nursery
    root: Path
    tokens: Callable[[], set[str]]
    behaviour: Behaviour = field(default_factory=Behaviour)
    """Of all sessions; durations are real here."""
    boxes: dict[str, Box] = field(default_factory=dict)
    locks: dict[str, trio.Lock] = field(default_factory=dict)
    sessions: int = 0
    """How many there were."""

    async def serve(self, exchange: Exchange, row: Json, agent: Agent) -> None:
        """Answer one request for an execution, to its end; when the agent dies, it ends without an exit code."""
        self.sessions += 1
        request = exchange.request
        head = Head(request.raw.split(b" ", 2)[1].decode(), request.headers)
        behaviour = self.behaviour
        tokens = self.tokens()
        if tokens and request.headers.get("x-nomad-token", "") not in tokens:
            behaviour = replace(behaviour, refuse=(1011, "ACL token not found"))
        elif (why := self._refusal(row, head, agent)) is not None:
            behaviour = replace(behaviour, refuse=why)
        else:
            await self._open(row["ID"])
        async with trio.open_nursery() as nursery:
            if behaviour.refuse is None:
                nursery.start_soon(self._end_with, agent, exchange, nursery.cancel_scope)
            await serve_exec(exchange.stream, head, lambda id, _: self._find(id, refused=behaviour), behaviour)
            nursery.cancel_scope.cancel()
        raise Gone

    def _refusal(self, row: Json, head: Head, agent: Agent) -> tuple[int, str] | None:
        """Why nothing can be executed there, in the recorded words."""
        id, task = row["ID"], head.option("task")
        if len(id) != 36:
            return 1011, "alloc lookup failed: index error: UUID must be 36 characters"
        if "JobID" not in row:
            return 1008, f'Unknown allocation "{id}"'
        if not agent.alive:
            return 1008, "No path to node"
        if not task:
            return 1008, "must provide task name"
        if task not in row["TaskResources"]:
            return 1011, "task not found"
        run = agent.runs.get(id)
        if run is not None and run.state["State"] == "running" and not run.over:
            return None
        started = row["ClientStatus"] in TERMINAL or (run is not None and run.state["StartedAt"])
        return 1008, f'task "{task}" {"is not running." if started else "not started yet."}'

    def _find(self, id: str, *, refused: Behaviour) -> Box:
        if id in self.boxes:
            return self.boxes[id]
        raise Refused(*(refused.refuse or (1008, 'task "default-task" is not running.')))

    async def _open(self, id: str) -> None:
        async with self.locks.setdefault(id, trio.Lock()):
            if id not in self.boxes:
                driver = next(iter(self.store.placed_jobs[id]["TaskGroups"][0]["Tasks"]))["Driver"]
                folder = self.root / id
                folder.mkdir(exist_ok=True)
                mine = f"{id} {uuid4()}"  # all that is labelled so is killed; other clusters have the same ids
                box = Box(mine, "docker" if driver == "docker" else "raw_exec", folder, self.nursery)
                box.environment["NOMAD_ALLOC_ID"] = id
                self.boxes[id] = box
                await box.begin()
                self.store.moved.unpark_all()

    async def _end_with(self, agent: Agent, exchange: Exchange, scope: trio.CancelScope) -> None:
        await self.store.until(lambda: not agent.alive)
        with suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
            await exchange.stream.send_all(CLOSE_1000)
        scope.cancel()

    def end(self, id: str) -> None:
        """The task of an allocation has ended, and all that was executed with it. A container's files are gone."""
        box = self.boxes.pop(id, None)
        if box is not None:
            box.stop()
            if box.driver == "docker":
                shutil.rmtree(box.folder, ignore_errors=True)

    def close(self) -> None:
        for id in list(self.boxes):
            self.end(id)

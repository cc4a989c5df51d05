"""A cluster with many runners that are known already, as a loopback with recorded shapes and as a database."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import trio

from poseidon.core.events import Start, Started
from poseidon.core.fleet import Fleet
from poseidon.core.model import Environment, EnvironmentId, JobId, RunnerId
from poseidon.executors.nomad.job import built_in, template_of
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.executors.nomad.values import Reader
from poseidon.store.connect import writing_connection
from poseidon.store.environments import save_environment
from poseidon.store.records import save_changes
from poseidon.store.upgrade import upgrade
from tests.nomad.loopback import Loopback, Reply, Request, open_loopback, recorded, sends

TEN = EnvironmentId(10)
INDEX = 5000
NOW = 1_796_000_000.0


@dataclass
class Crowd:
    """*breaking* is set to end the event stream that is followed."""

    size: int
    jobs: list[dict[str, Any]] = field(default_factory=list)
    allocations: list[dict[str, Any]] = field(default_factory=list)
    breaking: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        job, allocation = recorded("get_jobs_prefix_10-").body[0], recorded("get_allocations_prefix").body[0]
        for number in range(self.size):
            id, versions = f"{TEN}-{uuid4()}", {"CreateIndex": 2 * number + 1, "ModifyIndex": 2 * number + 2}
            self.jobs.append({**deepcopy(job), "ID": id, "Name": id, **versions})
            told = {"DesiredStatus": "run", "ClientStatus": "running", "TaskGroup": "default-group"}
            running = {"State": "running", "StartedAt": "2026-01-01T00:00:00Z", "Failed": False, "Restarts": 0}
            ids = {"ID": str(uuid4()), "JobID": id, "Name": f"{id}.default-group[0]", "JobType": "batch"}
            tasks = {"TaskStates": {"default-task": running}, "FollowupEvalID": "", "DesiredTransition": {}}
            self.allocations.append({**deepcopy(allocation), **ids, **versions, **told, **tasks})

    @property
    def environment(self) -> Environment:
        return Environment(TEN, "image", self.size, memory_limit=64, executor="nomad")

    def remember(self, database: Path) -> None:
        """All of it is known in *database*, as the product itself would have saved it."""
        upgrade(database)
        reader = Reader(NomadSettings())
        fleet = Fleet(settle=3.0, mint=lambda _: RunnerId(f"{TEN}-{uuid4()}"))
        fleet.know(TEN, 1)
        for stub in self.jobs:
            fleet.handle(Start(JobId(stub["ID"]), TEN, 1), NOW)
            fleet.handle(Started(JobId(stub["ID"]), stub["CreateIndex"]), NOW)
        for seen in reader.job_table(msgspec.json.encode(self.jobs)).seen:
            fleet.handle(seen, NOW)
        for allocation in reader.allocations(msgspec.json.encode(self.allocations)):
            fleet.handle(allocation, NOW)
        assert sum(1 for _ in fleet.runners()) == self.size
        with closing(writing_connection(database, "NORMAL")) as connection, connection.begin():
            save_environment(connection, self.environment, NOW)
            save_changes(connection, "nomad", fleet.take_changes(), NOW)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Loopback]:
        """A Nomad that has just this, and an environment's template."""
        wanted = NomadSettings()
        template = template_of(built_in(wanted), self.environment, wanted) | {"JobModifyIndex": 5}
        stub = self.jobs[0] | {"ID": "template-10", "JobModifyIndex": 5}
        everything, templates = Reply([*self.jobs, stub], index=INDEX), Reply([stub], index=INDEX)

        async def list_jobs(request: Request) -> Reply:
            return templates if request.query.get("prefix") == "template-" else everything

        async def stream(request: Request) -> None:
            await sends(b"{}\n", then=self._until_broken)(request)

        async with open_loopback() as nomad:
            nomad.on("GET", "/v1/jobs", list_jobs)
            nomad.on("GET", "/v1/allocations", Reply(self.allocations, index=INDEX))
            nomad.on("GET", "/v1/event/stream", stream)
            nomad.on("GET", "/v1/job/template-10", Reply(template))
            for stub in self.jobs:
                nomad.on("GET", f"/v1/job/{stub['ID']}", Reply({"ID": stub["ID"], "ModifyIndex": stub["ModifyIndex"]}))
            yield nomad

    async def _until_broken(self, request: Request) -> None:
        await self.breaking.wait()
        self.breaking = trio.Event()

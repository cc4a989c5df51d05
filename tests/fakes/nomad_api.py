"""The fake cluster's HTTP API: statuses, texts, headers and shapes as recorded from Nomad 1.1."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import msgspec
import trio

from tests.fakes.nomad_agents import Agent, End
from tests.fakes.nomad_hcl import HclError, parse_job, with_defaults
from tests.fakes.nomad_http import Exchange, Request
from tests.fakes.nomad_jobs import canonical_job, job_faults, job_stub, job_summary, nanoseconds, same_job
from tests.fakes.nomad_scheduler import Scheduler
from tests.fakes.nomad_shapes import SECOND, Json, allocation_stub, changed, evaluation, node_stub
from tests.fakes.nomad_store import Store
from tests.fakes.nomad_stream import Streams

LEADER_PATIENCE: Final = 5.0
UUID_LENGTH: Final = 36

Exec = Callable[[Exchange, Json, Agent], Awaitable[None]]


class Refused(Exception):
    """An answer in plain text."""

    def __init__(self, status: int, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.index = index


@dataclass
class Fault:
    """What happens to requests that match (*path*: from its beginning, "*" within); *times* None: until healed."""

    path: str = "/"
    method: str = ""
    times: int | None = 1
    status: int = 0
    text: str = ""
    wait: float = 0.0
    """Seconds of Nomad's time before the request is looked at."""
    lost: str = ""
    """"before": the connection is reset and nothing is done. "after": it is done, and the answer lost."""
    garbage: bytes = b""
    """The body of an answer with status 200, instead of doing anything."""
    hits: int = 0

    def matches(self, request: Request) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        pattern = re.escape(self.path).replace(r"\*", ".*")
        return self.method in ("", request.method) and re.match(pattern, request.path) is not None


@dataclass
class Api:
    store: Store
    scheduler: Scheduler
    streams: Streams
    agents: dict[str, Agent]
    exec: Exec
    address: Callable[[], str]
    drain: Callable[[str, Json, bool], None]
    tokens: set[str] = field(default_factory=set)
    """Empty: no token is needed."""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Every request so far, as (method, path)."""

    async def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        self.requests.append((request.method, request.path))
        fault = next((known for known in self.faults if known.matches(request)), None)
        if fault is not None and await self._meet(fault, exchange):
            return
        try:
            await self._admit(request)
            await self._route(exchange)
        except Refused as refusal:
            await exchange.answer(refusal.status, refusal.text, refusal.index)

    async def _meet(self, fault: Fault, exchange: Exchange) -> bool:
        """True: the fault was the answer."""
        fault.hits += 1
        await trio.sleep(self.store.clock.scaled(fault.wait))
        if fault.lost == "before":
            exchange.reset()
        exchange.lose_answer = fault.lost == "after"
        if fault.garbage:
            await exchange.send(200, [("Content-Type", "application/json")], fault.garbage)
        elif fault.status:
            await exchange.answer(fault.status, fault.text)
        return bool(fault.garbage or fault.status)

    async def _admit(self, request: Request) -> None:
        """Leader, region, token; in this order nothing depends on."""
        stream = request.path == "/v1/event/stream"
        if not (stream or request.flag("stale") or request.upgrade or request.path == "/v1/agent/self"):
            with trio.move_on_after(self.store.clock.scaled(LEADER_PATIENCE)) as patience:
                await self.store.led()
            if patience.cancelled_caught:
                raise Refused(500, "No cluster leader")
        if request.get("region", "global") != "global":
            raise Refused(500, "No path to region")
        if self.tokens and request.path not in ("/v1/jobs/parse", "/v1/status/leader") and not request.upgrade:
            self._check_token(request.headers.get("x-nomad-token", ""), stream=stream)

    def _check_token(self, token: str, *, stream: bool) -> None:
        if token in self.tokens:
            return
        if stream:
            raise Refused(500, "Permission denied")
        if token and not _is_uuid(token):
            raise Refused(500, "acl token lookup failed: index error: UUID must be 36 characters")
        raise Refused(403, "ACL token not found" if token else "Permission denied")

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.request.path.removeprefix("/v1/")
        for pattern, handler in self._routes():
            if match := re.fullmatch(pattern, path):
                await handler(exchange, *match.groups())
                return
        await exchange.answer(404)

    def _routes(self) -> list[tuple[str, Callable[..., Awaitable[None]]]]:
        return [
            ("event/stream", self._event_stream),
            ("jobs/parse", self._parse),
            ("jobs", self._jobs),
            ("job/(.+)/allocations", self._job_allocations),
            ("job/(.+)/evaluations", self._job_evaluations),
            ("job/(.+)/summary", self._job_summary),
            ("job/(.+)", self._job),
            ("allocations", self._allocations),
            ("allocation/([^/]+)/stop", self._stop_allocation),
            ("allocation/([^/]+)", self._allocation),
            ("client/allocation/([^/]+)/exec", self._exec),
            ("client/allocation/([^/]+)/(restart|signal)", self._end_task),
            ("evaluations", self._evaluations),
            ("evaluation/([^/]+)/allocations", self._evaluation_allocations),
            ("evaluation/([^/]+)", self._evaluation),
            ("nodes", self._nodes),
            ("node/([^/]+)/allocations", self._node_allocations),
            ("node/([^/]+)/drain", self._drain),
            ("node/([^/]+)", self._node),
            ("status/leader", self._leader),
            ("status/peers", self._peers),
            ("agent/self", self._agent),
            ("agent/health", self._health),
            ("regions", self._regions),
            ("system/gc", self._gc),
        ]

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def _jobs(self, exchange: Exchange) -> None:
        request = _allowed(exchange.request, "GET", "PUT", "POST")
        if request.method != "GET":
            await self._register(exchange)
            return
        await self._wait_for_news(request, "jobs", "job_summary")
        prefix = request.get("prefix")
        found = [job for id, job in sorted(self.store.jobs.items()) if id.startswith(prefix)]
        index = self.store.table_index("jobs", "job_summary")
        told = [job_stub(job, self._summary(job)) for job in found] if _here(request) else []
        await exchange.answer(200, told, index)

    def _summary(self, job: Json) -> Json:
        rows = self.store.of_job(job["ID"])
        index = max([job["ModifyIndex"], *(row["ModifyIndex"] for row in rows)])
        return job_summary(job, rows, self.store.queued(job["ID"]), index)

    async def _register(self, exchange: Exchange, id: str = "") -> None:
        body = _json(exchange.request)
        given = body.get("Job")
        if given is None:
            raise Refused(400, "Job must be specified")
        if not isinstance(given, dict):
            kind = "string" if isinstance(given, str) else "array" if isinstance(given, list) else "number"
            field = "Go struct field JobRegisterRequest.Job of type api.Job"
            raise Refused(400, f"json: cannot unmarshal {kind} into {field}")
        if id and given.get("ID") != id:
            raise Refused(400, "Job ID does not match name")
        job = canonical_job(given)
        if faults := job_faults(job):
            raise Refused(500, faults)
        if job["Namespace"] != "default" or exchange.request.get("namespace", "default") != "default":
            name = exchange.request.get("namespace") or job["Namespace"]
            raise Refused(500, f'job "{job["ID"]}" is in nonexistent namespace "{name}"')
        self._enforce(body, job["ID"])
        row = self._write_job(job)
        answer = {
            "EvalID": row["ID"],
            "EvalCreateIndex": row["CreateIndex"],
            "JobModifyIndex": self.store.jobs[job["ID"]]["JobModifyIndex"],
            "Warnings": "",
            "Index": row["CreateIndex"],
            "LastContact": 0,
            "KnownLeader": False,
        }
        await exchange.answer(200, answer, row["CreateIndex"], read=False)

    def _enforce(self, body: Json, id: str) -> None:
        if not body.get("EnforceIndex"):
            return
        wanted, known = body.get("JobModifyIndex", 0), self.store.jobs.get(id)
        if wanted == 0 and known is not None:
            raise Refused(500, "Enforcing job modify index 0: job already exists")
        if wanted and known is None:
            raise Refused(500, f"Enforcing job modify index {wanted}: job does not exist")
        if known is not None and wanted != known["JobModifyIndex"]:
            words = f"job exists with conflicting job modify index: {known['JobModifyIndex']}"
            raise Refused(500, f"Enforcing job modify index {wanted}: {words}")

    def _write_job(self, job: Json) -> Json:
        """Register *job*; the answer is its evaluation. The same job again changes nothing, but is evaluated again."""
        known = self.store.jobs.get(job["ID"])
        now = self.store.clock.ns()
        if known is not None and same_job(known, job):
            with self.store.entry("EvaluationUpdated") as entry:
                told = {"JobModifyIndex": known["JobModifyIndex"]}
                row = entry.evaluation(evaluation(self.store.ids.new(), known, job["ID"], "job-register", now, **told))
        else:
            version = known["Version"] + 1 if known is not None else 0
            with self.store.entry("JobRegistered") as entry:
                job = entry.job({**job, "Version": version, "SubmitTime": now})
                entry.flush()
                told = {"JobModifyIndex": entry.index}
                row = entry.evaluation(evaluation(self.store.ids.new(), job, job["ID"], "job-register", now, **told))
        self.store.enqueue(row["ID"])
        return row

    async def _job(self, exchange: Exchange, id: str) -> None:
        request = _allowed(exchange.request, "GET", "PUT", "POST", "DELETE")
        if request.method == "DELETE":
            await self._deregister(exchange, id)
        elif request.method != "GET":
            await self._register(exchange, id)
        else:
            job = self.store.jobs.get(id) if _here(request) else None
            if job is None:
                raise Refused(404, "job not found", self.store.table_index("jobs"))
            await exchange.answer(200, job, job["ModifyIndex"])

    async def _deregister(self, exchange: Exchange, id: str) -> None:
        job = self.store.jobs.get(id)
        now = self.store.clock.ns()
        with self.store.entry("JobDeregistered") as entry:
            if exchange.request.flag("purge"):
                entry.purge(id)
            elif job is not None:
                job = entry.job({**job, "Stop": True, "Version": job["Version"] + 1})
            entry.flush()
            told = {"JobModifyIndex": entry.index}
            row = entry.evaluation(evaluation(self.store.ids.new(), job, id, "job-deregister", now, **told))
        self.store.enqueue(row["ID"])
        answer = {
            "EvalID": row["ID"],
            "EvalCreateIndex": row["CreateIndex"],
            "JobModifyIndex": row["CreateIndex"],
            "VolumeEvalID": "",
            "VolumeEvalIndex": 0,
            "Index": row["CreateIndex"],
            "LastContact": 0,
            "KnownLeader": False,
        }
        await exchange.answer(200, answer, row["CreateIndex"], read=False)

    async def _parse(self, exchange: Exchange) -> None:
        body = _json(_allowed(exchange.request, "PUT", "POST"))
        try:
            job = parse_job(body.get("JobHCL") or "")
        except (HclError, ValueError) as error:
            raise Refused(400, str(error)) from None
        if body.get("Canonicalize"):
            job = with_defaults(job, canonical_job(job))
        await exchange.answer(200, job)

    async def _job_allocations(self, exchange: Exchange, id: str) -> None:
        request = _allowed(exchange.request, "GET")
        job = self.store.jobs.get(id)
        found = [
            row
            for row in self.store.of_job(id)
            if job is None
            or request.flag("all")
            or self.store.placed_jobs[row["ID"]]["CreateIndex"] == job["CreateIndex"]
        ]
        told = [self._stub(row) for row in found] if _here(request) else []
        await exchange.answer(200, told, self.store.table_index("allocations"))

    async def _job_evaluations(self, exchange: Exchange, id: str) -> None:
        _allowed(exchange.request, "GET")
        await exchange.answer(200, self.store.evaluations_of(id), self.store.table_index("evaluations"))

    async def _job_summary(self, exchange: Exchange, id: str) -> None:
        if id not in self.store.jobs:
            raise Refused(404, "job not found")
        summary = self._summary(self.store.jobs[id])
        await exchange.answer(200, summary, summary["ModifyIndex"])

    # -- allocations --------------------------------------------------------------------------------------------------

    def _stub(self, row: Json, *, resources: bool = False, task_states: bool = True) -> Json:
        return allocation_stub(row, self.store.placed_jobs[row["ID"]], resources=resources, task_states=task_states)

    async def _allocations(self, exchange: Exchange) -> None:
        request = _allowed(exchange.request, "GET")
        prefix = request.get("prefix")
        if len(prefix.replace("-", "")) % 2:
            why = "Input (without hyphens) must be even length"
            raise Refused(500, f"alloc lookup failed: index error: {why}")
        await self._wait_for_news(request, "allocations")
        told = [
            self._stub(row, resources=request.flag("resources"), task_states=request.get("task_states") != "false")
            for id, row in sorted(self.store.allocations.items())
            if id.startswith(prefix) and _here(request)
        ]
        await exchange.answer(200, told, self.store.table_index("allocations"))

    async def _allocation(self, exchange: Exchange, id: str) -> None:
        _allowed(exchange.request, "GET")
        if not _is_uuid(id):
            raise Refused(500, "alloc lookup failed: index error: UUID must be 36 characters")
        row = self.store.allocations.get(id)
        if row is None:
            raise Refused(404, "alloc not found", self.store.table_index("allocations"))
        await exchange.answer(200, {**row, "Job": self.store.placed_jobs[id]}, row["ModifyIndex"])

    async def _stop_allocation(self, exchange: Exchange, id: str) -> None:
        _allowed(exchange.request, "PUT", "POST")
        if id not in self.store.allocations:
            raise Refused(404, "allocation not found")
        row = migrate(self.store, [id], "alloc-stop")[0]
        await exchange.answer(200, {"EvalID": row["ID"], "Index": row["CreateIndex"]}, row["CreateIndex"], read=False)

    async def _end_task(self, exchange: Exchange, id: str, how: str) -> None:
        _allowed(exchange.request, "PUT", "POST")
        row = self.store.allocations.get(id)
        if row is None:
            raise Refused(404, f'Unknown allocation "{id}"')
        run = self.agents[row["NodeID"]].runs.get(id)
        if run is None or run.client != "running":
            tail = "" if how == "restart" else f"Failed to signal task: {next(iter(row['TaskResources']))}, err: "
            raise Refused(500, f"1 error occurred:\n\t* {tail}Task not running\n\n")
        if how == "restart":
            self.agents[row["NodeID"]].end(id, End(asked=True))
        elif _json(exchange.request).get("Signal") in ("SIGKILL", "SIGTERM", "SIGINT"):
            self.agents[row["NodeID"]].end(id, End())
        await exchange.answer(200, {"Index": 0})

    async def _exec(self, exchange: Exchange, id: str) -> None:
        request = exchange.request
        if not request.upgrade:
            raise Refused(400, "Bad Request")
        row = self.store.allocations.get(id, {"ID": id})
        agent = self.agents.get(row.get("NodeID", "")) or next(iter(self.agents.values()))
        await self.exec(exchange, row, agent)

    # -- evaluations and nodes ----------------------------------------------------------------------------------------

    async def _evaluations(self, exchange: Exchange) -> None:
        prefix = exchange.request.get("prefix")
        told = [row for id, row in sorted(self.store.evaluations.items()) if id.startswith(prefix)]
        await exchange.answer(200, told, self.store.table_index("evaluations"))

    async def _evaluation(self, exchange: Exchange, id: str) -> None:
        row = self.store.evaluations.get(id)
        if row is None:
            raise Refused(404, "eval not found", self.store.table_index("evaluations"))
        await exchange.answer(200, row, row["ModifyIndex"])

    async def _evaluation_allocations(self, exchange: Exchange, id: str) -> None:
        told = [self._stub(row) for row in self.store.allocations.values() if row["EvalID"] == id]
        await exchange.answer(200, told, self.store.table_index("allocations"))

    async def _nodes(self, exchange: Exchange) -> None:
        told = [node_stub(node) for _, node in sorted(self.store.nodes.items())]
        await exchange.answer(200, told, self.store.table_index("nodes"))

    async def _node(self, exchange: Exchange, id: str) -> None:
        node = self._known_node(id)
        await exchange.answer(200, node, node["ModifyIndex"])

    async def _node_allocations(self, exchange: Exchange, id: str) -> None:
        node = self._known_node(id)
        rows = [row for row in self.store.allocations.values() if row["NodeID"] == node["ID"]]
        told = [{**row, "Job": self.store.placed_jobs[row["ID"]]} for row in rows]
        await exchange.answer(200, told, self.store.table_index("allocations"))

    async def _drain(self, exchange: Exchange, id: str) -> None:
        body = _json(_allowed(exchange.request, "PUT", "POST"))
        self.drain(self._known_node(id)["ID"], body.get("DrainSpec") or {}, bool(body.get("MarkEligible")))
        index = self.store.index
        answer = {"NodeModifyIndex": index, "EvalIDs": None, "EvalCreateIndex": 0, "Index": index}
        await exchange.answer(200, answer, index, read=False)

    def _known_node(self, id: str) -> Json:
        if id not in self.store.nodes:
            raise Refused(404, "node not found", self.store.table_index("nodes"))
        return self.store.nodes[id]

    # -- the rest -----------------------------------------------------------------------------------------------------

    async def _event_stream(self, exchange: Exchange) -> None:
        _allowed(exchange.request, "GET")
        await self.streams.serve(exchange)

    async def _leader(self, exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.Raw(msgspec.json.encode(self.address())))

    async def _peers(self, exchange: Exchange) -> None:
        await exchange.answer(200, [self.address()])

    async def _agent(self, exchange: Exchange) -> None:
        version = {"Version": "1.1.0", "VersionPrerelease": "", "Revision": ""}
        member = {"Name": "nomad-server-1.global", "Addr": "127.0.0.1", "Status": "alive", "Tags": {"build": "1.1.0"}}
        await exchange.answer(200, {"config": {"Version": version, "Region": "global"}, "member": member, "stats": {}})

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, {"server": {"ok": True, "message": "ok"}})

    async def _regions(self, exchange: Exchange) -> None:
        await exchange.answer(200, ["global"])

    async def _gc(self, exchange: Exchange) -> None:
        _allowed(exchange.request, "PUT", "POST")
        self.store.collect_garbage()
        await exchange.answer(200)

    async def _wait_for_news(self, request: Request, *tables: str) -> None:
        """A blocking query: with an index, wait until there is something newer."""
        if not (index := int(request.get("index") or 0)):
            return
        wait = nanoseconds(request.get("wait") or "5m") / SECOND
        with trio.move_on_after(self.store.clock.scaled(wait)):
            await self.store.until(lambda: self.store.table_index(*tables) > index)


def migrate(store: Store, ids: list[str], by: str) -> list[Json]:
    """Ask allocations to move elsewhere; the answer is the evaluations that this made, already queued."""
    with store.entry("AllocationUpdateDesiredStatus") as entry:
        for id in ids:
            wish = {"Migrate": True, "Reschedule": None, "ForceReschedule": None}
            entry.report(changed(store.allocations[id], DesiredTransition=wish))
        jobs = sorted({store.allocations[id]["JobID"] for id in ids})
        now = store.clock.ns()
        made = [entry.evaluation(_evaluation(store, job, by, now)) for job in jobs]
    for row in made:
        store.enqueue(row["ID"])
    return made


def _evaluation(store: Store, job: str, by: str, now: int) -> Json:
    known = store.jobs.get(job)
    told = {"JobModifyIndex": known["ModifyIndex"]} if known is not None and by == "alloc-stop" else {}
    return evaluation(store.ids.new(), known, job, by, now, **told)


def _allowed(request: Request, *methods: str) -> Request:
    if request.method not in methods:
        raise Refused(405, "Invalid method")
    return request


def _here(request: Request) -> bool:
    return request.get("namespace", "default") in ("default", "*")


def _is_uuid(text: str) -> bool:
    try:
        return len(text) == UUID_LENGTH and str(UUID(text)) == text
    except ValueError:
        return False


def _json(request: Request) -> Json:
    try:
        body = msgspec.json.decode(request.body or b"{}")
    except msgspec.DecodeError as error:
        raise Refused(400, f"invalid character: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "json: cannot unmarshal into Go value")
    return body

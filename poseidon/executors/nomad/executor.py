"""The Nomad executor: a cluster behind the port of `poseidon.executors.base`."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import structlog
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, Environment, EnvironmentId, JobId, JobSeen, Listing
from poseidon.errors import ExecutorUnreachable, PlacementFailed
from poseidon.executors.base import Ability, Batch, JobsListed, LookedUp, Process, StreamFigures
from poseidon.executors.nomad import job as jobs
from poseidon.executors.nomad import wire
from poseidon.executors.nomad.abilities import abilities_of
from poseidon.executors.nomad.client import (
    ALLOCATION,
    ALLOCATIONS,
    DEREGISTERED,
    EVALUATIONS,
    JOB,
    REGISTERED,
    STUBS,
    Client,
    Conflict,
    NotFound,
    Refused,
    nothing_to_refuse,
    open_client,
    path_of,
)
from poseidon.executors.nomad.events import EventStream, StreamHealth
from poseidon.executors.nomad.exec import open_exec
from poseidon.executors.nomad.exec_target import ExecTarget
from poseidon.executors.nomad.job import Json
from poseidon.executors.nomad.nodes import Nodes
from poseidon.executors.nomad.placement import Evaluations, Expectation, NoRoom
from poseidon.executors.nomad.pulls import Pulls
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.executors.nomad.template import Template
from poseidon.executors.nomad.values import JobTable, Reader
from poseidon.executors.trust import Trust

log = structlog.get_logger(__name__)

MOST_NAMES = 1000
"""Names of strangers' jobs that are remembered, so that each is told of once."""
MARK_ATTEMPTS = 5


class NomadExecutor:
    """See Executor, KeepsRecords, KeepsTemplates, ListsJobs, FollowsStream, HasAnAddress and HasCredentials."""

    name = jobs.NAME

    def __init__(self, client: Client, template: Template) -> None:
        settings = client.settings
        self.settle = settings.settle
        self.list_interval = settings.list_interval
        self.start_timeout = settings.start_timeout
        self._settings = settings
        self._client = client
        self._template = template
        self._reader = Reader(settings)
        self._evaluations = Evaluations(client)
        self._events = EventStream(client, self._reader, self._evaluations)
        self._pulls = Pulls()
        self._strangers: set[str] = set()
        self._templates: dict[EnvironmentId, int] = {}
        """Index of each template's registration, as we left or found it."""
        self._warnings: set[str] = set()
        self._target = ExecTarget(
            url=settings.url,
            direct=Nodes(client).address,
            headers=client.credentials.headers,
            tls=client.credentials.tls,
            task=settings.task,
            set_user=settings.set_user,
            namespace=settings.namespace,
            region=settings.region,
            connections=settings.exec_connections,
            heartbeat=settings.exec_heartbeat,
        )

    @property
    def address(self) -> str:
        """See HasAnAddress."""
        return self._settings.url

    @property
    def trust(self) -> Trust:
        """See HasAnAddress."""
        return self._client.trust

    def use_credentials(self, token: str) -> None:
        """See HasCredentials."""
        self._client.credentials.use(token)

    @property
    def stream_health(self) -> StreamHealth:
        """The event stream in numbers, as they change."""
        return self._events.health

    def stream_figures(self) -> StreamFigures:
        """See FollowsStream."""
        return self._events.health.figures()

    def check(self, environment: Environment) -> None:
        """See Executor."""
        jobs.check(environment)

    def abilities(self) -> Sequence[Ability]:
        """See Executor. It may wait for the template to be read."""
        base = self._template.known
        task = None if base is None else jobs.task_of(base, self._settings)
        return abilities_of(self._settings, task, self._warnings)

    # Jobs

    async def start(self, job: JobId, environment: Environment) -> int:
        """See Executor. A job that found no room stays, blocked: whoever asked for it has to stop it."""
        base = await self._template.read()
        pull = self._pulls.wanted(job, environment)
        spec = jobs.runner_of(base, job, environment, self._settings, pull=pull)
        with self._evaluations.expect(job) as expectation:
            try:
                answer = await self._register(spec, 0)
            except Conflict:  # it was carried out before, but its answer was lost; it mustn't reset the job's mark
                answer = await self._find_registration(job)
            no_room = await self._evaluations.outcome(expectation, answer.eval_id) if answer.eval_id else None
            if no_room is not None and no_room.drivers:
                no_room = await self._register_again(spec, answer, expectation)
        if no_room is not None:
            raise PlacementFailed(f"nomad has no room: {no_room.why}")
        return answer.job_modify_index

    async def _register_again(self, spec: Json, answer: wire.Registered, expectation: Expectation) -> NoRoom | None:
        """A job that met only unhealthy drivers is blocked for good, though they recover: only the same registration
        wakes it."""
        await trio.sleep(self._settings.driver_retry)
        again = await self._register(spec, answer.job_modify_index)
        return await self._evaluations.outcome(expectation, again.eval_id)

    async def _register(self, spec: Json, index: int) -> wire.Registered:
        """*index*: of the job that it replaces; 0: there is none."""
        body = {"Job": spec, "EnforceIndex": True, "JobModifyIndex": index}
        answer = await self._client.put(path_of("jobs"), body, REGISTERED)
        self._tell_warnings(answer.warnings)
        return answer

    async def _find_registration(self, job: JobId) -> wire.Registered:
        try:
            known = await self._client.get(path_of("job", job), JOB)
        except NotFound:
            raise ExecutorUnreachable(f"job {job} was there and isn't any more") from None
        evaluations = await self._client.get(path_of("job", job, "evaluations"), EVALUATIONS)
        newest = max(
            (each for each in evaluations.body if each.triggered_by == "job-register"),
            key=lambda each: each.create_index,
            default=None,
        )
        return wire.Registered(known.body.job_modify_index, newest.id if newest is not None else "")

    async def stop(self, job: JobId) -> int:
        """See Executor. The index of the answer is of no use: for an unknown job it is above all that the list of
        jobs may have for hours, and would never be proven."""
        with nothing_to_refuse():
            await self._client.delete(path_of("job", job), DEREGISTERED, purge="true")
            listed = await self._client.get(path_of("jobs"), STUBS, prefix=job)
        self._pulls.forget(job)
        return listed.index

    async def mark(self, job: JobId, *, used: bool, timeout: int) -> None:  # noqa: ASYNC109 – a value that is written
        """See KeepsRecords. Another's change in between is respected, and a job that is gone stays gone."""
        if not self._settings.mark_used:
            return
        await self._client.trusted()
        for _ in range(MARK_ATTEMPTS):
            known = await self._job(job)
            changed = jobs.marked(known, self._settings, used=used, timeout=timeout)
            if not known or known.get("Stop") or changed is None:
                return
            try:
                await self._register(changed, int(known.get("JobModifyIndex", 0)))
            except Conflict:
                continue
            except Refused as error:
                log.warning("job not marked", job_id=job, error=error.message)
            return
        raise ExecutorUnreachable(f"job {job} keeps changing while it is being marked")

    async def _job(self, job: str) -> Json:
        """A job as it is; empty if there is none."""
        with nothing_to_refuse():
            try:
                return await self._client.get_whole_job(job)
            except NotFound:
                return {}

    # Listings

    async def snapshot(self) -> Listing:
        """See Executor. Two requests, however many jobs there are."""
        table = await self._list_jobs()
        options = {"resources": "true", "task_states": "true"}
        with nothing_to_refuse():
            found = await self._client.get_list(path_of("allocations"), self._reader.allocations, **options)
        return Listing(table.body.seen, found.body, table.index, found.index)

    async def has(self, job: JobId) -> bool:
        """See HasAnAddress."""
        return bool(await self._job(job))

    async def list_jobs(self) -> JobsListed:
        """See ListsJobs."""
        table = await self._list_jobs()
        listing = Listing(table.body.seen, (), table.index, 0, jobs_only=True)
        templates = table.body.templates.items()
        unchanged = frozenset(known for known, index in templates if self._templates.get(known, index) == index)
        return JobsListed(listing, table.body.running, unchanged)

    async def _list_jobs(self) -> wire.Answer[JobTable]:
        with nothing_to_refuse():
            table = await self._client.get_list(path_of("jobs"), self._reader.job_table)
        self._tell_strangers(table.body.others)
        return table

    async def look_up(self, job: JobId) -> LookedUp:
        """See Executor."""
        seen: tuple[JobSeen, ...] = ()
        meta: dict[str, str] = {}
        await self._client.trusted()
        with nothing_to_refuse():
            try:
                known = await self._client.get(path_of("job", job), JOB)
            except NotFound as missing:
                jobs_index = missing.index
            else:
                seen, meta, jobs_index = (self._reader.job(known.body),), self._reader.meta(known.body), known.index
            found = await self._client.get(path_of("job", job, "allocations"), ALLOCATIONS, all="true")
            allocations = [await self._in_detail(each) for each in found.body if self._reader.concerns(each)]
        listing = Listing(seen, tuple(allocations), jobs_index, found.index, only=job)
        timeout = jobs.count_of(meta.get(jobs.TIMEOUT, ""))
        return LookedUp(listing, meta.get(jobs.USED) == "true", timeout)

    async def _in_detail(self, stub: wire.Allocation) -> Allocation:
        """Lists of one job lack ports, and what an allocation replaces: of those that may run it is asked for."""
        listed = self._reader.allocation(stub, complete=False)
        if stub.desired_status != "run" or stub.client_status not in ("pending", "running"):
            return listed
        try:
            found = await self._client.get(path_of("allocation", stub.id), ALLOCATION)
        except NotFound:
            return listed
        return self._reader.allocation(found.body, complete=True)

    def follow(self, position: int | None) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """See Executor."""
        return self._events.follow(position)

    # Commands

    def execute(self, allocation: Allocation, command: Command) -> AbstractAsyncContextManager[Process]:
        """See Executor. The allocation is known, so nothing is asked for but the connection itself."""
        return open_exec(self._target, allocation, command)

    # Templates

    async def put_template(self, environment: Environment) -> None:
        """See KeepsTemplates."""
        self.check(environment)
        base = await self._template.read()
        body = {"Job": jobs.template_of(base, environment, self._settings)}
        answer = await self._client.put(path_of("jobs"), body, REGISTERED)
        self._templates[environment.id] = answer.job_modify_index
        self._tell_warnings(answer.warnings)

    async def remove_template(self, environment: EnvironmentId) -> None:
        """See KeepsTemplates."""
        with nothing_to_refuse():
            await self._client.delete(path_of("job", jobs.template_name(environment)), DEREGISTERED, purge="true")
        self._templates.pop(environment, None)

    async def environments(self) -> Sequence[Environment]:
        """See KeepsTemplates. Ids are compared as a whole: 1, 10 and 100 begin alike."""
        await self._client.trusted()
        with nothing_to_refuse():
            listed = await self._client.get(path_of("jobs"), STUBS, prefix="template-")
        found: list[Environment] = []
        for stub in listed.body:
            if jobs.template_id(stub.id) is None or stub.stop:
                self._tell_strangers([stub.id])
                continue
            job = await self._job(stub.id)
            environment = jobs.environment_of_template(job, self._settings)
            if environment is None:
                self._tell_strangers([f"{stub.id} (incomplete)"])
            else:
                self._templates.setdefault(environment.id, int(job.get("JobModifyIndex", 0)))
                found.append(environment)
        return found

    def _tell_strangers(self, names: Sequence[str]) -> None:
        """Jobs that are named nearly like ours are left alone, and told of once."""
        for name in names:
            nearly = name[:1].isdecimal() or (name.startswith("template") and jobs.template_id(name) is None)
            if nearly and name not in self._strangers and len(self._strangers) < MOST_NAMES:
                self._strangers.add(name)
                log.warning("job left alone: its name is not of our form", job_id=name)

    def _tell_warnings(self, warnings: str | None) -> None:
        if warnings and warnings not in self._warnings and len(self._warnings) < MOST_NAMES:
            self._warnings.add(warnings)
            log.warning("nomad warned of a job", warnings=warnings)


@asynccontextmanager
async def open_nomad(settings: NomadSettings, renew: Callable[[], str] | None = None) -> AsyncIterator[NomadExecutor]:
    """Nomad needn't be there. *renew* reads the token anew when it is refused. Raises ConfigError for files that can't
    be read."""
    async with open_client(settings, renew) as client:
        yield NomadExecutor(client, Template.load(client))

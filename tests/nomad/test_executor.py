"""The executor's own promises: starts and stops that can be proven, bounded waits, marks, templates, listings."""

import json
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trio

from poseidon.core.events import Listed
from poseidon.core.fleet import Fleet
from poseidon.core.model import (
    UNTOLD,
    Allocation,
    AllocationId,
    ClientStatus,
    Environment,
    EnvironmentId,
    JobId,
    JobStatus,
    RunnerId,
)
from poseidon.errors import ConfigError, ExecutorError, ExecutorUnreachable, PlacementFailed, Unsupported
from poseidon.executors.base import Executor, KeepsRecords, KeepsTemplates, ListsJobs
from poseidon.executors.nomad.client import open_client
from poseidon.executors.nomad.executor import NomadExecutor, open_nomad
from poseidon.executors.nomad.nodes import Nodes
from poseidon.executors.nomad.settings import NomadSettings
from tests.nomad.loopback import Loopback, Reply, Request, event, for_ever, line, open_loopback, recorded, sends

JOB = JobId("10-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
ENVIRONMENT = Environment(EnvironmentId(10), "image:1", 2, cpu_limit=20, memory_limit=256, executor="nomad")
REGISTERED = {"EvalID": "e1", "JobModifyIndex": 50, "Warnings": ""}
EXISTS = Reply("Enforcing job modify index 0: job already exists", 500)
MEMORY = {"NodesEvaluated": 2, "NodesExhausted": 2, "DimensionExhausted": {"memory": 2}}
DRIVERS = {"NodesEvaluated": 1, "NodesFiltered": 1, "ConstraintFiltered": {"missing drivers": 1}}


def evaluation(status: str = "complete", name: str = "e1", **more: Any) -> dict[str, Any]:
    return {"ID": name, "JobID": JOB, "CreateIndex": 50, "Status": status, "TriggeredBy": "job-register", **more}


@asynccontextmanager
async def opened(**changes: Any) -> AsyncIterator[tuple[NomadExecutor, Loopback]]:
    fast = {"evaluation_timeout": 5.0, "evaluation_look_ups": 0.005, "driver_retry": 0.005, "headers_within": 0.05}
    async with open_loopback() as nomad:
        nomad.on("PUT", "/v1/jobs", Reply(REGISTERED))
        nomad.on("GET", "/v1/evaluation/e1", Reply(evaluation()))
        with trio.fail_after(20):
            async with open_nomad(NomadSettings(**{"address": nomad.url, **fast, **changes})) as executor:
                yield executor, nomad


def registrations(nomad: Loopback) -> Sequence[Any]:
    return [request.body for request in nomad.asked("PUT", "/v1/jobs")]


def meta(job: Any) -> Any:
    return next(group for group in job["TaskGroups"] if group["Name"] == "config")["Meta"]


async def test_it_is_all_that_the_shell_asks_for() -> None:
    async with opened() as (executor, _):
        port: Executor = executor
        assert isinstance(port, KeepsRecords)
        assert isinstance(port, KeepsTemplates)
        assert isinstance(port, ListsJobs)
        assert (port.name, port.settle, port.list_interval, port.start_timeout) == ("nomad", 3.0, 300.0, 300.0)


async def test_opening_never_waits_for_nomad() -> None:
    with trio.fail_after(20):
        async with open_nomad(NomadSettings(address="http://192.0.2.1:4646")):
            pass


# Starting


async def test_a_start_registers_the_job_only_if_it_is_not_there_and_tells_its_index() -> None:
    async with opened() as (executor, nomad):
        assert await executor.start(JOB, ENVIRONMENT) == 50
        [body] = registrations(nomad)
        assert (body["EnforceIndex"], body["JobModifyIndex"]) == (True, 0)
        assert body["Job"]["ID"] == JOB
        assert meta(body["Job"]) == {"used": "false"}


async def test_an_evaluation_that_the_stream_tells_of_before_the_answer_is_not_asked_for() -> None:
    told = trio.Event()
    heard = line(50, event("Evaluation", **evaluation()))

    async def stream(request: Request) -> None:
        await told.wait()
        await sends(heard, then=for_ever)(request)

    async def register(_request: Request) -> Reply:
        told.set()
        await trio.sleep(0.05)
        return Reply(REGISTERED)

    async with opened(evaluation_look_ups=5.0) as (executor, nomad):
        nomad.on("GET", "/v1/event/stream", stream)
        nomad.on("PUT", "/v1/jobs", register)
        async with executor.follow(None) as batches, trio.open_nursery() as nursery:

            async def apply() -> None:
                async for _ in batches:
                    pass

            nursery.start_soon(apply)
            with trio.fail_after(20):
                assert await executor.start(JOB, ENVIRONMENT) == 50
            nursery.cancel_scope.cancel()
        assert not nomad.asked("GET", "/v1/evaluation/e1")


async def test_without_a_stream_the_evaluation_is_looked_up_until_it_has_ended() -> None:
    async with opened() as (executor, nomad):
        nomad.on(
            "GET",
            "/v1/evaluation/e1",
            Reply("eval not found", 404),
            Reply("No cluster leader", 500),
            Reply(evaluation("pending")),
            Reply(evaluation()),
        )
        assert await executor.start(JOB, ENVIRONMENT) == 50
        assert len(nomad.asked("GET", "/v1/evaluation/e1")) == 4


async def test_an_evaluation_that_takes_too_long_holds_up_nobody() -> None:
    async with opened(evaluation_timeout=0.1) as (executor, nomad):
        nomad.on("GET", "/v1/evaluation/e1", Reply(evaluation("pending")))
        with trio.fail_after(20):
            assert await executor.start(JOB, ENVIRONMENT) == 50


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (MEMORY, "memory exhausted on 2 nodes"),
        ({"NodesEvaluated": 1, "DimensionExhausted": {"cpu": 1}}, "cpu exhausted on 1 node"),
        (
            {"NodesEvaluated": 3, "NodesFiltered": 3, "ConstraintFiltered": {"${attr.cpu.arch} = arm": 3}},
            "${attr.cpu.arch} = arm (3 nodes filtered)",
        ),
        ({"NodesAvailable": {"dc1": 0}}, "no eligible node in dc1"),
        ({"NodesEvaluated": 2, "NodesFiltered": 2}, "no node fits (2 of 2 nodes filtered)"),
        ({"QuotaExhausted": ["memory"], "NodesEvaluated": 1, "NodesExhausted": 1}, "quota exhausted: memory"),
    ],
)
async def test_a_job_without_room_says_what_is_exhausted(metric: dict[str, Any], words: str) -> None:
    async with opened() as (executor, nomad):
        failed = evaluation(FailedTGAllocs={"default-group": metric}, BlockedEval="b")
        nomad.on("GET", "/v1/evaluation/e1", Reply(failed))
        with pytest.raises(PlacementFailed) as caught:
            await executor.start(JOB, ENVIRONMENT)
        assert words in caught.value.message
        assert len(registrations(nomad)) == 1


async def test_a_recorded_placement_failure_is_understood() -> None:
    raw = Path(__file__).parent.parent / "recordings" / "h_impossible_constraint_batch.ndjson"
    chunks = [
        json.dumps(entry["line"]).encode() + b"\n"
        for entry in map(json.loads, raw.read_text().splitlines())
        if isinstance(entry.get("line"), dict)
    ]
    evaluations = [
        event["Payload"]["Evaluation"]
        for chunk in chunks
        for event in json.loads(chunk).get("Events", ())
        if event["Topic"] == "Evaluation"
    ]
    register = next(each for each in evaluations if each["TriggeredBy"] == "job-register")
    async with opened(evaluation_look_ups=5.0) as (executor, nomad):
        nomad.on("GET", "/v1/event/stream", sends(*chunks, then=for_ever))
        nomad.on("PUT", "/v1/jobs", Reply({"EvalID": register["ID"], "JobModifyIndex": 7}))
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                async with executor.follow(None) as batches:
                    async for _ in batches:
                        pass

            nursery.start_soon(follow)
            with trio.fail_after(30), pytest.raises(PlacementFailed, match="nomad has no room: "):
                await executor.start(JobId(register["JobID"]), ENVIRONMENT)
            nursery.cancel_scope.cancel()


async def test_where_drivers_were_unhealthy_the_same_registration_is_sent_once_more() -> None:
    failed = evaluation(FailedTGAllocs={"default-group": DRIVERS}, BlockedEval="b")
    async with opened() as (executor, nomad):
        nomad.on("GET", "/v1/evaluation/e1", Reply(failed))
        nomad.on("GET", "/v1/evaluation/e2", Reply(evaluation(name="e2")))
        nomad.on("PUT", "/v1/jobs", Reply(REGISTERED), Reply({**REGISTERED, "EvalID": "e2"}))
        assert await executor.start(JOB, ENVIRONMENT) == 50
        first, second = registrations(nomad)
        assert first["Job"] == second["Job"]
        assert second["JobModifyIndex"] == 50


async def test_where_drivers_stay_unhealthy_the_start_is_given_up() -> None:
    failed = evaluation(FailedTGAllocs={"default-group": DRIVERS}, BlockedEval="b")
    async with opened() as (executor, nomad):
        nomad.on("GET", "/v1/evaluation/e1", Reply(failed))
        with pytest.raises(PlacementFailed, match="missing drivers"):
            await executor.start(JOB, ENVIRONMENT)
        assert len(registrations(nomad)) == 2


async def test_a_start_whose_answer_was_lost_is_found_and_not_made_again() -> None:
    async with opened() as (executor, nomad):
        nomad.on("PUT", "/v1/jobs", EXISTS)
        known = recorded("get_job")
        nomad.on("GET", f"/v1/job/{JOB}", known)
        nomad.on("GET", f"/v1/job/{JOB}/evaluations", recorded("get_job_evaluations"))
        ours = recorded("get_job_evaluations").body[0]["ID"]
        nomad.on("GET", f"/v1/evaluation/{ours}", recorded("get_evaluation"))
        assert await executor.start(JOB, ENVIRONMENT) == known.body["JobModifyIndex"]
        assert len(registrations(nomad)) == 1


async def test_a_lost_start_that_found_no_room_says_so_too() -> None:
    async with opened() as (executor, nomad):
        nomad.on("PUT", "/v1/jobs", EXISTS)
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"))
        failed = evaluation(FailedTGAllocs={"default-group": MEMORY})
        older = evaluation(name="e0", CreateIndex=3)
        nomad.on("GET", f"/v1/job/{JOB}/evaluations", Reply([older, failed]))
        nomad.on("GET", "/v1/evaluation/e1", Reply(failed))
        with pytest.raises(PlacementFailed):
            await executor.start(JOB, ENVIRONMENT)


async def test_a_job_that_vanishes_while_it_is_looked_for_is_asked_for_again() -> None:
    async with opened() as (executor, nomad):
        nomad.on("PUT", "/v1/jobs", EXISTS)
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job_404"))
        with pytest.raises(ExecutorUnreachable):
            await executor.start(JOB, ENVIRONMENT)


async def test_a_job_that_nomad_refuses_is_no_matter_of_trying_again() -> None:
    async with opened() as (executor, nomad):
        nomad.on("PUT", "/v1/jobs", recorded("put_jobs_mem_below_minimum"))
        with pytest.raises(ExecutorError) as caught:
            await executor.start(JOB, ENVIRONMENT)
        assert not isinstance(caught.value, ExecutorUnreachable | PlacementFailed)


async def test_without_a_leader_a_start_is_to_be_repeated() -> None:
    async with opened() as (executor, nomad):
        nomad.on("PUT", "/v1/jobs", recorded("noleader_get_jobs"))
        with pytest.raises(ExecutorUnreachable, match="no cluster leader"):
            await executor.start(JOB, ENVIRONMENT)


async def test_limits_are_checked_before_anything_is_sent() -> None:
    async with opened() as (executor, nomad):
        with pytest.raises(Unsupported, match="memoryLimit"):
            executor.check(Environment(EnvironmentId(1), "i", 1, memory_limit=5))
        assert not nomad.requests


# The template


async def test_a_template_in_hcl_is_parsed_by_nomad_once(tmp_path: Path) -> None:
    file = tmp_path / "template.hcl"
    file.write_text('job "x" {}')
    async with opened(template_job_file=str(file)) as (executor, nomad):
        nomad.on("PUT", "/v1/jobs/parse", recorded("post_jobs_parse"))
        await executor.start(JOB, ENVIRONMENT)
        await executor.put_template(ENVIRONMENT)
        [request] = nomad.asked("PUT", "/v1/jobs/parse")
        assert request.body == {"JobHCL": 'job "x" {}', "Canonicalize": False}
        runner, template = registrations(nomad)
        assert (runner["Job"]["ID"], template["Job"]["ID"]) == (JOB, "template-10")
        assert runner["Job"]["TaskGroups"][0]["Tasks"][0]["Driver"] == "raw_exec"


async def test_a_template_that_nomad_does_not_understand_is_told_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "template.hcl"
    file.write_text("job {")
    async with opened(template_job_file=str(file)) as (executor, nomad):
        nomad.on("PUT", "/v1/jobs/parse", recorded("put_jobs_parse_error"))
        with pytest.raises(ExecutorError, match=r"template\.hcl.*Unsupported argument"):
            await executor.start(JOB, ENVIRONMENT)


@pytest.mark.parametrize("text", [None, "{", b"\xff\xfe"])
async def test_a_template_file_that_cannot_be_read_is_a_configuration_error(
    tmp_path: Path, text: str | bytes | None
) -> None:
    file = tmp_path / "template.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"template\.json"):
        async with open_nomad(NomadSettings(template_job_file=str(file))):
            pass


# Stopping


async def test_the_index_of_a_stop_is_one_that_the_list_of_jobs_will_reach() -> None:
    """A deregistration of a job that isn't there is answered with an index that the jobs' table never gets."""
    async with opened() as (executor, nomad):
        nomad.on("DELETE", f"/v1/job/{JOB}", recorded("delete_job_unknown"))
        nomad.on("GET", "/v1/jobs", Reply([], index=3378))
        assert await executor.stop(JOB) == 3378
        [request] = nomad.asked("DELETE", f"/v1/job/{JOB}")
        assert request.query["purge"] == "true"


async def test_a_stop_that_fails_however_is_to_be_repeated() -> None:
    for reply in (Reply("Permission denied", 403), Reply("no", 400), Reply("gone", 404), Reply("oops", 500)):
        async with opened() as (executor, nomad):
            nomad.on("DELETE", f"/v1/job/{JOB}", reply)
            with pytest.raises(ExecutorUnreachable):
                await executor.stop(JOB)


# Marks


async def test_a_mark_is_written_with_the_index_that_it_was_read_at() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"))
        await executor.mark(JOB, used=True, timeout=60)
        [body] = registrations(nomad)
        assert (body["EnforceIndex"], body["JobModifyIndex"]) == (True, 3343)
        assert meta(body["Job"]) == {**meta(recorded("get_job").body), "used": "true", "timeout": "60"}


async def test_a_mark_that_is_there_already_or_has_no_job_is_not_written() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"))
        await executor.mark(JOB, used=False, timeout=0)
        stopped = {**recorded("get_job").body, "Stop": True}
        nomad.on("GET", f"/v1/job/{JOB}", Reply(stopped))
        await executor.mark(JOB, used=True, timeout=0)
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job_404"))
        await executor.mark(JOB, used=True, timeout=0)
        assert not registrations(nomad)


async def test_a_mark_respects_what_others_changed_in_between() -> None:
    async with opened() as (executor, nomad):
        newer = {**recorded("get_job").body, "JobModifyIndex": 4000}
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"), Reply(newer))
        nomad.on("PUT", "/v1/jobs", recorded("put_jobs_enforce_index_conflict"), Reply(REGISTERED))
        await executor.mark(JOB, used=True, timeout=60)
        assert [body["JobModifyIndex"] for body in registrations(nomad)] == [3343, 4000]


async def test_a_job_that_is_purged_while_it_is_marked_stays_purged() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"), recorded("get_job_404"))
        nomad.on("PUT", "/v1/jobs", Reply("Enforcing job modify index 3343: job does not exist", 500))
        await executor.mark(JOB, used=True, timeout=60)
        assert len(registrations(nomad)) == 1


async def test_a_job_that_changes_for_ever_is_tried_again_later() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"))
        nomad.on("PUT", "/v1/jobs", recorded("put_jobs_enforce_index_conflict"))
        with pytest.raises(ExecutorUnreachable):
            await executor.mark(JOB, used=True, timeout=60)


async def test_marks_can_be_switched_off() -> None:
    async with opened(mark_used=False) as (executor, nomad):
        await executor.mark(JOB, used=True, timeout=60)
        assert not nomad.requests


# Listings and look-ups


async def test_everything_is_listed_in_two_requests_each_table_with_its_index() -> None:
    jobs, allocations = recorded("get_jobs_prefix_10-"), recorded("docker_allocations_bridge")
    async with opened() as (executor, nomad):
        nomad.on("GET", "/v1/jobs", jobs)
        nomad.on("GET", "/v1/allocations", Reply(allocations.body, index=77))
        listing = await executor.snapshot()
        assert [seen.job for seen in listing.jobs] == [job["ID"] for job in jobs.body]
        assert (listing.jobs_index, listing.allocations_index) == (jobs.index, 77)
        assert [allocation.ports[0].exposed for allocation in listing.allocations] == [80]
        assert len(nomad.requests) == 2
        [request] = nomad.asked("GET", "/v1/allocations")
        assert (request.query["resources"], request.query["task_states"]) == ("true", "true")


async def test_the_list_of_jobs_alone_says_nothing_of_allocations() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", "/v1/jobs", recorded("get_jobs_prefix_10-"))
        found = await executor.list_jobs()
        assert found.listing.jobs_only
        assert found.listing.allocations_index == 0
        assert len(found.running) == 2
        assert len(nomad.requests) == 1


async def test_a_look_up_tells_of_the_job_its_mark_and_its_allocations() -> None:
    async with opened() as (executor, nomad):
        used = recorded("get_job")
        meta(used.body).update(used="true", timeout="180")
        nomad.on("GET", f"/v1/job/{JOB}", used)
        listed = recorded("get_job_allocations")
        nomad.on("GET", f"/v1/job/{JOB}/allocations", listed)
        nomad.on("GET", f"/v1/allocation/{listed.body[0]['ID']}", recorded("get_allocation"))
        found = await executor.look_up(JOB)
        assert (found.used, found.timeout) == (True, 180)
        assert found.listing.only == JOB
        assert found.listing.jobs[0].status is JobStatus.RUNNING
        [allocation] = found.listing.allocations
        assert allocation.client is ClientStatus.RUNNING
        assert allocation.previous is None
        assert (found.listing.jobs_index, found.listing.allocations_index) == (used.index, listed.index)


async def test_a_look_up_of_an_unknown_job_is_empty_as_of_an_index() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job_404"))
        nomad.on("GET", f"/v1/job/{JOB}/allocations", recorded("get_job_allocations_unknown_job"))
        found = await executor.look_up(JOB)
        assert (found.listing.jobs, found.listing.allocations) == ((), ())
        assert (found.listing.jobs_index, found.listing.allocations_index) == (3350, 3353)
        assert (found.used, found.timeout) == (False, None)


async def test_an_allocation_that_vanishes_during_a_look_up_is_told_as_listed() -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", f"/v1/job/{JOB}", recorded("get_job"))
        nomad.on("GET", f"/v1/job/{JOB}/allocations", recorded("get_job_allocations"))
        [allocation] = (await executor.look_up(JOB)).listing.allocations
        assert allocation.previous is UNTOLD


async def test_what_is_asked_for_in_vain_is_unreachable_never_a_crash() -> None:
    for reply in (Reply("Permission denied", 403), Reply("no", 400), Reply("oops", 500), Reply("{", 200)):
        async with opened() as (executor, nomad):
            for path in ("/v1/jobs", "/v1/allocations", f"/v1/job/{JOB}", f"/v1/job/{JOB}/allocations"):
                nomad.on("GET", path, reply)
            for ask in (executor.snapshot, executor.list_jobs, executor.environments):
                with pytest.raises(ExecutorUnreachable):
                    await ask()
            with pytest.raises(ExecutorUnreachable):
                await executor.look_up(JOB)
            with pytest.raises(ExecutorUnreachable):
                await executor.mark(JOB, used=True, timeout=1)


# Templates


async def test_environments_are_read_from_templates_of_exact_names() -> None:
    async with opened() as (executor, nomad):
        await executor.put_template(ENVIRONMENT)
        [body] = registrations(nomad)
        names = ["template-1", "template-10", "template-100", "template-foo", "template-010", "template-7"]
        stubs = [{"ID": name, "ModifyIndex": 1, "Status": "running", "Stop": name == "template-7"} for name in names]
        nomad.on("GET", "/v1/jobs", Reply(stubs))
        for number in (1, 10, 100):
            nomad.on("GET", f"/v1/job/template-{number}", Reply({**body["Job"], "ID": f"template-{number}"}))
        found = await executor.environments()
        assert [environment.id for environment in found] == [1, 10, 100]
        assert found[1] == ENVIRONMENT
        assert nomad.asked("GET", "/v1/jobs")[0].query["prefix"] == "template-"
        assert not nomad.asked("GET", "/v1/job/template-7")


async def test_a_template_that_vanishes_or_is_incomplete_is_left_out() -> None:
    async with opened() as (executor, nomad):
        stub = {"ModifyIndex": 1, "Status": "running"}
        nomad.on("GET", "/v1/jobs", Reply([{"ID": "template-1", **stub}, {"ID": "template-2", **stub}]))
        nomad.on("GET", "/v1/job/template-1", recorded("get_job_404"))
        nomad.on("GET", "/v1/job/template-2", Reply({"ID": "template-2", "TaskGroups": None}))
        assert await executor.environments() == []


def group(**fields: Any) -> dict[str, Any]:
    return {"TaskGroups": [{"Name": "default-group", **fields}]}


@pytest.mark.parametrize(
    "odd",
    [
        {"ID": 3},
        {"JobModifyIndex": None},
        {"TaskGroups": "x"},
        {"TaskGroups": [None]},
        group(Meta=[1]),
        group(Tasks=3),
        group(Tasks=[None]),
        group(Tasks=[{"Name": "default-task", "Config": "x"}]),
        group(Tasks=[{"Name": "default-task", "Resources": []}]),
        group(Tasks=[{"Name": "default-task", "Resources": {"CPU": "1"}}]),
        group(Networks="x"),
        group(Networks=[3]),
        group(Networks=[{"DynamicPorts": [3]}]),
    ],
)
async def test_a_job_of_another_shape_is_no_answer_of_nomad(odd: dict[str, Any]) -> None:
    async with opened() as (executor, nomad):
        nomad.on("GET", "/v1/jobs", Reply([{"ID": "template-1", "ModifyIndex": 1}]))
        for job in ("template-1", JOB):
            nomad.on("GET", f"/v1/job/{job}", Reply({"ID": job, "JobModifyIndex": 1, **odd}))
        with pytest.raises(ExecutorUnreachable, match="not as Nomad does"):
            await executor.environments()
        with pytest.raises(ExecutorUnreachable, match="not as Nomad does"):
            await executor.mark(JOB, used=True, timeout=3)


async def test_a_template_is_removed_for_good() -> None:
    async with opened() as (executor, nomad):
        nomad.on("DELETE", "/v1/job/template-10", recorded("delete_job_unknown"))
        await executor.remove_template(EnvironmentId(10))
        assert nomad.requests[0].query["purge"] == "true"


async def test_strange_names_are_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with opened() as (executor, nomad):
        stub = {"ModifyIndex": 1, "Status": "running"}
        nomad.on("GET", "/v1/jobs", Reply([{"ID": name, **stub} for name in ("10-strange", "others", "template-3")]))
        await executor.list_jobs()
        await executor.list_jobs()
        told = capsys.readouterr().out
        assert told.count("10-strange") == 1
        assert "others" not in told
        assert "template-3" not in told


# Nodes


async def test_a_nodes_address_is_asked_for_once_in_a_while() -> None:
    allocation = Allocation(AllocationId("a"), JOB, 1, 1, ClientStatus.RUNNING, node_id="n1")
    async with open_loopback() as nomad:
        nomad.on("GET", "/v1/node/n1", recorded("get_node"))
        async with open_client(NomadSettings(address=nomad.url, node_address_ttl=0.05)) as client:
            nodes = Nodes(client)
            for _ in range(3):
                assert await nodes.address(allocation) == "http://127.0.0.1:14633"
            assert len(nomad.requests) == 1
            await trio.sleep(0.06)
            nomad.on("GET", "/v1/node/n1", Reply("Permission denied", 403))
            assert await nodes.address(allocation) is None
            assert await nodes.address(allocation) is None
            assert len(nomad.requests) == 2


async def test_a_node_is_not_asked_for_if_executions_go_through_the_server() -> None:
    allocation = Allocation(AllocationId("a"), JOB, 1, 1, ClientStatus.RUNNING, node_id="n1")
    async with open_loopback() as nomad:
        async with open_client(NomadSettings(address=nomad.url, direct_exec=False)) as client:
            assert await Nodes(client).address(allocation) is None
        assert not nomad.requests


async def test_a_resync_of_a_thousand_runners_costs_two_requests_and_less_than_a_second() -> None:
    stub, job = recorded("docker_allocations_bridge").body[0], recorded("get_jobs_prefix_10-").body[0]
    names = [f"10-{uuid4()}" for _ in range(1000)]
    async with opened() as (executor, nomad):
        nomad.on("GET", "/v1/jobs", Reply([{**job, "ID": name} for name in names]))
        nomad.on("GET", "/v1/allocations", Reply([{**stub, "ID": str(uuid4()), "JobID": name} for name in names]))
        fleet = Fleet(settle=3.0, mint=lambda _: RunnerId("minted"))
        asked = fleet.ask(0.0)
        began = time.process_time()
        listing = await executor.snapshot()
        fleet.handle(Listed(listing, asked), 1.0)
        assert time.process_time() - began < 1.0
        assert (len(listing.jobs), len(listing.allocations), len(nomad.requests)) == (1000, 1000, 2)


# Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and a certificate of it for both sides."""
    folder = tmp_path_factory.mktemp("certificates")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    steps = [
        ["req", "-x509", *new, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"],
        ["req", "-x509", *new, *name, "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "key.pem", "-out", "cert.pem"],
    ]
    for step in steps:
        subprocess.run(["openssl", *step], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.parametrize("known", [True, False])
async def test_both_sides_show_their_certificates_for_requests_and_for_the_stream(
    certificates: Path, known: bool
) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    server.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    ours: dict[str, Any] = {
        "tls_cert_file": str(certificates / "cert.pem"),
        "tls_key_file": str(certificates / "key.pem"),
    }
    async with open_loopback(server) as nomad:
        nomad.on("GET", "/v1/jobs", recorded("get_jobs_prefix_10-"))
        heard = line(50, event("Job", ID=JOB, ModifyIndex=50, Status="running"))
        nomad.on("GET", "/v1/event/stream", sends(heard, then=for_ever))
        if known:
            ours["tls_ca_file"] = str(certificates / "ca.pem")
        with trio.fail_after(30):
            async with open_nomad(NomadSettings(address=nomad.url, **ours)) as executor:
                if known:
                    assert len((await executor.list_jobs()).listing.jobs) == 2
                    async with executor.follow(None) as batches:
                        assert len((await anext(batches)).values) == 1
                else:
                    with pytest.raises(ExecutorUnreachable, match="certificate verify failed"):
                        await executor.list_jobs()
                    with pytest.raises(ExecutorUnreachable, match="certificate verify failed"):
                        async with executor.follow(None):
                            pass

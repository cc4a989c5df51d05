"""The fake cluster answers as the real one was recorded answering: same request, same status, text and shape."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.fakes.nomad import NomadFake, open_nomad_fake

RECORDINGS = Path(__file__).parent.parent / "recordings"
FREE = {
    *("Attributes", "Meta", "Scores", "Details", "Config", "Drivers", "NodesAvailable", "DimensionExhausted", "stats"),
    *("ConstraintFiltered", "ClassEligibility", "QueuedAllocations", "ResourcesExhausted"),
}
"""Maps whose keys are names, not fields."""
OPTIONAL = {
    "LastDrain",
    "DeploymentStatus",
    "NodeNetworks",
    "Networks",
    "Addresses",
    "Tags",
    "RescheduleTracker",
    "SubmitTime",
}
"""Null or not: it depends on what happened before."""
JOB = "10-8d8eca30-cc4a-4385-94ad-b089bc8bcead"

Client = httpx.AsyncClient


def recorded(name: str) -> Any:
    return json.loads((RECORDINGS / "http" / f"{name}.json").read_text())


def differences(wanted: Any, told: Any, path: str = "") -> Iterator[str]:
    """Where the shape of *told* isn't that of *wanted*: keys and types, whatever the values."""
    leaf = path.rpartition(".")[2]
    if isinstance(wanted, dict) and isinstance(told, dict):
        if leaf in FREE:
            return
        for key in sorted(wanted.keys() | told.keys()):
            if key not in told or key not in wanted:
                yield f"{path}.{key} {'is missing' if key not in told else 'is too much'}"
            else:
                yield from differences(wanted[key], told[key], f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(told, list):
        models = wanted if len(wanted) == len(told) else wanted[:1] * len(told)
        for model, one in zip(models, told, strict=False):
            yield from differences(model, one, path)
    elif kind(wanted) != kind(told) and leaf not in OPTIONAL:
        yield f"{path} is {told!r}, not {wanted!r}"


def kind(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[NomadFake, Client]]:
    with trio.fail_after(30):
        async with open_nomad_fake(nodes=3, **options) as fake, Client(base_url=fake.url) as client:
            yield fake, client


async def send(client: Client, recording: Any, names: dict[str, str], token: str = "") -> httpx.Response:
    """The recorded request, with our ids instead of the recorded ones."""
    request = recording["request"]
    path = request["path"]
    for old, new in names.items():
        path = path.replace(old, new)
    headers = {"X-Nomad-Token": token} if token else {}
    body = request["body"]
    content = body if isinstance(body, str) else None
    return await client.request(
        request["method"], path, headers=headers, content=content, json=body if content is None and body else None
    )


def check(recording: Any, answer: httpx.Response) -> None:
    assert answer.status_code == recording["status"]
    wanted = recording["body"]
    if isinstance(wanted, str) and "application/json" not in answer.headers.get("content-type", ""):
        assert bool(answer.text) == bool(wanted)
    else:
        told = answer.json()
        assert bool(told) == bool(wanted)
        assert not list(differences(wanted, told)), "\n".join(differences(wanted, told))
    nomad_headers = {key.lower() for key in recording["headers"] if key.lower().startswith("x-nomad")}
    assert {key for key in answer.headers if key.startswith("x-nomad")} == nomad_headers
    if "Content-Type" in recording["headers"]:
        assert answer.headers["content-type"] == recording["headers"]["Content-Type"]


async def populated(fake: NomadFake, client: Client) -> dict[str, str]:
    """The recorded job, a template and another job run; the answer maps recorded ids to ours."""
    answer = await send(client, recorded("put_jobs_ok"), {})
    for job in ("template-10", "10-ba99e094-21ca-4e11-b9cd-c3408feb7eb9"):
        await client.put("/v1/jobs", json={"Job": {**recorded("get_job")["body"], "ID": job, "Name": job}})
    allocation = await fake.running(JOB)
    await fake.settled()
    return {
        "5a069b33-cd78-3604-7ad2-ba4accb5b195": allocation["ID"],
        "5a069": allocation["ID"][:5],
        "5a06": allocation["ID"][:4],
        "f77b842e-c879-563e-dfd9-223569401c48": answer.json()["EvalID"],
        "8cef247b-2f34-5fe2-985a-07794fa31a21": allocation["NodeID"],
    }


READS = [
    "get_jobs_prefix_10-",
    "get_jobs_prefix_none",
    "get_jobs_prefix_template",
    "get_job",
    "get_job_404",
    "get_job_allocations",
    "get_job_allocations_unknown_job",
    "get_job_evaluations",
    "get_job_summary",
    "get_allocation",
    "get_allocation_404",
    "get_allocation_short_id",
    "get_allocations_prefix",
    "get_allocations_prefix_odd",
    "get_allocations_task_states_false",
    "get_nodes",
    "get_node",
    "get_node_404",
    "get_node_allocations",
    "get_evaluation",
    "get_evaluation_404",
    "get_evaluation_allocations",
    "get_status_leader",
    "get_status_peers",
    "get_regions",
    "get_jobs_parse_method",
    "method_not_allowed",
    "unknown_path",
    "unknown_region",
    "unknown_namespace_jobs",
]


@pytest.mark.parametrize("name", READS)
async def test_a_read_is_answered_as_recorded(name: str) -> None:
    async with opened() as (fake, client):
        names = await populated(fake, client)
        check(recorded(name), await send(client, recorded(name), names))


WRITES = [
    "put_jobs_ok",
    "post_jobs_works_too",
    "put_jobs_id_with_slash",
    "delete_job",
    "delete_job_purge",
    "delete_job_unknown",
    "post_jobs_parse",
    "post_jobs_parse_canonicalize",
    "alloc_stop_unknown",
    "put_system_gc",
]


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_is_answered_as_recorded(name: str) -> None:
    async with opened() as (fake, client):
        names = await populated(fake, client)
        check(recorded(name), await send(client, recorded(name), names))


EXACT = [
    "put_jobs_invalid_no_groups",
    "put_jobs_no_job",
    "put_jobs_unknown_type",
    "put_jobs_memory_max_lt_memory",
    "put_jobs_mem_below_minimum",
    "put_jobs_from_parse_not_canonical",
    "put_jobs_id_with_space",
    "put_job_id_mismatch",
    "put_jobs_bad_json",
    "put_jobs_bad_namespace",
    "post_jobs_parse_empty",
    "get_job_404",
    "get_allocation_404",
    "get_allocation_short_id",
    "get_allocations_prefix_odd",
    "get_node_404",
    "get_evaluation_404",
    "unknown_region",
    "method_not_allowed",
]


@pytest.mark.parametrize("name", EXACT)
async def test_a_refusal_has_the_recorded_words(name: str) -> None:
    async with opened() as (fake, client):
        names = await populated(fake, client)
        answer = await send(client, recorded(name), names)
        assert (answer.status_code, answer.text) == (recorded(name)["status"], recorded(name)["body"])


async def test_a_job_file_is_parsed_to_the_recorded_job() -> None:
    async with opened() as (_, client):
        for name in ("post_jobs_parse", "post_jobs_parse_canonicalize"):
            answer = await send(client, recorded(name), {})
            wanted = recorded(name)["body"]
            told = answer.json()
            parsed = {key: value for key, value in told.items() if key in wanted and name == "post_jobs_parse"}
            assert parsed == (wanted if name == "post_jobs_parse" else {})


async def test_an_unknown_argument_in_a_job_file_is_refused() -> None:
    async with opened() as (_, client):
        answer = await send(client, recorded("put_jobs_parse_error"), {})
        assert answer.status_code == 400
        assert 'An argument named "nope" is not expected here.' in answer.text


async def test_a_wrong_index_refuses_a_registration() -> None:
    async with opened() as (fake, client):
        await populated(fake, client)
        answer = await send(client, recorded("put_jobs_enforce_index_conflict"), {})
        index = fake.jobs[JOB]["JobModifyIndex"]
        wanted = recorded("put_jobs_enforce_index_conflict")
        assert answer.status_code == wanted["status"]
        assert answer.text == wanted["body"].replace("3343", str(index))


async def test_the_allocations_of_a_purged_job_stay_readable() -> None:
    async with opened() as (fake, client):
        names = await populated(fake, client)
        await client.delete(f"/v1/job/{JOB}?purge=true")
        await fake.settled()
        for name in ("get_job_purged_allocations", "get_allocation_of_purged_job", "alloc_restart_dead"):
            check(recorded(name), await send(client, recorded(name), names))


async def test_earlier_allocations_are_hidden_only_after_a_purge() -> None:
    async with opened() as (fake, client):
        await populated(fake, client)
        put = recorded("put_jobs_ok")["request"]["body"]

        async def counts() -> tuple[int, int]:
            await fake.settled()
            plain, every = [await client.get(f"/v1/job/{JOB}/allocations{tail}") for tail in ("", "?all=true")]
            return len(plain.json()), len(every.json())

        await client.delete(f"/v1/job/{JOB}")
        assert await counts() == (1, 1)
        await client.put("/v1/jobs", json=put)
        assert await counts() == (2, 2)
        await client.delete(f"/v1/job/{JOB}?purge=true")
        assert await counts() == (2, 2)
        await client.put("/v1/jobs", json=put)
        assert await counts() == (1, 3)


async def test_a_bridge_network_and_its_ports_are_told_as_recorded() -> None:
    async with opened() as (fake, client):
        wanted = recorded("docker_allocation_bridge")
        job = {**wanted["Job"], "ID": JOB, "Name": JOB}
        await client.put("/v1/jobs", json={"Job": job})
        id = (await fake.running(JOB))["ID"]
        told = (await client.get(f"/v1/allocation/{id}")).json()
        assert list(differences(wanted, told)) == []
        listed = (await client.get("/v1/allocations?resources=true")).json()
        assert list(differences(recorded("docker_allocations_bridge"), listed)) == []
        of_job = (await client.get(f"/v1/job/{JOB}/allocations")).json()
        assert list(differences(recorded("docker_job_allocations_bridge"), of_job)) == []


@pytest.mark.parametrize("name", ["noleader_get_jobs", "noleader_put_jobs", "noleader_status_leader"])
async def test_without_a_leader_requests_hang_and_fail(name: str) -> None:
    async with opened() as (fake, client):
        fake.lose_leader()
        asked = trio.current_time()
        answer = await send(client, recorded(name), {})
        assert (answer.status_code, answer.text) == (500, "No cluster leader")
        assert trio.current_time() - asked >= 5 / 50
        assert (await client.get("/v1/jobs?stale")).status_code == 200


TOKEN = "7a412ec3-5abb-21aa-513f-030458f34218"


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("acl_anonymous_get_jobs", ""),
        ("acl_anonymous_put_jobs", ""),
        ("acl_anonymous_jobs_parse", ""),
        ("acl_anonymous_status_leader", ""),
        ("acl_event_stream_anonymous", ""),
        ("acl_bad_token_get_jobs", "7a412ec3-5abb-21aa-513f-000000000000"),
        ("acl_malformed_token_get_jobs", "nope"),
    ],
)
async def test_tokens_are_refused_as_recorded(name: str, token: str) -> None:
    async with opened(tokens=[TOKEN]) as (_, client):
        answer = await send(client, recorded(name), {}, token)
        assert answer.status_code == recorded(name)["status"]
        if answer.status_code != 200:
            assert answer.text == recorded(name)["body"]
        assert (await client.get("/v1/jobs", headers={"X-Nomad-Token": TOKEN})).status_code == 200


async def test_a_blocking_query_waits_for_news() -> None:
    async with opened() as (fake, client):
        await populated(fake, client)
        index = int((await client.get("/v1/jobs")).headers["x-nomad-index"])
        asked = trio.current_time()
        await client.get(f"/v1/jobs?index={index}&wait=2s")
        assert trio.current_time() - asked >= 2 / 50

"""Short requests: typed answers, bounded, and each failure told as what it is, without a secret."""

import gc
import re
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio

from poseidon.errors import ConfigError, ExecutorUnreachable
from poseidon.executors.nomad.client import (
    ALLOCATION,
    ALLOCATIONS,
    EVALUATION,
    JOB,
    JSON,
    NODE,
    REGISTERED,
    STUBS,
    Client,
    Conflict,
    NotFound,
    Refused,
    TokenRefused,
    index_of,
    open_client,
    path_of,
    shown,
)
from poseidon.executors.nomad.credentials import headers_of
from poseidon.executors.nomad.settings import NomadSettings
from tests.nomad.loopback import Loopback, Reply, Request, open_loopback, recorded

TOKEN = "5f0ba2a5-7d5c-4e3b-a1c0-000000000000"


@asynccontextmanager
async def connected(**changes: Any) -> AsyncIterator[tuple[Client, Loopback]]:
    async with open_loopback() as nomad:
        settings = NomadSettings(**{"address": nomad.url, "token": TOKEN, "request_timeout": 5.0, **changes})
        with trio.fail_after(20):
            async with open_client(settings) as client:
                yield client, nomad


async def refusal(reply: Reply) -> Exception:
    async with connected() as (client, nomad):
        nomad.on("PUT", "/v1/jobs", reply)
        with pytest.raises((ExecutorUnreachable, Refused)) as caught:
            await client.put("/v1/jobs", {}, REGISTERED)
        assert TOKEN not in str(caught.value)
        return caught.value


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("get_job", JOB),
        ("get_jobs_prefix_10-", STUBS),
        ("get_job_allocations", ALLOCATIONS),
        ("get_allocation", ALLOCATION),
        ("get_evaluation", EVALUATION),
        ("get_node", NODE),
        ("docker_allocations_bridge", ALLOCATIONS),
        ("docker_allocation_bridge", ALLOCATION),
    ],
)
async def test_recorded_answers_are_understood(name: str, decoder: Any) -> None:
    reply = recorded(name)
    async with connected() as (client, nomad):
        nomad.on("GET", "/v1/x", reply)
        answer = await client.get("/v1/x", decoder)
        assert answer.index == reply.index
        first = answer.body[0] if isinstance(answer.body, list) else answer.body
        raw = reply.body[0] if isinstance(reply.body, list) else reply.body
        assert raw["HTTPAddr"] == first.http_addr if name == "get_node" else raw["ID"] == first.id


async def test_token_namespace_and_region_go_with_each_request() -> None:
    async with connected(namespace="teaching", region="north") as (client, nomad):
        nomad.on("GET", "/v1/jobs", Reply([]))
        await client.get("/v1/jobs", STUBS, prefix="10-")
        [request] = nomad.requests
        assert request.query == {"prefix": "10-", "namespace": "teaching", "region": "north"}
        assert request.headers["x-nomad-token"] == TOKEN
        assert request.headers["accept-encoding"] == "identity"


def test_without_a_token_none_is_sent_and_settings_hide_theirs() -> None:
    assert "X-Nomad-Token" not in headers_of("")
    assert TOKEN not in repr(NomadSettings(token=TOKEN))


def test_ids_are_quoted_in_paths() -> None:
    assert path_of("job", "10/../x y") == "/v1/job/10%2F..%2Fx%20y"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("noleader_get_jobs", ExecutorUnreachable, "no cluster leader"),
        ("acl_anonymous_get_jobs", TokenRefused, "refuses the token .*Permission denied"),
        ("acl_bad_token_get_jobs", TokenRefused, "refuses the token .*ACL token not found"),
        ("acl_malformed_token_get_jobs", TokenRefused, "refuses the token"),
        ("acl_event_stream_anonymous", TokenRefused, "refuses the token"),
        ("unknown_region", ExecutorUnreachable, "No path to region"),
        ("get_job_404", NotFound, "job not found"),
        ("get_evaluation_404", NotFound, "eval not found"),
        ("put_jobs_enforce_index_conflict", Conflict, "conflicting job modify index"),
        ("put_jobs_mem_below_minimum", Refused, "minimum MemoryMB"),
        ("put_jobs_from_parse_not_canonical", Refused, "ambiguous"),
        ("put_jobs_bad_namespace", Refused, "nonexistent namespace"),
        ("put_jobs_parse_error", Refused, "Unsupported argument"),
        ("method_not_allowed", Refused, "Invalid method"),
    ],
)
async def test_each_recorded_refusal_is_told_as_what_it_is(name: str, kind: type[Exception], words: str) -> None:
    error = await refusal(recorded(name))
    assert type(error) is kind
    assert re.search(words, str(error)), str(error)


async def test_overload_and_unknown_failures_are_to_be_retried() -> None:
    for status in (429, 500, 502, 503, 302):
        assert isinstance(await refusal(Reply("busy", status)), ExecutorUnreachable)


async def test_what_is_missing_is_missing_as_of_an_index() -> None:
    error = await refusal(recorded("get_job_404"))
    assert isinstance(error, NotFound)
    assert error.index == 3350


async def test_what_is_no_answer_of_nomads_is_no_answer() -> None:
    bodies: list[object] = ["<html>", [], {"EvalID": 3}, {}]
    for body in bodies:
        error = await refusal(Reply(body))
        assert isinstance(error, ExecutorUnreachable)
        assert "not as Nomad does" in str(error)


async def test_a_list_without_an_index_is_not_from_a_nomad() -> None:
    async with connected() as (client, nomad):
        nomad.on("GET", "/v1/jobs", Reply([], index=None))
        with pytest.raises(ExecutorUnreachable, match="no index"):
            await client.get_list("/v1/jobs", len)


async def test_a_cluster_that_never_had_a_job_is_one_with_index_zero() -> None:
    """Seen with Nomad 2.0: the tables of a new cluster have index 0."""
    async with connected() as (client, nomad):
        nomad.on("GET", "/v1/jobs", Reply([], index=0))
        assert (await client.get_list("/v1/jobs", len)).index == 0


async def test_nobody_there_is_unreachable() -> None:
    async with open_loopback() as nomad:
        url = nomad.url
    async with open_client(NomadSettings(address=url, token=TOKEN)) as client:
        with trio.fail_after(30), pytest.raises(ExecutorUnreachable, match="can't be reached") as caught:
            await client.get("/v1/jobs", STUBS)
    assert TOKEN not in str(caught.value)


async def test_what_is_not_http_is_unreachable() -> None:
    async def talk(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/9.9 maybe\r\n\r\n")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, talk, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with open_client(NomadSettings(address=url)) as client:
            with trio.fail_after(30), pytest.raises(ExecutorUnreachable, match="can't be reached"):
                await client.get("/v1/jobs", STUBS)
        nursery.cancel_scope.cancel()


async def test_an_answer_that_does_not_come_is_given_up() -> None:
    async def stall(_request: Request) -> None:
        await trio.sleep_forever()

    async with connected(request_timeout=0.05) as (client, nomad):
        nomad.on("GET", "/v1/jobs", stall)
        with trio.fail_after(30), pytest.raises(ExecutorUnreachable, match="didn't answer in time"):
            await client.get("/v1/jobs", STUBS)


async def test_no_more_requests_than_allowed_are_under_way() -> None:
    under_way, most = 0, 0

    async def answer(_request: Request) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await trio.sleep(0.01)
        under_way -= 1
        return Reply([])

    async with connected(limiter=3) as (client, nomad), trio.open_nursery() as nursery:
        nomad.on("GET", "/v1/jobs", answer)
        for _ in range(12):
            nursery.start_soon(client.get, "/v1/jobs", STUBS)
    assert most == 3
    assert nomad.connections <= 3


async def test_a_request_that_is_given_up_while_it_is_sent_leaves_nothing_to_clean_up() -> None:
    async def never_read(_stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    with trio.fail_after(20), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, never_read, 0, host="127.0.0.1"))
            url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            async with open_client(NomadSettings(address=url, request_timeout=0.1)) as client:
                with pytest.raises(ExecutorUnreachable, match="in time"):
                    await client.put("/v1/jobs", {"filler": "x" * 20_000_000}, REGISTERED)
                gc.collect()
            nursery.cancel_scope.cancel()
    assert [str(each.message) for each in warned] == []


async def test_requests_cancelled_at_any_moment_never_block_later_ones() -> None:
    """httpx's own limit of connections loses a place for ever when a request is cancelled as its turn comes."""
    random = Random(1)

    async def slow(_request: Request) -> Reply:
        await trio.sleep(0.001)
        return Reply([])

    async def ask_and_cancel(client: Client, until: float) -> None:
        while trio.current_time() < until:
            with trio.move_on_after(random.random() * 0.006):
                await client.get("/v1/jobs", STUBS)

    async with connected(limiter=5) as (client, nomad):
        nomad.on("GET", "/v1/jobs", slow)
        with trio.move_on_after(5):
            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    nursery.start_soon(ask_and_cancel, client, trio.current_time() + 0.4)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(client.get, "/v1/jobs", STUBS)


@pytest.mark.parametrize("index", ["9" * 19, "9" * 5000, "-1", "²"])
def test_an_index_beyond_all_bounds_is_none(index: str) -> None:
    assert index_of(httpx.Response(200, headers=httpx.Headers({"X-Nomad-Index": index}, encoding="latin-1"))) == 0


@pytest.mark.parametrize("number", ["9" * 19, "9" * 400, "-" + "9" * 19, "1e3"])
async def test_a_number_beyond_all_bounds_is_no_answer_of_nomad(number: str) -> None:
    body = f'{{"ID": "x", "ModifyIndex": {number}}}'
    async with connected() as (client, nomad):
        nomad.on("GET", "/v1/job/x", Reply(body=body, index=5))
        with pytest.raises(ExecutorUnreachable, match="not as Nomad does"):
            await client.get("/v1/job/x", JOB)


def test_what_somebody_says_is_made_fit_for_a_message() -> None:
    assert shown(b"a\r\n\x1b[31mb\xff\t" + b"c" * 5000).startswith("a [31mb\ufffd ccc")
    assert len(shown(b"c" * 5000)) == 300


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:4646", "ftp://x", "http://", "http://x/v1", "http://x?y=1"),
        *("http://x:99999", "http://x:y", "http://[::1", "http://a..b", f"http://{'x' * 64}", "http://℀.x"),
    ],
)
def test_an_address_is_a_url_of_a_host(address: str) -> None:
    with pytest.raises(ConfigError, match=r"nomad\.address"):
        NomadSettings(address=address)


async def test_certificates_that_cannot_be_read_are_configuration_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="both"):
        NomadSettings(tls_cert_file="x")
    for changes in (
        {"tls_ca_file": str(tmp_path / "none.pem")},
        {"tls_ca_file": str(tmp_path / "bad.pem")},
        {"tls_cert_file": str(tmp_path / "bad.pem"), "tls_key_file": str(tmp_path / "bad.pem")},
    ):
        with pytest.raises(ConfigError, match=r"nomad\.tls"):
            async with open_client(NomadSettings(address="https://127.0.0.1:1", **changes)):  # type: ignore[arg-type]
                pass


async def test_with_https_certificates_are_checked() -> None:
    async with open_client(NomadSettings(address="https://127.0.0.1:1")) as client:
        assert client.credentials.tls is not None
        assert client.credentials.tls.verify_mode is ssl.CERT_REQUIRED


async def test_json_is_passed_on_as_it_is() -> None:
    async with connected() as (client, nomad):
        nomad.on("GET", "/v1/job/x", recorded("get_job"))
        assert (await client.get("/v1/job/x", JSON)).body == recorded("get_job").body

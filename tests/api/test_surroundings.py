"""How we are called from outside, and whom we believe: proxies, pages of other sites, names of hosts."""

import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from quart import request
from quart_trio import QuartTrio
from websockets.exceptions import InvalidStatus
from websockets.trio.client import connect
from werkzeug.datastructures import Headers

from poseidon.api.pace import MOST_BUCKETS, Pace
from poseidon.api.server import ServerLimits, serve
from poseidon.api.surroundings import Surroundings
from tests.api.service import Service, connected, open_service, read

BEHIND = Surroundings(trusted_proxies=(ip_network("127.0.0.0/8"),))
ELSEWHERE = Surroundings(trusted_proxies=(ip_network("10.0.0.0/8"),))


@asynccontextmanager
async def opened(folder: Path, surroundings: Surroundings | None = None) -> AsyncIterator[tuple[Service, str]]:
    async with open_service(folder, surroundings=surroundings, token="secret") as service:
        await service.put(1)
        yield service, await service.claim()


async def url_of(service: Service, runner: str, headers: dict[str, str]) -> str:
    """The beginning of the address that is given for a WebSocket."""
    answer = await service.http.post(f"/runners/{runner}/execute", json={"command": "true"}, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["websocketUrl"]).partition("/api/v1/")[0]


# How we are called


FORWARDED = [
    ({}, "ws://own:1"),
    ({"X-Forwarded-Proto": "https"}, "wss://own:1"),
    ({"X-Forwarded-Proto": "wss"}, "wss://own:1"),
    ({"X-Forwarded-Proto": "https", "X-Forwarded-Host": "ex.org"}, "wss://ex.org"),
    ({"X-Forwarded-Host": "ex.org:8443", "X-Forwarded-Prefix": "/a/b/"}, "ws://ex.org:8443/a/b"),
    ({"X-Forwarded-Host": "spoofed.org, ex.org", "X-Forwarded-Proto": "http,https"}, "wss://ex.org"),
    ({"X-Forwarded-Host": "[2001:db8::1]:9"}, "ws://[2001:db8::1]:9"),
    ({"Forwarded": 'for=1.2.3.4, for="[::1]";proto=https;host="ex.org"'}, "wss://ex.org"),
    ({"Forwarded": "proto=http;host=spoofed.org", "X-Forwarded-Proto": "https"}, "wss://own:1"),
    ({"X-Forwarded-Host": 'evil"><', "X-Forwarded-Proto": "gopher", "X-Forwarded-Prefix": "//evil"}, "ws://own:1"),
    ({"X-Forwarded-Host": "a@b", "X-Forwarded-Prefix": "/%0d%0a"}, "ws://own:1"),
    ({"X-Forwarded-Host": "[::", "Forwarded": "=;=,"}, "ws://own:1"),
]


async def test_a_trusted_proxy_tells_how_we_are_called(tmp_path: Path) -> None:
    async with opened(tmp_path, BEHIND) as (service, runner):
        for headers, url in FORWARDED:
            assert await url_of(service, runner, {"Host": "own:1", **headers}) == url, headers


@pytest.mark.parametrize("surroundings", [None, ELSEWHERE])
async def test_nobody_else_is_believed(tmp_path: Path, surroundings: Surroundings | None) -> None:
    async with opened(tmp_path, surroundings) as (service, runner):
        for headers, _ in FORWARDED:
            assert await url_of(service, runner, {"Host": "own:1", **headers}) == "ws://own:1", headers


async def test_the_base_url_comes_before_all_else(tmp_path: Path) -> None:
    surroundings = Surroundings("https://ex.org/code", BEHIND.trusted_proxies)
    async with opened(tmp_path, surroundings) as (service, runner):
        for headers, _ in FORWARDED:
            assert await url_of(service, runner, {"Host": "own:1", **headers}) == "wss://ex.org/code"


@pytest.mark.parametrize("host", ["", "a b", "x\\y", "[::", "h:99999", "a@b"])
async def test_a_name_that_is_none_gives_way_to_our_address(tmp_path: Path, host: str) -> None:
    async with opened(tmp_path) as (service, runner):
        own = service.url.removeprefix("http://").removesuffix("/api/v1")
        assert await url_of(service, runner, {"Host": host}) == f"ws://{own}"


async def test_behind_a_real_proxy_the_address_leads_back_through_it(tmp_path: Path) -> None:
    async with opened(tmp_path, BEHIND) as (service, runner), proxied(service, "/code") as outside:
        answer = await httpx_post(f"{outside}/code/api/v1/runners/{runner}/execute", {"command": "echo through"})
        assert answer["websocketUrl"].startswith(f"{outside.replace('http', 'ws')}/code/api/v1/")
        async with connected(answer["websocketUrl"], token="secret") as socket:
            assert (await read(socket)).text() == "through\r\n"


async def httpx_post(url: str, body: object) -> dict[str, str]:
    async with httpx.AsyncClient(trust_env=False, headers={"Poseidon-Token": "secret"}) as http:
        answer = await http.post(url, content=json.dumps(body))
        assert answer.status_code == 200, answer.text
        found: dict[str, str] = answer.json()
        return found


@asynccontextmanager
async def proxied(service: Service, prefix: str) -> AsyncIterator[str]:
    """A proxy that cuts off *prefix* and says so, as the usual ones do; its address."""
    ours = httpx.URL(service.url)

    async def serve(client: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await client.receive_some()
        line, _, rest = head.partition(b"\r\n")
        host = next(each for each in rest.split(b"\r\n") if each.lower().startswith(b"host:"))[5:].strip()
        said = b"X-Forwarded-Host: %s\r\nX-Forwarded-Prefix: %s\r\nConnection: close\r\n" % (host, prefix.encode())
        if b"upgrade" in rest.lower():
            said = said.replace(b"Connection: close\r\n", b"")
        server = await trio.open_tcp_stream(str(ours.host), int(ours.port or 0))
        async with server, client, trio.open_nursery() as both:
            await server.send_all(line.replace(prefix.encode(), b"", 1) + b"\r\n" + said + rest)
            both.start_soon(pump, client, server)
            await pump(server, client)
            both.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def pump(source: trio.SocketStream, target: trio.SocketStream) -> None:
    try:
        async for data in source:
            await target.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


# Pages of other sites


ORIGINS = [
    ("http://evil.example", 403),
    ("null", 403),
    ("", 403),
    ("http://[", 403),
    ("http://own:1@evil.example", 403),
    ("http://own:1", 200),
    ("http://OWN:1", 200),
    ("https://learn.example.org", 200),
    ("http://learn.example.org", 403),
    ("https://learn.example.org.evil.example", 403),
]


async def test_pages_of_other_sites_are_refused(tmp_path: Path) -> None:
    surroundings = Surroundings(allowed_origins=("https://learn.example.org",))
    async with opened(tmp_path, surroundings) as (service, runner):
        for origin, status in ORIGINS:
            headers = {"Origin": origin, "Host": "own:1"}
            answer = await service.http.get("/runners", headers=headers)
            assert answer.status_code == status, origin
            assert "Access-Control-Allow-Origin" not in answer.headers
            url = await service.execute(runner, "true")
            if status == 403:
                refused = {"Origin": origin, "Poseidon-Token": "secret"}
                assert await handshake_status(url, refused) == 403
                assert await handshake_status(url, {"Poseidon-Token": "secret"}) == 101  # it wasn't used up
        assert (await service.http.get("/health", headers={"Origin": "http://evil.example"})).status_code == 204


async def test_the_scheme_s_own_port_may_be_left_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as (service, _):
        for host, origin in (("own:80", "http://own"), ("own", "http://own:80"), ("own:443", "https://own")):
            answer = await service.http.get("/runners", headers={"Host": host, "Origin": origin})
            assert answer.status_code == 200, origin


async def test_behind_a_proxy_our_own_pages_are_those_of_its_name(tmp_path: Path) -> None:
    for surroundings, status in ((BEHIND, 200), (ELSEWHERE, 403)):
        (tmp_path / str(status)).mkdir()
        async with opened(tmp_path / str(status), surroundings) as (service, _):
            headers = {"X-Forwarded-Host": "ex.org", "Origin": "https://ex.org"}
            assert (await service.http.get("/runners", headers=headers)).status_code == status


async def handshake_status(url: str, headers: dict[str, str]) -> int:
    try:
        async with connect(url, additional_headers=headers, compression=None, proxy=None) as opened:
            await read(opened)
            return 101
    except InvalidStatus as error:
        return error.response.status_code


# Names of hosts


HOSTS = [
    ("127.0.0.1:7200", 200),
    ("[::1]:7200", 200),
    ("192.168.3.4", 200),
    ("localhost:7200", 200),
    ("a.localhost", 200),
    ("poseidon", 200),
    (socket.gethostname(), 200),
    ("rebound.evil.example", 421),
    ("rebound.evil.example.", 421),
    ("127.0.0.1.evil.example", 421),
    ("a b.c", 421),
    ("[", 421),
]


async def test_without_a_token_only_names_that_are_ours_are_answered(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        for host, status in HOSTS:
            answer = await service.http.get("/runners", headers={"Host": host})
            assert answer.status_code == status, host
            assert (await service.http.get("/health", headers={"Host": host})).status_code == 204
        assert await handshake_status(f"{service.url.replace('http', 'ws')}/runners/x/websocket", {}) == 410


async def test_with_a_token_any_name_is_answered(tmp_path: Path) -> None:
    async with open_service(tmp_path, token="secret") as service:
        for host, _ in HOSTS:
            assert (await service.http.get("/runners", headers={"Host": host})).status_code == 200, host


@pytest.mark.parametrize(
    "surroundings", [Surroundings("https://ex.org:8443/a"), Surroundings(allowed_origins=("https://ex.org",))]
)
async def test_a_name_in_the_configuration_is_ours(tmp_path: Path, surroundings: Surroundings) -> None:
    async with open_service(tmp_path, surroundings=surroundings) as service:
        assert (await service.http.get("/runners", headers={"Host": "ex.org"})).status_code == 200


# How often


def test_a_bucket_fills_up_again() -> None:
    pace = Pace(rate=2, burst=3)
    assert [pace.take("a", 100.0) for _ in range(5)] == [0, 0, 0, 0.5, 0.5]
    assert pace.take("b", 100.0) == 0
    assert pace.take("a", 100.5) == 0
    assert pace.take("a", 100.5) == 0.5
    assert [pace.take("a", 200.0) for _ in range(4)] == [0, 0, 0, 0.5]


def test_many_clients_cost_bounded_memory() -> None:
    pace = Pace(rate=1, burst=1)
    for number in range(MOST_BUCKETS + 100):
        pace.take(str(number), 0.0)
    assert len(pace._buckets) == MOST_BUCKETS


async def test_who_starts_too_much_is_told_when_to_come_back_and_may_still_clear_up(tmp_path: Path) -> None:
    async with open_service(tmp_path, pace=Pace(rate=0.001, burst=2)) as service:
        await service.put(2)
        runner = await service.claim()
        url = await service.execute(runner, "true")
        answer = await service.http.post("/runners", json={"executionEnvironmentId": 1})
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
        assert int(answer.headers["Retry-After"]) > 1
        assert (await service.http.post(f"/runners/{runner}/execute", json={"command": ""})).status_code == 500
        async with connected(url) as socket:
            assert (await read(socket)).code == 1000
        assert (await service.patch(runner, {"a": b"b"})).status_code == 204
        assert (await service.http.get("/runners")).status_code == 200
        assert (await service.http.delete(f"/runners/{runner}")).status_code == 204


async def test_clients_are_told_apart_by_address_also_behind_proxies(tmp_path: Path) -> None:
    for surroundings, statuses in ((BEHIND, [404, 404, 500, 404]), (ELSEWHERE, [404, 500, 500, 500])):
        (tmp_path / str(statuses[1])).mkdir()
        pace = Pace(rate=0.001, burst=1)
        async with open_service(tmp_path / str(statuses[1]), surroundings=surroundings, pace=pace) as service:
            seen = []
            for client in ("9.9.9.9, 1.1.1.1", "2.2.2.2", "5.5.5.5, 1.1.1.1, 127.0.0.9", "[2001:db8::1]:55"):
                answer = await service.http.post("/runners", json={}, headers={"X-Forwarded-For": client})
                seen.append(answer.status_code)
            assert seen == statuses


# Hostile headers, and sockets in the file system


@dataclass
class Asked:
    """As much of a request as counts here."""

    headers: Headers
    scope: dict[str, object]
    scheme: str = "http"


NAMES = ["Host", "Origin", "Forwarded", *(f"X-Forwarded-{each}" for each in ("Proto", "Host", "Prefix", "For"))]
PIECES = st.sampled_from(["http://", *'[]:/,;"@%\x9b', "::1", "a.b", "for=", "host="])
LETTERS = st.characters(max_codepoint=255, exclude_characters="\r\n")
TEXTS = st.text(LETTERS, max_size=20) | st.lists(PIECES, max_size=8).map("".join)
EVERYBODY = Surroundings("", (ip_network("0.0.0.0/0"), ip_network("::/0")), True, ("https://ex.org",))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS), st.sampled_from([("1.2.3.4", 5), ("::1", 5), None]))
def test_no_header_is_too_strange(headers: dict[str, str], client: tuple[str, int] | None) -> None:
    asked: Any = Asked(Headers(headers), {"client": client, "server": ("::1", 7200)})
    for surroundings in (EVERYBODY, Surroundings()):
        url = surroundings.called(asked).websocket
        assert re.fullmatch(r"wss?://[\[\]A-Za-z0-9._:-]+(/[A-Za-z0-9._~-]+)*", url)
        assert urlsplit(url).hostname
        address = surroundings.client(asked)
        assert address == "unix" or str(ip_address(address)) == address
        assert surroundings.is_own(headers.get("Origin", ""), asked) in {True, False}
        assert surroundings.knows(headers.get("Host", "")) in {True, False}


@pytest.mark.parametrize("trusts", [True, False])
async def test_a_proxy_may_come_by_a_socket_in_the_file_system(tmp_path: Path, trusts: bool) -> None:
    surroundings = Surroundings(trusts_unix=trusts)
    app = QuartTrio(__name__)

    @app.get("/")
    async def tell() -> dict[str, str]:
        asked = request._get_current_object()  # type: ignore[attr-defined]
        return {"url": surroundings.called(asked).websocket, "client": surroundings.client(asked)}

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, app, [listener], ServerLimits(), shutdown=trio.Event(), grace=0))
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "socket"))
        async with httpx.AsyncClient(transport=transport, base_url="http://own") as http:
            said = {"X-Forwarded-For": "9.8.7.6", "X-Forwarded-Host": "ex.org"}
            expected = ("ws://ex.org", "9.8.7.6") if trusts else ("ws://own", "unix")
            assert tuple((await http.get("/", headers=said)).json().values()) in {expected, expected[::-1]}
        nursery.cancel_scope.cancel()

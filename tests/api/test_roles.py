"""Who may do what: every route and every role."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from poseidon.api.auth import Key, Keyring
from tests.api.service import Service, connected, open_service, read
from tests.api.test_routes import ROUTES

ADMIN, CLIENT, READER = ("admin",), ("admin", "client"), ("admin", "read-only")
ALL = ("admin", "client", "read-only")
TABLE: dict[tuple[str, str], Sequence[str]] = {
    ("GET", "/statistics/execution-environments"): ALL,
    ("GET", "/execution-environments"): ALL,
    ("GET", "/execution-environments/1"): ALL,
    ("PUT", "/execution-environments/1"): ADMIN,
    ("DELETE", "/execution-environments/1"): ADMIN,
    ("POST", "/runners"): CLIENT,
    ("GET", "/runners"): READER,
    ("GET", "/runners/x"): ALL,
    ("DELETE", "/runners/x"): CLIENT,
    ("PATCH", "/runners/x/files"): CLIENT,
    ("GET", "/runners/x/files"): CLIENT,
    ("GET", "/runners/x/files/raw"): CLIENT,
    ("POST", "/runners/x/execute"): CLIENT,
    ("GET", "/runners/x/websocket"): CLIENT,
    ("POST", "/runs"): CLIENT,
    ("GET", "/status"): READER,
    ("GET", "/openapi.json"): ALL,
    ("GET", "/websocket-schema.json"): ALL,
    ("GET", "/docs"): ALL,
    ("GET", "/docs/start.js"): ALL,
    ("GET", "/docs/x"): ALL,
}
"""Which roles may; health and version are for everybody. A route that you add wants a line here: who may use it?"""
KEYS = [Key(f"the {role}", role, sha256(f"{role}-token".encode()).digest()) for role in ALL]  # type: ignore[arg-type]


def headers(role: str) -> dict[str, str]:
    return {"Poseidon-Token": f"{role}-token"}


def test_it_is_settled_for_every_route_who_may_use_it() -> None:
    assert set(TABLE) == set(ROUTES)


async def test_each_role_may_do_what_is_written_and_nothing_else(tmp_path: Path) -> None:
    async with (
        open_service(tmp_path, keys=KEYS) as service,
        httpx.AsyncClient(base_url=service.url, trust_env=False) as http,
    ):
        for (method, path), roles in TABLE.items():
            assert (await http.request(method, path)).status_code == 401, (method, path)
            for role in ALL:
                answer = await http.request(method, path, headers=headers(role))
                if role in roles:
                    assert answer.status_code not in {401, 403}, (method, path, role)
                else:
                    assert answer.status_code == 403, (method, path, role)
                    assert set(answer.json()) == {"message"}


async def test_a_websocket_takes_the_role_too(tmp_path: Path) -> None:
    async with open_service(tmp_path, keys=KEYS, token="boss") as service:
        await service.put(1)
        url = await service.execute(await service.claim(), "true")
        for token, status in (("read-only-token", 403), ("wrong", 401), ("", 401)):
            with pytest.raises(InvalidStatus) as refused:
                async with connected(url, token=token):
                    pass
            assert refused.value.response.status_code == status
        async with connected(url, token="client-token") as socket:
            assert (await read(socket)).code == 1000


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/execution-environments?fetch=true"), ("DELETE", "/runners/x?any=true")],
)
async def test_what_reaches_beyond_a_client_takes_an_admin(tmp_path: Path, method: str, path: str) -> None:
    async with open_service(tmp_path, keys=KEYS) as service:
        for role in ("client", "read-only"):
            answer = await service.http.request(method, path, headers=headers(role))
            assert (answer.status_code, set(answer.json())) == (403, {"message"})
        assert (await service.http.request(method, path, headers=headers("admin"))).status_code != 403


async def test_unknown_paths_and_methods_tell_the_same_to_every_role(tmp_path: Path) -> None:
    async with open_service(tmp_path, keys=KEYS) as service:
        for role in ALL:
            assert (await service.http.get("/nothing", headers=headers(role))).status_code == 404
            assert (await service.http.put("/runners", headers=headers(role))).status_code == 405


async def test_a_bearer_token_is_as_good(tmp_path: Path) -> None:
    async with open_service(tmp_path, token="secret") as service:
        del service.http.headers["Poseidon-Token"]
        for given, status in (
            ("Bearer secret", 200),
            ("bearer  secret", 200),
            ("Bearer wrong", 401),
            ("Basic secret", 401),
            ("secret", 401),
        ):
            answer = await service.http.get("/runners", headers={"Authorization": given})
            assert answer.status_code == status, given


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_a_token_beyond_ascii_may_come_in_either_encoding(tmp_path: Path, encoding: str) -> None:
    async with open_service(tmp_path, token="gehört") as service:
        answer = await service.http.get("/runners", headers={b"Poseidon-Token": "gehört".encode(encoding)})
        assert answer.status_code == 200


async def test_the_hash_of_a_token_is_no_token(tmp_path: Path) -> None:
    async with open_service(tmp_path, token="secret") as service:
        digest = sha256(b"secret").hexdigest()
        for given in (digest, f"sha256:{digest}"):
            assert (await service.http.get("/runners", headers={"Poseidon-Token": given})).status_code == 401


def test_exchanged_tokens_count_at_once() -> None:
    keyring = Keyring(KEYS[:1])
    assert keyring.find("admin-token") == KEYS[0]
    keyring.exchange(KEYS[1:])
    assert (keyring.find("admin-token"), keyring.find("client-token")) == (None, KEYS[1])


async def test_the_log_has_the_name_of_the_token_and_never_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_service(tmp_path, keys=KEYS) as service:
        await _talk(service)
    out = capsys.readouterr().out
    assert "the client" in out and "the admin" in out
    assert "-token" not in out.replace("Poseidon-Token", "")


async def _talk(service: Service) -> None:
    body = json.dumps({"executionEnvironmentId": 1})
    for role in ALL:
        await service.http.post("/runners", content=body, headers=headers(role))
        await service.http.get("/runners", headers={"Authorization": f"Bearer {role}-token"})
    await service.http.get("/runners", headers={"Poseidon-Token": "mistyped-token"})


async def test_refused_tokens_are_told_with_the_address_but_not_each_of_a_flood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_service(tmp_path, token="secret") as service:
        for _ in range(20):
            await service.http.get("/runners", headers={"Poseidon-Token": "wrong"})
        with pytest.raises(InvalidStatus):
            async with connected(f"{service.url.replace('http', 'ws')}/runners/x/websocket"):
                pass
    told = [line for line in capsys.readouterr().out.splitlines() if "token refused" in line]
    assert 1 <= len(told) < 10
    assert all("127.0.0.1" in line and "warning" in line for line in told)

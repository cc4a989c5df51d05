"""The cluster's token and certificates are replaced without a restart."""

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio

from poseidon.config import load_config
from poseidon.core.command import Command
from poseidon.errors import ConfigError, ExecutorUnreachable
from poseidon.executors.nomad.client import JSON, REGISTERED, Client, open_client
from poseidon.executors.nomad.executor import open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.opening import nomad_settings, read_token
from tests.certificates import Authority
from tests.fakes.nomad import open_nomad_fake
from tests.logs import undone
from tests.nomad.loopback import Loopback, Reply, Request, open_loopback
from tests.nomad.test_cluster import settings
from tests.runners.shell import ONE, open_rig, until

__all__ = ["undone"]

OLD, NEW = str(UUID(int=1)), str(UUID(int=2))


@dataclass
class Keeper:
    """Where the token is kept."""

    token: str = OLD
    failure: ConfigError | None = None
    read: int = 0
    refused: int = 0
    seen: list[str] = field(default_factory=list)

    def renew(self) -> str:
        self.read += 1
        if self.failure is not None:
            raise self.failure
        return self.token

    async def answer(self, request: Request) -> Reply:
        self.seen.append(request.headers["x-nomad-token"])
        if self.seen[-1] == NEW:
            return Reply({"EvalID": "e", "JobModifyIndex": 5, "Warnings": ""})
        self.refused += 1
        return Reply("Permission denied", 403)


@asynccontextmanager
async def connected(keeper: Keeper) -> AsyncIterator[tuple[Client, Loopback]]:
    async with open_loopback() as nomad:
        nomad.on("GET", "/v1/job/x", keeper.answer)
        nomad.on("PUT", "/v1/jobs", keeper.answer)
        with trio.fail_after(20):
            async with open_client(NomadSettings(address=nomad.url, token=OLD), keeper.renew) as client:
                yield client, nomad


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_refused_token_is_read_anew_and_the_request_repeated(method: str) -> None:
    keeper = Keeper(token=NEW)
    async with connected(keeper) as (client, _):
        if method == "GET":
            await client.get("/v1/job/x", JSON)
        else:
            await client.put("/v1/jobs", {}, REGISTERED)
        assert keeper.seen == [OLD, NEW]
        await client.get("/v1/job/x", JSON)
        assert keeper.seen == [OLD, NEW, NEW]
        assert keeper.read == 1


async def test_many_that_are_refused_at_once_read_it_once() -> None:
    keeper = Keeper(token=NEW)
    async with connected(keeper) as (client, _), trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(client.get, "/v1/job/x", JSON)
    assert keeper.read == 1
    assert keeper.seen.count(NEW) == 10


async def test_a_stream_that_refuses_the_token_is_followed_with_the_new_one_the_next_time() -> None:
    keeper = Keeper(token=NEW)
    async with open_loopback() as nomad:
        nomad.on("GET", "/v1/event/stream", keeper.answer)
        wanted = NomadSettings(address=nomad.url, token=OLD, headers_within=5)
        with trio.fail_after(20):
            async with open_nomad(wanted, keeper.renew) as executor:
                with pytest.raises(ExecutorUnreachable, match="refuses the token"):
                    async with executor.follow(None):
                        pass
                async with executor.follow(None):
                    assert keeper.seen == [OLD, NEW]


@pytest.mark.parametrize("failure", [None, ConfigError("no such file")])
async def test_where_there_is_no_other_token_the_refusal_is_told(failure: ConfigError | None) -> None:
    keeper = Keeper(failure=failure)
    async with connected(keeper) as (client, _):
        for _ in range(3):
            with pytest.raises(ExecutorUnreachable, match="refuses the token") as caught:
                await client.get("/v1/job/x", JSON)
            assert OLD not in str(caught.value)
        assert keeper.refused == 3
        assert keeper.read == 1


async def test_a_token_is_replaced_while_runners_are_in_use(tmp_path: Path) -> None:
    keeper = Keeper()
    with trio.fail_after(60):
        async with open_nomad_fake(seed=0, speed=50, tokens=[OLD]) as fake:
            wanted = settings(fake, token=OLD, set_user="")
            async with open_nomad(wanted, keeper.renew) as executor, open_rig(tmp_path, executor) as rig:  # type: ignore[arg-type]
                await rig.put(1, executor="nomad", cpu_limit=20, memory_limit=100)
                await until(lambda: rig.idle() == 1, within=20)
                keeper.token = NEW
                fake.refuse_tokens(NEW)
                runner = await rig.shell.claims.claim(ONE, timeout=0)
                await until(lambda: rig.idle() == 1 and rig.shell.dispatchers["nomad"].reachable, within=20)
                _, allocation = rig.shell.claims.place(runner)
                async with executor.execute(allocation, Command(line="exit 7", privileged=True)) as process:
                    assert (await process.wait()).code == 7


def test_the_configuration_s_token_file_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undone: None
) -> None:
    for name in list(os.environ):
        if name.startswith("POSEIDON_"):
            monkeypatch.delenv(name)
    (tmp_path / "secret").write_text(OLD)
    file = tmp_path / "poseidon.toml"
    file.write_text('[nomad]\naddress = "http://127.0.0.1:1"\ntoken_file = "secret"\nexec_connections = 7\n')
    config = load_config(file, {})
    assert nomad_settings(config.nomad).exec_connections == 7
    assert read_token(config) == OLD
    (tmp_path / "secret").write_text(f"{NEW}\n")
    assert read_token(config) == NEW
    (tmp_path / "secret").unlink()
    with pytest.raises(ConfigError):
        read_token(config)


async def test_certificates_are_replaced_and_bad_ones_change_nothing(tmp_path: Path) -> None:
    known, other = Authority(tmp_path), Authority(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(known.file))
    server.load_cert_chain(known.issue())
    server.verify_mode = ssl.CERT_REQUIRED
    ours = tmp_path / "ours.pem"
    ours.write_bytes(other.issue().read_bytes())
    async with open_loopback(server) as nomad:
        nomad.on("GET", "/v1/job/x", Reply({}))
        files: dict[str, Any] = {"tls_ca_file": str(known.file), "tls_cert_file": str(ours), "tls_key_file": str(ours)}
        with trio.fail_after(20):
            async with open_client(NomadSettings(address=nomad.url, **files)) as client:
                with pytest.raises(ExecutorUnreachable, match="can't be reached"):
                    await client.get("/v1/job/x", JSON)
                ours.write_bytes(known.issue().read_bytes())
                client.credentials.use("")
                await client.get("/v1/job/x", JSON)
                ours.write_text("nonsense")
                with pytest.raises(ConfigError, match=r"nomad\.tls"):
                    client.credentials.use(NEW)
                assert client.credentials.token is None
                await client.get("/v1/job/x", JSON)

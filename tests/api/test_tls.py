"""TLS: who gets in, who doesn't, and certificates that change while the server runs."""

import logging
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from poseidon.api.server import ServerLimits
from poseidon.api.tls import Tls, make_context
from poseidon.config_access import TlsSettings
from poseidon.errors import ConfigError
from tests.api.service import Service, connected, open_service, read
from tests.certificates import Authority

Stream = trio.SSLStream[trio.SocketStream]


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_who_never_shakes_hands_makes_room_for_others(ours: Authority) -> None:
    tls = Tls(make_context(ours.settings()))
    limits = ServerLimits(connections=1)
    async with open_service(ours.folder, tls=tls, trust=ours.client(), limits=limits) as service:
        url = httpx.URL(service.url)
        async with await trio.open_tcp_stream(url.host, int(url.port or 0)) as silent:
            await trio.testing.wait_all_tasks_blocked()
            assert not await is_refused(service, ours.client())
            with trio.fail_after(30):
                assert await silent.receive_some() == b""


@asynccontextmanager
async def serving(authority: Authority, **settings: object) -> AsyncIterator[tuple[Service, Tls]]:
    tls = Tls(make_context(authority.settings(**settings)))
    certificate = authority.issue("tester") if "client_ca_file" in settings else None
    async with open_service(authority.folder, tls=tls, trust=authority.client(certificate)) as service:
        yield service, tls


async def shake_hands(service: Service, context: ssl.SSLContext) -> Stream:
    url = httpx.URL(service.url)
    assert url.port
    plain = await trio.open_tcp_stream(url.host, url.port)
    stream = trio.SSLStream(plain, context, server_hostname=url.host, https_compatible=True)
    try:
        with trio.fail_after(20):
            await stream.do_handshake()
    except trio.BrokenResourceError:
        plain.socket.close()
        raise
    return stream


async def get(stream: Stream, path: str = "/api/v1/version") -> bytes:
    """What the server says; with TLS 1.3 only now does a client learn that it was refused."""
    with trio.fail_after(20):
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return bytes(await stream.receive_some(65536))


async def is_refused(service: Service, context: ssl.SSLContext) -> bool:
    try:
        async with await shake_hands(service, context) as stream:
            return not await get(stream)
    except trio.BrokenResourceError:
        return True


async def test_everything_works_by_https_and_wss(ours: Authority) -> None:
    async with serving(ours) as (service, _):
        await service.put(1)
        url = await service.execute(await service.claim(), "echo hello")
        assert url.startswith(f"wss://{service.url.removeprefix('https://')}/runners/")
        async with connected(url, trust=ours.client()) as socket:
            ended = await read(socket)
    assert (ended.text(), ended.code) == ("hello\r\n", 1000)


def old_client(authority: Authority, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = authority.client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = version
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context


async def test_versions_below_the_least_are_refused(ours: Authority) -> None:
    async with serving(ours) as (service, tls):
        assert await is_refused(service, old_client(ours, ssl.TLSVersion.TLSv1_1))
        assert not await is_refused(service, old_client(ours, ssl.TLSVersion.TLSv1_2))
        tls.exchange(make_context(ours.settings(min_version="1.3")))
        assert await is_refused(service, old_client(ours, ssl.TLSVersion.TLSv1_2))
        assert not await is_refused(service, ours.client())


async def test_if_clients_need_a_certificate_no_other_gets_in(ours: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").issue("tester")
    async with serving(ours, client_ca_file=str(ours.file)) as (service, _):
        assert await is_refused(service, ours.client())
        assert await is_refused(service, ours.client(stranger))
        assert not await is_refused(service, ours.client(ours.issue("tester")))


async def test_plain_http_at_the_port_of_tls_is_ended_without_noise(
    ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(ours) as (service, _):
        port = httpx.URL(service.url).port
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://127.0.0.1:{port}/api/v1/health")
        assert (await service.http.get("/health")).status_code == 204
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]
    assert "no TLS with this client" in caplog.text


@pytest.mark.parametrize("offer", [["h2", "http/1.1"], ["h2"], ["http/1.1"]])
async def test_http_2_is_never_agreed(ours: Authority, offer: list[str]) -> None:
    context = ours.client()
    context.set_alpn_protocols(offer)
    async with serving(ours) as (service, _), await shake_hands(service, context) as stream:
        assert stream.selected_alpn_protocol() == ("http/1.1" if "http/1.1" in offer else None)
        assert (await get(stream)).startswith(b"HTTP/1.1 200")


async def test_an_exchanged_certificate_is_for_new_connections_and_ends_no_old_one(
    ours: Authority, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    new = Authority(tmp_path / "new")
    async with serving(ours) as (service, tls), await shake_hands(service, ours.client()) as old:
        tls.exchange(make_context(new.settings()))
        assert await is_refused(service, ours.client())
        assert not await is_refused(service, new.client())
        assert (await get(old)).startswith(b"HTTP/1.1 200")


def locked_key(path: Path) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    return str(path)


def test_what_is_wrong_with_a_file_is_told_with_its_setting(ours: Authority, tmp_path: Path) -> None:
    good = str(ours.issue())
    (tmp_path / "junk").write_text("nothing")
    junk = str(tmp_path / "junk")
    cases: list[tuple[dict[str, str], str]] = [
        ({"cert_file": "/none"}, r"server\.tls\.cert_file: /none: No such file or directory"),
        ({"cert_file": junk}, r"server\.tls\.cert_file: .*junk: no certificate with its key"),
        ({"cert_file": str(ours.file)}, "no certificate with its key"),
        ({"cert_file": good, "key_file": "/none"}, r"server\.tls\.key_file: /none: No such file"),
        ({"cert_file": good, "key_file": str(ours.issue())}, "key values mismatch"),
        ({"cert_file": good, "key_file": locked_key(tmp_path / "locked")}, "locked by a password"),
        ({"cert_file": good, "client_ca_file": junk}, r"server\.tls\.client_ca_file: .*junk: no certificates"),
        ({"cert_file": good, "client_ca_file": "/none"}, r"server\.tls\.client_ca_file: /none: No such file"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            make_context(TlsSettings.model_validate({"active": True, **settings}))

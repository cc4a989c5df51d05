"""Large files, and clients that leave: nothing is lost, nothing goes on running, the runner stays usable."""

import os
from base64 import b64encode

import pytest
import trio

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.codeocean_wire import body, query
from tests.acceptance.sites import ROOT
from tests.acceptance.test_files import names, shell

PATIENCE = 60
LARGE = 3_000_000


@pytest.fixture
async def large(client: CodeOcean, runner: str) -> bytes:
    """What lies in the runner, called as that is."""
    content = os.urandom(LARGE)
    await client.copy(runner, {runner: content})
    return content


async def until_unused(client: CodeOcean, runner: str) -> None:
    """Until no program has that file open. (In the fake cluster all see the programs of the whole machine.)"""
    look = f"readlink /proc/[0-9]*/fd/* | grep -q '/{runner}$' && echo used"
    with trio.fail_after(PATIENCE):
        while "used" in (await shell(client, runner, look, privileged=True)).text("stdout"):
            await trio.sleep(0.05)


@pytest.mark.both
async def test_a_large_file_goes_in_and_out_byte_for_byte(client: CodeOcean, runner: str, large: bytes) -> None:
    fetched, headers = await client.download(runner, runner)
    assert (fetched == large, headers["content-length"]) == (True, str(LARGE))


@pytest.mark.both
async def test_thousands_of_files_are_listed_whole(client: CodeOcean, runner: str) -> None:
    heard = await shell(
        client,
        runner,
        "mkdir many && cd many && seq -f 'file %g' 1000 | tr '\\n' '\\0' | xargs -0 touch",
        privileged=ROOT,
    )
    assert heard.text("stderr") == ""
    assert set(await names(client, runner, "many")) == {f"many/file {number}" for number in range(1, 1001)}


@pytest.mark.both
async def test_only_regular_files_are_fetched(client: CodeOcean, runner: str) -> None:
    await shell(client, runner, "mkfifo fifo; ln -s fifo link", privileged=ROOT)
    for path in ("fifo", "link", "/dev/zero", "/dev/stdin", "/dev/tcp/127.0.0.1/1"):
        answer = await client.request("GET", f"/runners/{runner}/files/raw?{query(path=path)}")
        assert answer.status_code == 424, path
    assert (await client.listing(runner, "fifo"))[0]["entryType"] == "p"


@pytest.mark.both
async def test_who_leaves_a_download_stops_it(client: CodeOcean, runner: str, large: bytes) -> None:
    async with client.http.stream("GET", f"/runners/{runner}/files/raw?path={runner}") as answer:
        assert answer.headers["content-length"] == str(LARGE)
    await until_unused(client, runner)
    assert (await client.download(runner, runner))[0] == large


@pytest.mark.both
@pytest.mark.parametrize("share", [0.5, 1])
async def test_who_leaves_an_upload_stops_it(client: CodeOcean, runner: str, share: float) -> None:
    content = body({"copy": [{"path": runner, "content": b64encode(bytes(LARGE)).decode()}]})
    url = client.http.base_url
    head = f"PATCH {url.path}runners/{runner}/files HTTP/1.1\r\nHost: {url.netloc.decode()}\r\n"
    head += f"Poseidon-Token: {client.token}\r\nContent-Length: {len(content)}\r\n\r\n"
    stream = await trio.open_tcp_stream(url.host, url.port or 0)
    async with stream:
        await stream.send_all(head.encode() + content[: int(share * len(content))])
    await until_unused(client, runner)
    await client.copy(runner, {"after": b"1"})
    assert await names(client, runner) == {"./after": "-"}

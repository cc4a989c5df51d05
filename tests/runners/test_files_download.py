"""Downloads bring exactly what was announced, byte for byte, or are seen to be incomplete."""

import os
from pathlib import Path

import httpx
import pytest
import trio

from poseidon.api.files import disposition
from poseidon.runners import files_download
from tests.api.service import Service, until
from tests.runners.test_files import forget_peak, peak

LARGE = 8 * 1024 * 1024
HUGE = 32 * 1024 * 1024 + 5
"""More than the kernel keeps between client and server."""
CUT = r"incomplete|closed"


async def fetched(service: Service, runner: str, path: str) -> httpx.Response:
    return await service.http.get(f"/runners/{runner}/files/raw", params={"path": path})


def idle(service: Service, runner: str) -> bool:
    return not service.executor.processes.get(service.allocation(runner).id)


async def test_a_file_comes_byte_for_byte(service: Service, runner: str, workspace: Path) -> None:
    content = bytes(range(256)) * (LARGE // 256) + b"end"
    (workspace / "test.bin").write_bytes(content)
    answer = await fetched(service, runner, "test.bin")
    assert answer.status_code == 200
    assert answer.content == content
    assert dict(answer.headers) == {
        "content-type": "application/octet-stream",
        "content-length": str(len(content)),
        "content-disposition": 'attachment; filename="test.bin"',
        "x-content-type-options": "nosniff",
    }
    await until(lambda: idle(service, runner))
    assert service.executor.kills == 0


@pytest.mark.parametrize("size", [0, 1, files_download.AHEAD - 1, files_download.AHEAD, files_download.AHEAD + 65])
async def test_files_of_any_size_come_whole(service: Service, runner: str, workspace: Path, size: int) -> None:
    content = os.urandom(size)
    (workspace / "x").write_bytes(content)
    answer = await fetched(service, runner, "x")
    assert (answer.status_code, answer.content == content) == (200, True)
    assert answer.headers["Content-Length"] == str(size)


async def test_no_name_is_ever_read_by_a_shell(service: Service, runner: str, workspace: Path) -> None:
    for name in ("-n", "$(touch pwned)", "it's", 'quo"te\\', "new\nline", "a b", "*", "ä", "`id`", "!"):
        (workspace / name).write_text(name)
        answer = await fetched(service, runner, name)
        assert (answer.status_code, answer.text) == (200, name)
    assert not (workspace / "pwned").exists()


async def test_names_that_are_no_text_can_be_asked_for(service: Service, runner: str, workspace: Path) -> None:
    Path(os.fsdecode(bytes(workspace) + b"/in\xffvalid")).write_text("x")
    answer = await service.http.get(f"/runners/{runner}/files/raw?path=in%FFvalid")
    assert (answer.status_code, answer.text) == (200, "x")


async def test_links_are_followed(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "file").write_text("much longer than the link")
    (workspace / "l").symlink_to("file")
    (workspace / "ll").symlink_to(workspace / "l")
    answer = await fetched(service, runner, "ll")
    assert answer.text == "much longer than the link"


async def test_files_without_a_size_come_too(service: Service, runner: str) -> None:
    answer = await fetched(service, runner, "/proc/self/cmdline")
    assert answer.content == b"cat\0"


async def test_what_is_no_readable_file_is_424_before_the_first_byte(
    service: Service, runner: str, workspace: Path
) -> None:
    os.mkfifo(workspace / "fifo")
    (workspace / "folder").mkdir()
    (workspace / "file").touch()
    (workspace / "dangling").symlink_to("nothing")
    (workspace / "to a fifo").symlink_to("fifo")
    (workspace / "loop").symlink_to("loop")
    paths = ("fifo", "folder", "dangling", "to a fifo", "loop", "nothing", "file/", "", "x" * 5000)
    for path in (*paths, "/dev/zero", "/dev/stdin", "/dev/fd/0", "/dev/tcp/127.0.0.1/1"):
        answer = await fetched(service, runner, path)
        assert (answer.status_code, set(answer.json())) == (424, {"message"}), path
        assert answer.json()["message"].startswith("file not found or insufficient permissions ("), answer.text
        assert "Content-Disposition" not in answer.headers
    assert idle(service, runner)


async def test_a_nul_in_the_path_is_400(service: Service, runner: str) -> None:
    assert (await fetched(service, runner, "a\0b")).status_code == 400


async def test_head_tells_the_length_and_sends_nothing(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "x").write_bytes(bytes(LARGE))
    answer = await service.http.head(f"/runners/{runner}/files/raw", params={"path": "x"})
    assert (answer.status_code, answer.headers["Content-Length"], answer.content) == (200, str(LARGE), b"")
    await until(lambda: idle(service, runner))
    listing = await service.http.head(f"/runners/{runner}/files")
    assert (listing.status_code, listing.content) == (200, b"")


async def test_what_a_file_gains_meanwhile_is_not_sent(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "log").write_bytes(bytes(HUGE))
    url = f"/runners/{runner}/files/raw?path=log"
    async with service.http.stream("GET", url) as answer:
        with (workspace / "log").open("ab") as log:
            log.write(b"x" * HUGE)
        received = await answer.aread()
    assert received == bytes(HUGE)
    await until(lambda: idle(service, runner))
    assert service.executor.kills == 1


async def test_a_file_that_shrinks_is_seen_to_be_incomplete(
    service: Service, runner: str, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (workspace / "x").write_bytes(bytes(HUGE))
    async with service.http.stream("GET", f"/runners/{runner}/files/raw?path=x") as answer:
        assert answer.headers["Content-Length"] == str(HUGE)
        os.truncate(workspace / "x", 5)
        with pytest.raises(httpx.RemoteProtocolError, match=CUT):
            await answer.aread()
    await until(lambda: idle(service, runner))
    assert "the file has become shorter" in caplog.text
    assert "Traceback" not in caplog.text
    assert (await fetched(service, runner, "x")).text == "\0" * 5


async def test_a_client_that_leaves_stops_the_reading(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "x").write_bytes(bytes(HUGE))
    async with service.http.stream("GET", f"/runners/{runner}/files/raw?path=x") as answer:
        assert answer.status_code == 200
        assert not idle(service, runner)
    await until(lambda: idle(service, runner))
    assert service.executor.kills == 1
    assert len((await fetched(service, runner, "x")).content) == HUGE


async def test_a_client_that_is_slow_costs_no_memory(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "x").write_bytes(bytes(HUGE))
    received = 0
    forget_peak()
    before = peak()
    async with service.http.stream("GET", f"/runners/{runner}/files/raw?path=x") as answer:
        await trio.sleep(0.05)
        async for piece in answer.aiter_bytes():
            received += len(piece)
    assert received == HUGE
    assert peak() - before < HUGE / 2


async def test_a_file_that_gives_nothing_is_given_up(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_download, "READ", "sleep 60")
    monkeypatch.setattr(files_download, "BEGIN_WITHIN", 0.1)
    assert (await fetched(service, runner, "x")).status_code == 424
    assert idle(service, runner)


async def test_programs_that_fail_are_no_empty_file(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in ("exit 3", "kill -9 $$", "echo", "echo -1; echo x", "echo 5x"):
        monkeypatch.setattr(files_download, "READ", script)
        answer = await fetched(service, runner, "x")
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "UNKNOWN"), script


async def test_an_endless_file_without_a_size_is_refused(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_download, "READ", "echo 0; exec cat /dev/zero")
    assert (await fetched(service, runner, "x")).status_code == 424
    assert idle(service, runner)


async def test_downloading_is_activity_as_long_as_it_takes(service: Service) -> None:
    runner = await service.claim(timeout=1)
    (service.workspace(runner) / "x").write_bytes(bytes(LARGE))
    async with service.http.stream("GET", f"/runners/{runner}/files/raw?path=x") as answer:
        with trio.move_on_after(1.5):
            await trio.sleep_forever()
        assert len(await answer.aread()) == LARGE


async def test_a_runner_that_ends_meanwhile_cuts_the_download(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "x").write_bytes(bytes(HUGE))
    async with service.http.stream("GET", f"/runners/{runner}/files/raw?path=x") as answer:
        assert (await service.http.delete(f"/runners/{runner}")).status_code == 204
        with pytest.raises(httpx.RemoteProtocolError, match=CUT):
            await answer.aread()


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("test.txt", 'attachment; filename="test.txt"'),
        ("a b", 'attachment; filename="a b"'),
        ('a"b\\', "attachment; filename=\"a_b_\"; filename*=UTF-8''a%22b%5C"),
        ("a\r\nSet-Cookie: x", "attachment; filename=\"a__Set-Cookie_ x\"; filename*=UTF-8''a%0D%0ASet-Cookie%3A%20x"),
        ("ä%41", "attachment; filename=\"__41\"; filename*=UTF-8''%C3%A4%2541"),
        ("\udcff", "attachment; filename=\"_\"; filename*=UTF-8''%3F"),
    ],
)
def test_any_name_can_stand_in_the_header(name: str, header: str) -> None:
    assert disposition(name) == header

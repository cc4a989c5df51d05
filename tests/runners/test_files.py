"""Files are copied and deleted by programs in the runner, as the contract wants them."""

import json
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import trio

from poseidon.api.server import ServerLimits
from poseidon.errors import BadRequest, ConnectionLost
from poseidon.runners import files
from poseidon.runners.files_archive import File, archived, cleaned
from tests.api.service import Service, open_service, until


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_files_arrive_with_their_content_and_mode(service: Service, runner: str, workspace: Path) -> None:
    binary = bytes(range(256)) * 1000
    wanted = {"a.txt": b"hello", "sub/dir/b.bin": binary, "empty": b"", "ä ö'$(id)\n.txt": b"name", "-rf": b"dash"}
    answer = await service.patch(runner, wanted)
    assert (answer.status_code, answer.content) == (204, b"")
    for path, content in wanted.items():
        assert (workspace / path).read_bytes() == content
        assert mode(workspace / path) == 0o744


async def test_folders_come_first_and_are_sticky(service: Service, runner: str, workspace: Path) -> None:
    answer = await service.patch(runner, {"sub/dir/": None, "sub/dir/x": b"1"})
    assert answer.status_code == 204
    assert mode(workspace / "sub/dir") == 0o1777
    assert (workspace / "sub/dir/x").read_bytes() == b"1"


async def test_absolute_paths_and_detours_are_followed(
    service: Service, runner: str, workspace: Path, tmp_path: Path
) -> None:
    await service.patch(runner, {f"{tmp_path}/abs/x": b"1", "./a/../b//c": b"2", "../up": b"3"})
    assert (tmp_path / "abs/x").read_bytes() == b"1"
    assert (workspace / "b/c").read_bytes() == b"2"
    assert (workspace.parent / "up").read_bytes() == b"3"


async def test_deleting_everything_spares_what_is_hidden(service: Service, runner: str, workspace: Path) -> None:
    for name in (".hidden", "visible", "-f", "with space", "$(touch pwned)"):
        (workspace / name).write_text("x")
    (workspace / "folder").mkdir()
    (workspace / "folder" / "x").write_text("x")
    assert (await service.patch(runner, delete=("./*",))).status_code == 204
    assert [path.name for path in workspace.iterdir()] == [".hidden"]
    assert (await service.patch(runner, delete=("./*",))).status_code == 204  # nothing there is fine too


async def test_more_files_are_deleted_than_a_program_takes_arguments(
    service: Service, runner: str, workspace: Path
) -> None:
    for number in range(1200):
        (workspace / f"{number:04}{'x' * 200}").touch()
    assert (await service.patch(runner, delete=("./*",))).status_code == 204
    assert not list(workspace.iterdir())


async def test_names_to_delete_are_never_read_by_a_shell(service: Service, runner: str, workspace: Path) -> None:
    names = ("it's", "$(touch pwned)", "-x", "*", "a b", "new\nline")
    for name in (*names, "other"):
        (workspace / name).write_text("x")
    assert (await service.patch(runner, delete=names)).status_code == 204
    assert [path.name for path in workspace.iterdir()] == ["other"]


async def test_deleting_comes_before_copying(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "old").write_text("old")
    (workspace / "same").write_text("old")
    answer = await service.patch(runner, {"same": b"new"}, delete=("./*", "same", "not there"))
    assert answer.status_code == 204
    assert {path.name: path.read_text() for path in workspace.iterdir()} == {"same": "new"}


async def test_a_second_copy_of_the_same_changes_nothing(service: Service, runner: str, workspace: Path) -> None:
    for _ in range(2):
        assert (await service.patch(runner, {"d/": None, "d/x": b"1"}, delete=("./*",))).status_code == 204
    assert (workspace / "d/x").read_text() == "1"


async def test_what_fails_is_told_and_the_rest_is_copied(service: Service, runner: str, workspace: Path) -> None:
    answer = await service.patch(runner, {"/proc/1/environ": b"x", "fine": b"1"})
    assert (answer.status_code, answer.json()["errorCode"]) == (500, "UNKNOWN")
    message = answer.json()["message"]
    assert message.startswith("file copy failed: stderr output '")
    assert "Cannot open: " in message
    assert message.endswith("' and stdout output ''")
    assert (workspace / "fine").read_text() == "1"


async def test_what_cannot_be_deleted_is_told_and_the_copy_is_done(
    service: Service, runner: str, workspace: Path
) -> None:
    answer = await service.patch(runner, {"fine": b"1"}, delete=("/proc/1",))
    assert answer.status_code == 500
    assert (workspace / "fine").read_text() == "1"


async def test_the_message_of_a_failure_is_bounded(service: Service, runner: str) -> None:
    answer = await service.patch(runner, {f"/proc/1/{'x' * 200}{number}": b"" for number in range(300)})
    assert answer.status_code == 500
    assert len(answer.text) < 30_000


async def test_where_there_is_one_user_files_are_its_own(service: Service, runner: str, workspace: Path) -> None:
    service.executor.one_user = True
    assert (await service.patch(runner, {"x": b"1"})).status_code == 204
    assert (workspace / "x").read_text() == "1"


async def test_large_files_arrive_and_cost_little(service: Service, runner: str, workspace: Path) -> None:
    content = bytes(range(256)) * (40 * 4096)
    assert (await service.patch(runner, {"large": content, "second": b"2"})).status_code == 204
    assert (workspace / "large").read_bytes() == content
    assert (workspace / "second").read_text() == "2"


async def test_a_copy_costs_less_memory_than_three_times_its_body(service: Service, runner: str) -> None:
    request = (
        "import httpx, base64, json, sys;"
        "body = {'copy': [{'path': 'x', 'content': base64.b64encode(bytes(24_000_000)).decode()}]};"
        "print(httpx.patch(sys.argv[1], content=json.dumps(body), trust_env=False, timeout=30).status_code)"
    )
    forget_peak()
    before = peak()
    url = f"{service.url}/runners/{runner}/files"
    done = await trio.run_process([sys.executable, "-c", request, url], capture_stdout=True)
    assert done.stdout == b"204\n"
    assert peak() - before < 3 * 32_000_000


def forget_peak() -> None:
    """Let `peak` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes of this process that were in memory at once."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


async def test_a_client_that_leaves_stops_the_copy(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UPDATE", "sleep 60")
    allocation = service.allocation(runner).id
    with trio.move_on_after(0.3):
        await service.patch(runner, {"x": b"1"})
    await until(lambda: not service.executor.processes[allocation])
    assert service.executor.kills == 1
    monkeypatch.undo()
    assert (await service.patch(runner, {"x": b"1"})).status_code == 204


async def test_a_copy_that_takes_too_long_is_given_up(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UPDATE", "sleep 60")
    monkeypatch.setattr(files, "WITHIN", 0.1)
    answer = await service.patch(runner, {"x": b"1"})
    assert (answer.status_code, "not done within" in answer.json()["message"]) == (500, True)
    assert not service.executor.processes[service.allocation(runner).id]


async def test_a_runner_that_ends_meanwhile_is_410_and_never_a_success(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UPDATE", "sleep 60")
    statuses = []

    async def patch() -> None:
        statuses.append((await service.patch(runner, {"x": b"1"})).status_code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(patch)
        await until(lambda: bool(service.executor.processes.get(service.allocation(runner).id)))
        await service.http.delete(f"/runners/{runner}")
    assert statuses == [410]


async def test_a_lost_connection_is_no_success(service: Service, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service.executor.start_failure = ConnectionLost("cut")
    answer = await service.patch(runner, {"x": b"1"})
    assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_INTERNAL_SERVER_ERROR")


async def test_file_operations_are_activity(service: Service) -> None:
    runner = await service.claim(timeout=2)
    for _ in range(4):
        await trio.sleep(0.6)
        assert (await service.patch(runner, {"x": b"1"})).status_code == 204


async def test_a_wrong_body_is_400_and_nothing_is_deleted(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "kept").touch()
    bodies: tuple[dict[str, object], ...] = (
        {"copy": [{"path": "x", "content": "no base64!"}]},
        {"copy": [{"path": "x", "content": "QQ"}]},
        {"copy": [{"path": "x", "content": 5}]},
        {"copy": [{"path": "x\0y", "content": ""}]},
        {"copy": [7]},
        {"copy": {}},
        {"delete": ["a\0"]},
        {"delete": ["x" * 100_000] * 11},
    )
    for body in bodies:
        answer = await service.http.patch(f"/runners/{runner}/files", json={"delete": ["./*"]} | body)
        assert (answer.status_code, set(answer.json())) == (400, {"message"}), body
    assert (workspace / "kept").exists()


async def test_base64_may_have_line_breaks_and_fields_any_case(service: Service, runner: str, workspace: Path) -> None:
    body = {"COPY": [{"Path": "x", "CONTENT": "aGVs\r\nbG8=\n"}, {"path": "y", "content": None}], "delete": None}
    assert (await service.http.patch(f"/runners/{runner}/files", json=body)).status_code == 204
    assert (workspace / "x").read_text() == "hello"
    assert (workspace / "y").read_text() == ""


async def test_an_empty_request_is_fine(service: Service, runner: str) -> None:
    for body in (b"{}", b"null", b'{"copy": [], "delete": []}'):
        assert (await service.http.patch(f"/runners/{runner}/files", content=body)).status_code == 204


async def test_a_body_above_the_limit_is_413_however_it_comes(tmp_path: Path) -> None:
    async with open_service(tmp_path, limits=ServerLimits(body=100_000)) as service:
        await service.put(1)
        runner = await service.claim()
        content = json.dumps({"copy": [{"path": "x", "content": "A" * 100_000}]}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 30_000):
                yield content[start : start + 30_000]

        for body in (content, pieces()):
            answer = await service.http.patch(f"/runners/{runner}/files", content=body)
            assert (answer.status_code, set(answer.json())) == (413, {"message"})
        assert not list(service.workspace(runner).iterdir())


async def test_a_body_that_takes_too_long_is_408(tmp_path: Path) -> None:
    async with open_service(tmp_path, limits=ServerLimits(body_timeout=0.2)) as service:
        await service.put(1)
        url = httpx.URL(f"{service.url}/runners/{await service.claim()}/files")
        async with await trio.open_tcp_stream(url.host, url.port or 0) as stream:
            await stream.send_all(f"PATCH {url.path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{}}".encode())
            with trio.fail_after(20):
                assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 408 ")


# Without a runner


def test_an_archive_is_what_tar_makes() -> None:
    wanted = [File("a/", b"ignored"), File("a/" + "n" * 300, b"x" * 70_000), File("ä", b"")]
    archive = b"".join(archived(wanted, 1_700_000_000))
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        members = opened.getmembers()
        found = [(member.name, member.size, member.mode, member.isdir(), member.uid) for member in members]
    assert found == [("a", 0, 0o1777, True, 0), ("a/" + "n" * 300, 70_000, 0o744, False, 0), ("ä", 0, 0o744, False, 0)]
    assert {member.mtime for member in members} == {1_700_000_000}


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("a//b", "a/b"),
        ("a/./b/", "a/b"),
        ("", "."),
        ("//a", "/a"),
        ("///a", "/a"),
        ("/../a", "/a"),
        ("a/../../b", "../b"),
    ],
)
def test_paths_are_cleaned(path: str, clean: str) -> None:
    assert cleaned(path) == clean


def test_no_file_has_a_nul_in_its_name() -> None:
    with pytest.raises(BadRequest):
        cleaned("a\0b")


def test_a_workspace_that_is_the_root_is_not_emptied() -> None:
    """All programs are replaced by functions, for otherwise a failure of this test would be the end of the machine."""
    functions = {f"BASH_FUNC_{name}%%": f'() {{ echo "{name} $*"; }}' for name in ("rm", "tar")}
    words = ["/bin/bash", "-c", files.UPDATE, "poseidon", "./*", "x"]
    ended = subprocess.run(words, cwd="/", env=functions, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[0] == "rm -rf -- x"
    assert "tar --extract" in ended.stdout
    assert (ended.stderr, ended.returncode) == ("not everything in / is removed\n", 1)

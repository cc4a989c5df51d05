"""Listings tell every name that a file system can hold, and are complete or refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from poseidon.core import listing
from poseidon.errors import ConnectionLost
from poseidon.runners import files, files_listing
from tests.api.service import Service, until

HARD = (
    "a b",
    "new\nline",
    'quo"te\\',
    "it's",
    "x -> y",
    "-la",
    "ends:",
    "*",
    "[a",
    "(",
    "!",
    " ",
    "ä",
    "tab\t",
    "$(id)",
)
ATTRIBUTES = {"name", "entryType", "size", "modificationTime", "permissions", "owner", "group"}


@pytest.fixture(params=["find", "ls"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which program lists: GNU's find, or what is taken where there is none."""
    if request.param == "ls":
        monkeypatch.setattr(listing, "find_words", lambda *_, **__: ("/bin/false",))
    return str(request.param)


async def listed(service: Service, runner: str, **query: str) -> dict[str, dict[str, Any]]:
    answer = await service.http.get(f"/runners/{runner}/files", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    entries: list[dict[str, Any]] = answer.json()["files"]
    assert set(answer.json()) == {"files"}
    assert all(set(entry) - {"linkTarget"} == ATTRIBUTES for entry in entries)
    assert all(len(entry["permissions"]) == 9 for entry in entries)
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry for entry in entries}


async def status(service: Service, runner: str, route: str = "", **query: str) -> int:
    answer = await service.http.get(f"/runners/{runner}/files{route}", params=query)
    if answer.status_code >= 400:
        more = {410: {"runner"}, 500: {"errorCode"}}.get(answer.status_code, set())
        assert {"message"} <= set(answer.json()) <= {"message"} | more
    return answer.status_code


@pytest.mark.usefixtures("program")
async def test_an_entry_tells_all_that_clients_use(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "a.txt").write_text("hello")
    (workspace / "a.txt").chmod(0o4751)
    os.utime(workspace / "a.txt", (1_700_000_000, 1_700_000_000.9))
    assert await listed(service, runner) == {
        "./a.txt": {
            "name": "./a.txt",
            "entryType": "-",
            "size": 5,
            "modificationTime": 1_700_000_000,
            "permissions": "rwsr-x--x",
            "owner": (workspace / "a.txt").owner(),
            "group": (workspace / "a.txt").group(),
        }
    }


@pytest.mark.usefixtures("program")
async def test_every_name_is_told_as_it_is(service: Service, runner: str, workspace: Path) -> None:
    for name in HARD:
        (workspace / name).mkdir()
        (workspace / name / name).write_text(name)
    expected = {f"./{name}" for name in HARD} | {f"./{name}/{name}" for name in HARD}
    found = await listed(service, runner)
    assert set(found) == expected
    assert {found[name]["entryType"] for name in expected} == {"-", "d"}
    for name in HARD:
        assert set(await listed(service, runner, path=name)) == {f"{name}/{name}"}
        assert set(await listed(service, runner, path=name, recursive="false")) == {name}
        assert set(await listed(service, runner, path=f"{name}/{name}")) == {f"{name}/{name}"}


@pytest.mark.usefixtures("program")
async def test_bytes_that_are_no_text_are_replaced(service: Service, runner: str, workspace: Path) -> None:
    Path(os.fsdecode(bytes(workspace) + b"/in\xffvalid")).mkdir()
    Path(os.fsdecode(bytes(workspace) + b"/in\xffvalid/\xc3")).touch()
    assert set(await listed(service, runner)) == {"./in\ufffdvalid", "./in\ufffdvalid/\ufffd"}
    answer = await service.http.get(f"/runners/{runner}/files?path=in%FFvalid/%C3")
    assert [entry["name"] for entry in answer.json()["files"]] == ["in\ufffdvalid/\ufffd"]


@pytest.mark.usefixtures("program")
async def test_names_begin_as_the_path_does(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "d" / "e").mkdir(parents=True)
    (workspace / "d" / "e" / "f").touch()
    for path, recursive, names in (
        ("", "", {"./d", "./d/e", "./d/e/f"}),
        ("./", "true", {"./d", "./d/e", "./d/e/f"}),
        (".", "true", {"./d", "./d/e", "./d/e/f"}),
        ("./", "false", {"d"}),
        ("d", "true", {"d/e", "d/e/f"}),
        ("d/", "1", {"d/e", "d/e/f"}),
        ("./d", "t", {"./d/e", "./d/e/f"}),
        ("d", "0", {"e"}),
        ("d/e/f", "true", {"d/e/f"}),
        ("d/../d/e", "f", {"f"}),
        (f"{workspace}/d/e", "true", {f"{workspace}/d/e/f"}),
        (f"{workspace}/d/e/f", "false", {f"{workspace}/d/e/f"}),
    ):
        assert set(await listed(service, runner, path=path, recursive=recursive)) == names, (path, recursive)


@pytest.mark.usefixtures("program")
async def test_hidden_files_are_left_out_unless_they_are_asked_for(
    service: Service, runner: str, workspace: Path
) -> None:
    (workspace / ".hidden" / ".deeper").mkdir(parents=True)
    (workspace / ".hidden" / "seen").touch()
    (workspace / "seen").touch()
    assert set(await listed(service, runner)) == {"./seen"}
    assert set(await listed(service, runner, path=".hidden")) == {".hidden/seen"}
    assert await listed(service, runner, path=".hidden/.deeper") == {}


@pytest.mark.usefixtures("program")
async def test_links_tell_where_they_lead_and_are_not_followed(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "folder" / "x").mkdir(parents=True)
    for name, target in (("l", "folder"), ("dangling", "no\nwhere"), ("a -> b", 'c" -> "d')):
        (workspace / name).symlink_to(target)
    found = await listed(service, runner)
    targets = {name: entry["linkTarget"] for name, entry in found.items() if entry["entryType"] == "l"}
    assert targets == {"./l": "folder", "./dangling": "no\nwhere", "./a -> b": 'c" -> "d'}
    assert "./l/x" not in found
    assert set(await listed(service, runner, path="l")) == {"l"}
    assert set(await listed(service, runner, path="l/")) == {"l/x"}
    assert (await listed(service, runner, path="/proc/self/cwd"))["/proc/self/cwd"]["linkTarget"] == str(workspace)


@pytest.mark.usefixtures("program")
async def test_what_is_no_file_is_told_by_its_type(service: Service, runner: str, workspace: Path) -> None:
    os.mkfifo(workspace / "fifo")
    assert (await listed(service, runner))["./fifo"]["entryType"] == "p"
    devices = await listed(service, runner, path="/dev/null")
    assert (devices["/dev/null"]["entryType"], devices["/dev/null"]["size"]) == ("c", 0)


@pytest.mark.usefixtures("program")
async def test_an_empty_folder_is_an_empty_list(service: Service, runner: str) -> None:
    answer = await service.http.get(f"/runners/{runner}/files")
    assert answer.content == b'{"files":[]}'


@pytest.mark.usefixtures("program")
async def test_what_isnt_there_is_424(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "file").touch()
    for path in ("nothing", "/nothing", "file/", "-x", "x" * 5000):
        assert await status(service, runner, path=path) == 424, path
        assert await status(service, runner, path=path, privilegedExecution="true", recursive="false") == 424, path


async def test_wrong_parameters_are_400(service: Service, runner: str) -> None:
    for query in ({"recursive": "maybe"}, {"privilegedExecution": "2"}, {"path": "a\0b"}):
        assert await status(service, runner, **query) == 400, query


async def test_the_first_of_several_parameters_counts(service: Service, runner: str, workspace: Path) -> None:
    (workspace / "d").mkdir()
    answer = await service.http.get(f"/runners/{runner}/files?recursive=false&recursive=maybe&unknown=%00")
    assert [entry["name"] for entry in answer.json()["files"]] == ["d"]


async def test_a_runner_that_is_gone_is_410(service: Service, runner: str) -> None:
    await service.http.delete(f"/runners/{runner}")
    for gone in (runner, "1-unknown"):
        assert await status(service, gone) == 410
        assert await status(service, gone, "/raw", path="x") == 410


async def test_ten_thousand_entries_come_all(service: Service, runner: str, workspace: Path) -> None:
    for number in range(10_000):
        os.close(os.open(workspace / f"file {number:05}", os.O_CREAT))
    assert list(await listed(service, runner)) == [f"./file {number:05}" for number in range(10_000)]


async def test_a_listing_that_is_too_long_is_refused(
    service: Service, runner: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        (workspace / f"{number}").touch()
    with monkeypatch.context() as changed:
        changed.setattr(listing, "MOST", 99)
        assert await status(service, runner) == 424
        changed.setattr(listing, "MOST", 100)
        assert await status(service, runner) == 200
    with monkeypatch.context() as changed:
        changed.setattr(files_listing, "MOST", 1000)
        assert await status(service, runner) == 424
    assert service.executor.kills >= 1
    assert not service.executor.processes[service.allocation(runner).id]


async def test_a_lost_connection_is_tried_once_more(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, failures = service.executor.execute, [ConnectionLost("cut")]

    def flaky(*arguments: Any) -> Any:
        service.executor.start_failure = failures.pop() if failures else None
        return execute(*arguments)

    monkeypatch.setattr(service.executor, "execute", flaky)
    assert await status(service, runner) == 200
    failures += [ConnectionLost("cut"), ConnectionLost("cut")]
    assert await status(service, runner) == 424


async def test_programs_that_fail_are_no_empty_listing(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in ("kill -9 $$", "printf 'x'; kill -9 $$", "printf 'some\\0thing'", "exit 3"):
        words = ("/bin/bash", "-c", script)
        with monkeypatch.context() as changed:
            changed.setattr(listing, "find_words", lambda *_, words=words, **__: words)
            changed.setattr(listing, "ls_words", lambda *_, words=("ls", "--nonsense"), **__: words)
            assert await status(service, runner) == 424, script


async def test_a_listing_that_takes_too_long_is_given_up(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "find_words", lambda *_, **__: ("sleep", "60"))
    monkeypatch.setattr(files, "LIST_WITHIN", 0.1)
    assert await status(service, runner) == 424
    assert not service.executor.processes[service.allocation(runner).id]


async def test_a_client_that_leaves_stops_the_listing(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "find_words", lambda *_, **__: ("sleep", "60"))
    allocation = service.allocation(runner).id
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.http.get, f"/runners/{runner}/files")
        await until(lambda: bool(service.executor.processes.get(allocation)))
        nursery.cancel_scope.cancel()
    await until(lambda: not service.executor.processes[allocation])
    assert service.executor.kills == 1


async def test_where_there_is_one_user_it_lists(service: Service, runner: str, workspace: Path) -> None:
    service.executor.one_user = True
    (workspace / "x").write_text("1")
    assert set(await listed(service, runner, privilegedExecution="true")) == {"./x"}
    answer = await service.http.get(f"/runners/{runner}/files/raw?path=x&privilegedExecution=true")
    assert answer.content == b"1"


async def test_deleting_meanwhile_is_never_a_fault(service: Service) -> None:
    for _ in range(10):
        runner = await service.claim()
        statuses: list[int] = []

        async def look(runner: str = runner, statuses: list[int] = statuses) -> None:
            statuses.append(await status(service, runner))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            nursery.start_soon(service.http.delete, f"/runners/{runner}")
            nursery.start_soon(look)
        assert set(statuses) <= {200, 410, 424}

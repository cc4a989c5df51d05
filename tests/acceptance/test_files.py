"""The acceptance list: files are copied, deleted, protected, listed and fetched."""

from base64 import b64encode

import httpx
import pytest
import trio

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.codeocean_socket import Conversation
from tests.acceptance.codeocean_wire import WorkspaceError, query, submission
from tests.acceptance.sites import ROOT

PATIENCE = 30


async def shell(client: CodeOcean, runner: str, command: str, *, privileged: bool = False) -> Conversation:
    socket = await client.execute(runner, command, privileged=privileged)
    with trio.fail_after(PATIENCE):
        return await socket.closed()


async def patch(
    client: CodeOcean, runner: str, files: dict[str, bytes], delete: tuple[str, ...] = ()
) -> httpx.Response:
    return await client.request("PATCH", f"/runners/{runner}/files", submission(files) | {"delete": delete})


@pytest.mark.both
async def test_a_copied_file_is_there_with_its_content(client: CodeOcean, runner: str) -> None:
    assert (await patch(client, runner, {"test.txt": b"Hello World!"})).status_code == 204
    heard = await shell(client, runner, "cat test.txt")
    assert (heard.text("stdout"), heard.text("stderr")) == ("Hello World!", "")


@pytest.mark.both
async def test_relative_and_absolute_paths_lead_where_they_say_and_parents_are_made(
    client: CodeOcean, runner: str
) -> None:
    await patch(client, runner, {"here": b"1"})
    [here] = (await shell(client, runner, "pwd")).text("stdout").split()
    absolute = f"{here}/sub/absolute.txt"
    await patch(client, runner, {"deep/er/relative.txt": b"relative\n", absolute: b"absolute\n"})
    heard = await shell(client, runner, "cat deep/er/relative.txt sub/absolute.txt")
    assert (heard.text("stdout"), heard.text("stderr")) == ("relative\r\nabsolute\r\n", "")


@pytest.mark.both
async def test_a_deleted_file_is_gone(client: CodeOcean, runner: str) -> None:
    await patch(client, runner, {"it's $(a) test.txt": b"x"})
    assert (await patch(client, runner, {}, ("it's $(a) test.txt",))).status_code == 204
    heard = await shell(client, runner, 'cat "it\'s \\$(a) test.txt"')
    assert heard.text("stdout") == ""
    assert "No such file or directory" in heard.text("stderr")


@pytest.mark.both
async def test_deleting_comes_before_copying(client: CodeOcean, runner: str) -> None:
    await patch(client, runner, {"test.txt": b"old"})
    await patch(client, runner, {"test.txt": b"new"}, ("test.txt", "./*"))
    assert (await shell(client, runner, "cat test.txt")).text("stdout") == "new"


@pytest.mark.both
async def test_what_is_no_json_is_400_and_an_unknown_runner_410(client: CodeOcean, runner: str) -> None:
    answer = await client.http.patch(f"/runners/{runner}/files", content=b"no json")
    assert (answer.status_code, bool(answer.json()["message"])) == (400, True)
    assert (await patch(client, "n0n-3x1st1ng-1d", {"x": b""})).status_code == 410


@pytest.mark.both
async def test_a_file_that_cannot_be_written_is_500_with_tars_words_and_the_others_are_there(
    client: CodeOcean, runner: str
) -> None:
    answer = await patch(client, runner, {"/proc/1/environ": b"\0", "test.txt": b"there"})
    assert (answer.status_code, answer.json()["errorCode"]) == (500, "UNKNOWN")
    assert "Cannot open: " in answer.json()["message"]
    assert (await shell(client, runner, "cat test.txt")).text("stdout") == "there"


@pytest.mark.both
async def test_what_was_copied_into_a_folder_is_protected_there_but_own_files_may_join(
    client: CodeOcean, runner: str
) -> None:
    if not ROOT:
        pytest.skip("without root there is one user, and nothing to protect from")
    content = b64encode(b"#!/bin/sh\necho protected").decode()
    copied = [{"path": "protectedFolder/"}, {"path": "protectedFolder/a.sh", "content": content}]
    answer = await client.request("PATCH", f"/runners/{runner}/files", {"copy": copied})
    assert answer.status_code == 204
    allowed = await shell(client, runner, "echo mine > protectedFolder/new; echo >> protectedFolder/new")
    assert (allowed.text("stdout"), allowed.text("stderr")) == ("", "")
    for command, words in [
        ("rm -rf protectedFolder", "Operation not permitted"),
        ("rm -f protectedFolder/a.sh", "Operation not permitted"),
        ("echo >> protectedFolder/a.sh", "Permission denied"),
    ]:
        assert words in (await shell(client, runner, command)).text("stderr"), command
    heard = await shell(client, runner, "cat protectedFolder/a.sh", privileged=True)
    assert heard.text("stdout") == "#!/bin/sh\r\necho protected"


@pytest.mark.both
async def test_any_name_and_any_byte_is_copied(client: CodeOcean, runner: str) -> None:
    files = {"ä ö/-n.py": b"", "$(id)/'\"": bytes(range(256)), "new\nline": b"x", ".hidden": b"kept"}
    await client.copy(runner, files)
    heard = await shell(client, runner, "find . -type f -printf '%P %s\\0' | tr '\\0\\n' '|_'")
    listed = {name.replace("\n", "_") + f" {len(content)}" for name, content in files.items()}
    assert set(heard.text("stdout").split("|")) - {""} == listed
    assert (
        (await shell(client, runner, 'sha1sum < "\\$(id)/\'\\""'))
        .text("stdout")
        .startswith("4916d6bdb7f78e6803698cab32d1586ea457dfc8")
    )
    await client.copy(runner, {"other": b""})
    assert (await shell(client, runner, "ls -A")).text("stdout").split() == [".hidden", "other"]


# Listing and fetching


async def names(client: CodeOcean, runner: str, path: str = "./", *, recursive: bool = True) -> dict[str, str]:
    """Names and kinds of entries."""
    listed = await client.listing(runner, path, recursive=recursive)
    return {entry["name"]: entry["entryType"] for entry in listed}


@pytest.mark.both
async def test_an_empty_workspace_is_an_empty_list(client: CodeOcean, runner: str) -> None:
    await client.copy(runner, {})
    answer = await client.request("GET", f"/runners/{runner}/files")
    assert (answer.status_code, answer.json()) == (200, {"files": []})


@pytest.mark.both
async def test_a_copied_file_is_listed_with_its_mode_and_owner(client: CodeOcean, runner: str) -> None:
    await client.copy(runner, {"test.txt": b"Hello"})
    [entry] = await client.listing(runner)
    assert (entry["name"], entry["entryType"], entry["size"]) == ("./test.txt", "-", 5)
    assert entry["permissions"] == "rwxr--r--"
    assert type(entry["modificationTime"]) is int
    if ROOT:
        assert (entry["owner"], entry["group"]) == ("root", "root")


@pytest.mark.both
async def test_links_tell_their_target_where_it_may_be_read(client: CodeOcean, runner: str) -> None:
    await shell(client, runner, "ln -s /usr/bin allowed", privileged=ROOT)
    [link] = [entry for entry in await client.listing(runner) if entry["name"] == "./allowed"]
    assert (link["entryType"], link["linkTarget"]) == ("l", "/usr/bin")
    if ROOT:
        [denied] = await client.listing(runner, "/proc/1/cwd")
        assert denied["entryType"] == "l"
        assert not denied.get("linkTarget")


@pytest.mark.both
async def test_a_folder_that_is_missing_or_shut_is_424(client: CodeOcean, runner: str) -> None:
    with pytest.raises(WorkspaceError):
        await client.listing(runner, "nowhere/")
    if ROOT:
        await shell(client, runner, "mkdir -m 700 shut", privileged=True)
        with pytest.raises(WorkspaceError):
            await client.listing(runner, "shut/")
        assert await client.listing(runner, "shut/", privileged=True) == []


@pytest.mark.both
async def test_a_path_is_never_read_by_a_shell(client: CodeOcean, runner: str) -> None:
    with pytest.raises(WorkspaceError):
        await client.listing(runner, "$(touch hacked)`touch hacked`;touch hacked", privileged=True)
    with pytest.raises(WorkspaceError):
        await client.download(runner, "x\"'; touch hacked #\n touch hacked", privileged=True)
    assert await names(client, runner) == {}


@pytest.mark.both
async def test_a_file_is_fetched_with_its_length_and_name(client: CodeOcean, runner: str) -> None:
    content = bytes(range(256)) * 1000
    await client.copy(runner, {"test.txt": content, "empty": b"", "a b+ü.bin": b"x"})
    fetched, headers = await client.download(runner, "test.txt")
    assert fetched == content
    assert headers["content-length"] == str(len(content))
    assert headers["content-disposition"] == 'attachment; filename="test.txt"'
    assert headers["content-type"] == "application/octet-stream"
    assert headers["x-content-type-options"] == "nosniff"
    assert "content-encoding" not in headers
    fetched, headers = await client.download(runner, "empty")
    assert (fetched, headers["content-length"]) == (b"", "0")
    assert (await client.download(runner, "a b+ü.bin"))[0] == b"x"


@pytest.mark.both
async def test_what_is_missing_or_shut_or_a_folder_is_424_with_the_reason(client: CodeOcean, runner: str) -> None:
    await client.copy(runner, {"folder/file": b""})
    shut = ["/proc/1/environ"] if ROOT else []
    for path in ["nowhere", "folder", "", *shut]:
        answer = await client.request("GET", f"/runners/{runner}/files/raw?{query(path=path)}")
        assert answer.status_code == 424, path
        assert answer.json()["message"]


@pytest.mark.both
async def test_listing_a_runner_that_is_being_deleted_is_never_a_fault(client: CodeOcean) -> None:
    for _ in range(5):
        runner = await client.claim(1)
        seen: list[int] = []

        async def look(runner: str = runner, seen: list[int] = seen) -> None:
            seen.append((await client.request("GET", f"/runners/{runner}/files")).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(look)
            nursery.start_soon(client.release, runner)
        assert set(seen) <= {200, 410, 424}

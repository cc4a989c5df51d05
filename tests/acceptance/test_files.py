"""The acceptance list: files are copied, deleted and protected."""

from base64 import b64encode

import httpx
import pytest
import trio

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.codeocean_socket import Conversation
from tests.acceptance.codeocean_wire import submission
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

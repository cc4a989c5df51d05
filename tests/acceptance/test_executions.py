"""The acceptance list: commands, their output, and how they end."""

import json
from collections.abc import Sequence

import pytest
import trio

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.codeocean_socket import Conversation, open_socket
from tests.acceptance.sites import ROOT, Site

PATIENCE = 30
MAKEFILE = b"run:\n\t@echo This is echoed by make\n\n.PHONY: env\nenv:\n\t@env\n"


async def run(client: CodeOcean, runner: str, command: str, **how: object) -> Conversation:
    """Run a command to its close. *environment* isn't what CodeOcean sends, but others do."""
    wanted = {"command": command, "timeLimit": 20} | how
    answer = await client.request("POST", f"/runners/{runner}/execute", wanted)
    assert answer.status_code == 200, answer.text
    with trio.fail_after(PATIENCE):
        heard = await (await open_socket(answer.json()["websocketUrl"], client.token)).closed()
    assert not heard.dropped
    assert not heard.broken
    return heard


@pytest.mark.both
async def test_a_command_is_start_then_exit_then_close_1000(client: CodeOcean, runner: str) -> None:
    heard = await run(client, runner, "true")
    assert heard.messages == [{"type": "start"}, {"type": "exit", "data": 0}]
    assert heard.code == 1000


@pytest.mark.both
async def test_stdout_is_exactly_what_was_written(client: CodeOcean, runner: str) -> None:
    heard = await run(client, runner, "echo -n Hello World")
    assert (heard.text("stdout"), heard.text("stderr")) == ("Hello World", "")


@pytest.mark.both
async def test_errors_are_on_stderr_only_and_the_exit_code_is_the_commands(client: CodeOcean, runner: str) -> None:
    heard = await run(client, runner, "cat -invalid")
    assert heard.text("stdout") == ""
    assert "cat: invalid option" in heard.text("stderr")
    assert heard.result == ("exit", 1)


@pytest.mark.both
async def test_input_is_echoed_and_lines_end_in_cr_lf(client: CodeOcean, runner: str) -> None:
    socket = await client.execute(runner, "head -n 1")
    await socket.type("Hello World!\n")
    with trio.fail_after(PATIENCE):
        heard = await socket.closed()
    assert heard.text("stdout") == "Hello World!\r\n" * 2
    assert heard.result == ("exit", 0)


@pytest.mark.both
async def test_only_privileged_commands_are_root(site: Site, client: CodeOcean, runner: str) -> None:
    if not ROOT:
        pytest.skip("without root there is one user")
    assert (await run(client, runner, "id --user")).text("stdout").strip() != "0"
    privileged = await run(client, runner, "id --user", privilegedExecution=True)
    assert privileged.text("stdout").strip() == "0"


@pytest.mark.both
async def test_make_runs_a_copied_makefile(client: CodeOcean, runner: str) -> None:
    await client.copy(runner, {"Makefile": MAKEFILE})
    assert (await run(client, runner, "make run")).text("stdout") == "This is echoed by make\r\n"


def assert_variables(lines: Sequence[str]) -> None:
    assert "CODEOCEAN=true" in lines
    assert "hello=world" in lines
    assert not [line for line in lines if line.startswith(("AWS", "NOMAD_", "POSEIDON_"))]


@pytest.mark.both
async def test_variables_are_the_clients_and_codeocean_and_none_of_the_executors(
    client: CodeOcean, runner: str
) -> None:
    heard = await run(client, runner, "env", environment={"hello": "world", "CODEOCEAN": "false"})
    assert_variables(heard.text("stdout").split("\r\n"))


@pytest.mark.both
async def test_variables_reach_what_make_runs(client: CodeOcean, runner: str) -> None:
    await client.copy(runner, {"Makefile": MAKEFILE})
    heard = await run(client, runner, "make env", environment={"hello": "world"})
    assert_variables(heard.text("stdout").split("\r\n"))


@pytest.mark.both
async def test_a_time_limit_ends_the_command_with_timeout_and_close_1000(client: CodeOcean, runner: str) -> None:
    heard = await run(client, runner, "sleep 4 && echo too late", timeLimit=1)
    assert heard.messages == [{"type": "start"}, {"type": "timeout"}]
    assert heard.code == 1000


@pytest.mark.sandboxes
async def test_memory_beyond_the_limit_ends_the_command_as_out_of_memory(client: CodeOcean, number: int) -> None:
    await client.put(number, size=1, memoryLimit=300)
    runner = await client.claim(number)
    heard = await run(client, runner, "python3 -c 'b = bytearray(330 * 2**20); print(len(b))'")
    assert heard.text("stdout") == ""
    assert heard.messages[-1] == {"type": "error", "data": "the allocation was OOM Killed"}
    assert heard.result == ("out of memory", None)
    await client.remove(number)


@pytest.mark.both
async def test_a_fault_of_json_is_400_and_an_unknown_runner_410(client: CodeOcean, runner: str) -> None:
    broken = await client.http.post(f"/runners/{runner}/execute", content=b"{")
    assert (broken.status_code, bool(broken.json()["message"])) == (400, True)
    assert (await client.request("POST", "/runners/nobody/execute", {"command": "true"})).status_code == 410


@pytest.mark.both
async def test_a_request_without_a_handshake_is_400_and_an_unknown_execution_404(
    client: CodeOcean, runner: str
) -> None:
    answer = await client.request("POST", f"/runners/{runner}/execute", {"command": "true"})
    path = answer.json()["websocketUrl"].partition("/api/v1")[2]
    assert (await client.request("GET", path)).status_code == 400
    assert (await client.request("GET", path + "x")).status_code == 404


@pytest.mark.fake_nomad
async def test_the_pipe_for_stderr_is_gone_after_the_command(site: Site, client: CodeOcean, runner: str) -> None:
    heard = await run(client, runner, "readlink /proc/self/fd/2")
    [pipe] = heard.text("stdout").split()
    assert pipe.startswith("/tmp/")
    assert pipe.endswith(".fifo")
    with trio.fail_after(PATIENCE):
        while "No such file" not in (await run(client, runner, f"ls {pipe}")).text("stderr"):
            await trio.sleep(0.05)


@pytest.mark.both
async def test_clients_that_leave_at_once_leave_no_fault_and_no_process(
    site: Site, client: CodeOcean, runner: str
) -> None:
    for _ in range(10):
        socket = await client.execute(runner, "sleep 4711")
        await trio.sleep(0.001)
        with trio.fail_after(PATIENCE):
            await socket.stop()
            await socket.closed()
    with trio.fail_after(PATIENCE):
        while (await run(client, runner, "grep -lzx '471[1]' /proc/[0-9]*/cmdline")).text("stdout"):
            await trio.sleep(0.05)
    records = [json.loads(line) for line in site.log.splitlines() if line.startswith("{")]
    assert not [record for record in records if record.get("level") in {"error", "critical"}]

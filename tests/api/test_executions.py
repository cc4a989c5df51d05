"""Commands by the real API: what arrives, in which order, and how it ends."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trio
from sqlalchemy import Connection
from websockets.exceptions import InvalidStatus

from poseidon.api.server import ServerLimits
from poseidon.core.command import LARGEST_ARGUMENT
from tests.api.raw import frame, frames, handshake
from tests.api.service import TERMINAL, Service, connected, next_of, open_service, read, until


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_service(tmp_path) as opened:
        await opened.put(1)
        yield opened


@pytest.fixture
async def runner(service: Service) -> str:
    return await service.claim()


# What is said, and in which order


async def test_an_execution_starts_with_start_ends_with_exit_and_closes(service: Service, runner: str) -> None:
    ended = await service.run(runner, "true")
    assert ended.messages == [{"type": "start"}, {"type": "exit", "data": 0}]
    assert ended.code == 1000


async def test_stdout_and_stderr_are_apart_with_and_without_a_terminal(service: Service, runner: str) -> None:
    for tty, line in ((False, "out\n"), (True, "out\r\n")):
        ended = await service.run(runner, "echo out; echo err >&2", tty=tty)
        assert (ended.text(), ended.text("stderr")) == (line, "err\n")


async def test_every_exit_code_arrives(service: Service, runner: str) -> None:
    codes: dict[int, object] = {}

    async def run(code: int) -> None:
        codes[code] = (await service.run(runner, f"exit {code}")).final

    for first in range(0, 256, 32):
        async with trio.open_nursery() as nursery:
            for code in range(first, first + 32):
                nursery.start_soon(run, code)
    assert codes == {code: {"type": "exit", "data": code} for code in range(256)}


@pytest.mark.parametrize(
    ("command", "code"),
    [("kill -9 $$", 137), ("kill -USR1 $$", 138), ("kill -TERM $$", 143), ("surely-no-such-command", 127), ("", 0)],
)
async def test_signals_and_missing_commands_end_as_a_shell_says(
    service: Service, runner: str, command: str, code: int
) -> None:
    ended = await service.run(runner, command)
    assert ended.final == {"type": "exit", "data": code}


async def test_commands_arrive_intact(service: Service, runner: str) -> None:
    command = "a='it'\"'\"'s'\necho \"$a\"; echo '$HOME `x` \\n \"é\"'\nif true\nthen\n\techo two\nfi"
    ended = await service.run(runner, command)
    assert ended.text() == 'it\'s\n$HOME `x` \\n "é"\ntwo\n'


async def test_variables_arrive_intact(service: Service, runner: str) -> None:
    values = {"A": "$HOME `id` '\"; x\ny", "EMPTY": "", "UMLAUT": "äß→😀", "not-for-bash": "1", "N": None}
    ended = await service.run(runner, "env -0", environment=values)
    shown = dict(line.split("=", 1) for line in ended.text().split("\0") if "=" in line)
    for name, value in values.items():
        assert shown[name] == (value or "")
    assert shown["CODEOCEAN"] == "true"


async def test_the_client_cannot_change_codeocean(service: Service, runner: str) -> None:
    ended = await service.run(runner, "echo $CODEOCEAN", environment={"CODEOCEAN": "no"})
    assert ended.text() == "true\n"


async def test_characters_that_are_split_arrive_whole(service: Service, runner: str) -> None:
    command = r"for b in '\xf0' '\x9f' '\x98' '\x80' '\xc3' '\xa4'; do printf $b; sleep 0.01; done"
    ended = await service.run(runner, command)
    assert ended.text() == "😀ä"


async def test_what_is_no_character_becomes_a_replacement_and_nul_passes(service: Service, runner: str) -> None:
    ended = await service.run(runner, r"printf 'a\xff\0\xed\xa0\x80b\xf0\x9f'")
    assert ended.text() == "a�\0���b�"


async def test_messages_are_small(service: Service, runner: str) -> None:
    ended = await service.run(runner, "head -c 300000 /dev/zero | tr '\\0' x")
    assert len(ended.text()) == 300_000
    assert max(len(message.get("data", "")) for message in ended.messages[1:-1]) <= 32 * 1024


async def test_a_client_that_answers_no_ping_is_served_to_the_end(tmp_path: Path) -> None:
    async with open_service(tmp_path, limits=ServerLimits(ping=0.01)) as service:
        await service.put(1)
        url = await service.execute(await service.claim(), "read -r x; exit 5", tty=False)
        async with await trio.open_tcp_stream("127.0.0.1", httpx.URL(url).port or 0) as client:
            await client.send_all(handshake(url))
            received = b""
            with trio.fail_after(20):
                while received.count(b"\x89\x00") < 10:
                    received += await client.receive_some(65536)
                await client.send_all(frame(0x82, b"\n"))
                while b"\x88\x02" not in received:
                    received += await client.receive_some(65536)
        said = [payload for opcode, payload in frames(received.partition(b"\r\n\r\n")[2]) if opcode != 0x9]
        assert said == [b'{"type":"start"}', b'{"type":"exit","data":5}', b"\x03\xe8"]


async def test_output_of_a_background_child_does_not_hold_the_end(service: Service, runner: str) -> None:
    with trio.fail_after(30):
        ended = await service.run(runner, "sleep 300 & echo done")
    assert (ended.text(), ended.final) == ("done\n", {"type": "exit", "data": 0})


async def test_a_chatty_background_child_does_not_hold_the_end(service: Service, runner: str) -> None:
    with trio.fail_after(15):
        ended = await service.run(runner, "yes & echo done >&2")
    assert (ended.text("stderr"), ended.final) == ("done\n", {"type": "exit", "data": 0})


async def test_all_output_is_there_before_the_exit(service: Service, runner: str) -> None:
    for _ in range(5):
        ended = await service.run(runner, "seq 20000; seq 20000 >&2")
        expected = "".join(f"{number}\n" for number in range(1, 20001))
        assert (ended.text(), ended.text("stderr")) == (expected, expected)


async def test_concurrent_executions_in_one_runner_do_not_mix(service: Service, runner: str) -> None:
    texts: dict[int, str] = {}

    async def run(number: int) -> None:
        texts[number] = (await service.run(runner, f"yes {number} | head -n 5000")).text()

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(run, number)
    assert texts == {number: f"{number}\n" * 5000 for number in range(6)}


# Input


@pytest.mark.parametrize("frame", ["Hello World!\n", b"Hello World!\n"])
async def test_text_and_binary_frames_are_both_stdin(service: Service, runner: str, frame: str | bytes) -> None:
    async with connected(await service.execute(runner, "head -n 1")) as socket:
        await socket.send(frame)
        ended = await read(socket)
    assert ended.text() == "Hello World!\r\nHello World!\r\n"  # the terminal's echo, and what head says


async def test_without_the_subprotocol_control_is_stdin_too(service: Service, runner: str) -> None:
    async with connected(await service.execute(runner, "head -n 1", tty=False)) as socket:
        assert socket.subprotocol is None
        await socket.send('{"type":"eof"}\n')
        ended = await read(socket)
    assert ended.text() == '{"type":"eof"}\n'


async def test_empty_frames_change_nothing(service: Service, runner: str) -> None:
    async with connected(await service.execute(runner, "head -n 1", tty=False)) as socket:
        for frame in (b"", "", b"x", b"", b"y\n"):
            await socket.send(frame)
        ended = await read(socket)
    assert ended.text() == "xy\n"


async def test_a_terminal_has_a_size_that_can_change(service: Service, runner: str) -> None:
    command = "stty size; read; stty size"
    url = await service.execute(runner, command, rows=30, columns=100)
    async with connected(url, subprotocol=TERMINAL) as socket:
        await next_of(socket, "stdout")
        await socket.send(json.dumps({"type": "resize", "rows": 40, "columns": 120}))
        await socket.send(b"\n")
        ended = await read(socket)
        assert socket.subprotocol == TERMINAL
    assert "40 120" in ended.text()


async def test_a_terminal_ends_input_and_sends_signals(service: Service, runner: str) -> None:
    assert (await service.run(runner, "cat; echo over", b"in\n")).text() == "in\nover\n"
    url = await service.execute(runner, "trap 'echo got it; exit 5' INT; echo up; while true; do sleep 0.01; done")
    async with connected(url, subprotocol=TERMINAL) as socket:
        await next_of(socket, "stdout")
        await socket.send(json.dumps({"type": "signal", "signal": "INT"}))
        ended = await read(socket)
    assert "got it" in ended.text()
    assert ended.final == {"type": "exit", "data": 5}


@pytest.mark.parametrize(
    "frame",
    [
        "no json",
        "[" * 5000,
        "7",
        '{"type":"resize","rows":-1,"columns":80}',
        '{"type":"resize","rows":true,"columns":80}',
        '{"type":"resize","rows":99999,"columns":80}',
        '{"type":"signal","signal":"NOPE"}',
        '{"type":"signal","signal":9}',
        '{"type":"of the future"}',
    ],
)
async def test_control_that_makes_no_sense_changes_nothing(service: Service, runner: str, frame: str) -> None:
    async with connected(await service.execute(runner, "head -n 1", tty=False), subprotocol=TERMINAL) as socket:
        await socket.send(frame)
        await socket.send(b"fine\n")
        ended = await read(socket)
    assert ended.text() == "fine\n"
    assert ended.final == {"type": "exit", "data": 0}


async def test_much_input_arrives_in_order(service: Service, runner: str) -> None:
    data = "".join(f"{number}\n" for number in range(100_000)).encode()
    async with connected(await service.execute(runner, "md5sum", tty=False), subprotocol=TERMINAL) as socket:
        for start in range(0, len(data), 50_000):
            await socket.send(data[start : start + 50_000])
        await socket.send(json.dumps({"type": "eof"}))
        ended = await read(socket)
    import hashlib

    assert ended.text() == f"{hashlib.md5(data).hexdigest()}  -\n"


# Refusals


async def connect_status(url: str) -> int:
    with pytest.raises(InvalidStatus) as refused:
        async with connected(url):
            pass
    assert refused.value.response.body is not None
    return refused.value.response.status_code


async def test_an_execution_runs_once(service: Service, runner: str) -> None:
    url = await service.execute(runner, "echo x >> count")
    async with connected(url) as socket:
        await read(socket)
    assert await connect_status(url) == 404
    assert (service.workspace(runner) / "count").read_text() == "x\n"


async def test_of_two_clients_at_once_one_is_served(service: Service, runner: str) -> None:
    url = await service.execute(runner, "true")
    served, refused = [], []

    async def run() -> None:
        try:
            async with connected(url) as socket:
                served.append(await read(socket))
        except InvalidStatus as error:
            refused.append(error.response.status_code)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(run)
    assert refused == [404] * 4
    assert served[0].final == {"type": "exit", "data": 0}


async def test_an_unknown_execution_is_404_and_a_gone_runner_410(service: Service, runner: str) -> None:
    url = await service.execute(runner, "true")
    assert await connect_status(url + "0") == 404
    assert await connect_status(url.split("?")[0]) == 404
    await service.http.delete(f"/runners/{runner}")
    assert await connect_status(url) == 410


async def test_an_execution_belongs_to_its_runner(service: Service, runner: str) -> None:
    other = await service.claim()
    url = await service.execute(runner, "true")
    assert await connect_status(url.replace(runner, other)) == 404


async def test_a_request_that_is_no_handshake_is_400_and_takes_nothing(service: Service, runner: str) -> None:
    url = await service.execute(runner, "true")
    answer = await service.http.get(url.replace("ws://", "http://"))
    assert (answer.status_code, set(answer.json())) == (400, {"message"})
    async with connected(url) as socket:
        assert (await read(socket)).final == {"type": "exit", "data": 0}


async def test_pages_of_other_hosts_are_403(service: Service, runner: str) -> None:
    url = await service.execute(runner, "true")
    from websockets.trio.client import connect

    host = url.split("/")[2]
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, origin="http://evil.example", compression=None, proxy=None):  # type: ignore[arg-type]
            pass
    assert refused.value.response.status_code == 403
    async with connect(url, origin=f"http://{host}", compression=None, proxy=None) as socket:  # type: ignore[arg-type]
        assert (await read(socket)).code == 1000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"command": "x" * (LARGEST_ARGUMENT + 1)}, str(LARGEST_ARGUMENT)),
        ({"command": "ä" * (LARGEST_ARGUMENT // 2 + 1)}, str(LARGEST_ARGUMENT)),
        ({"command": "a\0b"}, "NUL"),
        ({"environment": {"A": "x" * LARGEST_ARGUMENT}}, "pass a file"),
        ({"environment": {f"A{n}": "x" * 100_000 for n in range(11)}}, "together"),
        ({"environment": {"A": "\0"}}, "NUL"),
        ({"environment": {"A=B": ""}}, "name"),
        ({"environment": {"": ""}}, "name"),
        ({"environment": {"A": 1}}, "string"),
        ({"environment": []}, "environment"),
        ({"timeLimit": -1}, "timeLimit"),
        ({"timeLimit": 1.0}, "timeLimit"),
        ({"timeLimit": "1"}, "timeLimit"),
        ({"timeLimit": 2**31}, "timeLimit"),
        ({"command": 1}, "command"),
        ({"privilegedExecution": "true"}, "privilegedExecution"),
        ([], "object"),
    ],
)
async def test_what_cannot_be_run_is_400_and_says_why(service: Service, runner: str, body: object, words: str) -> None:
    answer = await service.http.post(f"/runners/{runner}/execute", json=body)
    assert (answer.status_code, set(answer.json())) == (400, {"message"})
    assert words.lower() in answer.json()["message"].lower()
    assert len(answer.json()["message"]) < 400


async def test_the_largest_command_runs(service: Service, runner: str) -> None:
    line = "echo ".ljust(LARGEST_ARGUMENT, "x")
    assert (await service.run(runner, line)).text() == line[5:] + "\n"


async def test_the_url_is_made_of_the_host_that_was_asked(tmp_path: Path) -> None:
    async with open_service(tmp_path, token="a-token") as service:  # without one, not every host is served
        await service.put(1)
        runner = await service.claim()
        answer = await service.http.post(
            f"/runners/{runner}/execute", headers={"Host": "Example.org:81"}, content=b"{}"
        )
        url = answer.json()["websocketUrl"]
        assert url.startswith(f"ws://Example.org:81/api/v1/runners/{runner}/websocket?executionID=")


# Restarts


def pretend_killed(connection: Connection) -> None:
    """As if the daemon hadn't been able to record the end of what ran."""
    connection.exec_driver_sql("UPDATE executions SET state = 'running', outcome = NULL WHERE state = 'ended'")


def running_in_the_store(connection: Connection) -> int:
    return len(connection.exec_driver_sql("SELECT 1 FROM executions WHERE state = 'running'").all())


async def test_a_waiting_execution_survives_a_restart_and_a_running_one_is_over(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        await service.put(1)
        runner = await service.claim()
        waiting = await service.execute(runner, "echo still here", tty=False)
        running = await service.execute(runner, "sleep 60")
        executor = service.executor
        async with connected(running) as socket:
            await next_of(socket, "start")
            with trio.fail_after(15):
                await service.executions.drain(0)
                assert (await read(socket)).code == 1001
        await service.store.write(pretend_killed)
    async with open_service(tmp_path, executor=executor) as service:
        assert await service.store.read(running_in_the_store) == 0
        port = service.url.split(":")[2].split("/")[0]

        def here(url: str) -> str:
            parts = url.split("/")
            return "/".join([*parts[:2], f"127.0.0.1:{port}", *parts[3:]])

        async with connected(here(waiting)) as socket:
            assert (await read(socket)).text() == "still here\n"
        assert await connect_status(here(waiting)) == 404
        assert await connect_status(here(running)) == 404


async def test_an_execution_nobody_connects_to_expires(tmp_path: Path) -> None:
    async with open_service(tmp_path, expiry=0.05) as service:
        await service.put(1)
        runner = await service.claim()
        url = await service.execute(runner, "true")
        await trio.sleep(0.06)
        assert await connect_status(url) == 404
        await until(lambda: service.executions.waiting == 0)


async def test_waiting_executions_of_a_gone_runner_are_forgotten(tmp_path: Path) -> None:
    async with open_service(tmp_path, expiry=300) as service:
        await service.put(1)
        runner = await service.claim()
        await service.execute(runner, "true")
        await service.http.delete(f"/runners/{runner}")
        service.executions.forget_stale()
        assert service.executions.waiting == 0

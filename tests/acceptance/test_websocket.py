"""What happens on the WebSocket, byte by byte, as the client's library sees it: with either executor."""

import json
from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.utilities import LocalProtocolError

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.codeocean_socket import Conversation, HandshakeRefused, Socket, open_socket

PATIENCE = 30


async def run(
    client: CodeOcean, runner: str, command: str, *events: Event, limit: int = 20, **more: object
) -> Conversation:
    """Its conversation, after which nothing may be wrong. *events* are sent at once."""
    socket = await opened(client, runner, command, limit=limit, **more)
    with trio.fail_after(PATIENCE):
        for event in events:
            await socket.send(event)
        heard = await socket.closed()
    assert (heard.broken, heard.dropped) == ("", [])
    return heard


async def opened(client: CodeOcean, runner: str, command: str, *, limit: int = 20, **more: object) -> Socket:
    return await open_socket(await created(client, runner, command, timeLimit=limit, **more), client.token)


async def created(client: CodeOcean, runner: str, command: str, **more: object) -> str:
    answer = await client.request("POST", f"/runners/{runner}/execute", {"command": command} | more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["websocketUrl"])


@pytest.mark.both
async def test_there_is_one_final_message_and_it_is_the_last_before_close_1000(client: CodeOcean, runner: str) -> None:
    for command, final in [
        ("seq 20000; exit 9", {"type": "exit", "data": 9}),
        ("seq 20000; kill -9 $$", {"type": "exit", "data": 137}),
        ("seq 20000; exit 255", {"type": "exit", "data": 255}),
        ("seq 20000; sleep 20", {"type": "timeout"}),
    ]:
        heard = await run(client, runner, command, limit=1 if "sleep" in command else 20, tty=False)
        assert heard.code == 1000
        assert heard.messages[0] == {"type": "start"}
        said = {message["type"] for message in heard.messages[1:-1]}
        assert said - ({"stderr"} if "kill" in command else set()) == {"stdout"}  # a shell says "Killed"
        assert heard.messages[-1] == final
        assert heard.text("stdout") == "".join(f"{n}\n" for n in range(1, 20001))


@pytest.mark.both
async def test_input_that_nobody_reads_never_makes_a_good_end_a_reset(client: CodeOcean, runner: str) -> None:
    for _ in range(5):
        socket = await opened(client, runner, "sleep 0.1; exit 7", tty=False)

        async def flood(socket: Socket = socket) -> None:
            with trio.fail_after(PATIENCE), suppress(LocalProtocolError):  # the server has closed
                while True:
                    await socket.send(BytesMessage(bytes(50_000)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            with trio.fail_after(PATIENCE):
                heard = await socket.closed()
            nursery.cancel_scope.cancel()
        assert (heard.broken, heard.result) == ("", ("exit", 7))


@pytest.mark.both
async def test_what_is_no_character_is_replaced_and_half_ones_never_come(client: CodeOcean, runner: str) -> None:
    command = r"printf 'a\xff\xed\xa0\x80\0b\xc3'; printf '\xf0\x9f' >&2; sleep 0.2; printf '\x98\x80' >&2"
    heard = await run(client, runner, command, tty=False)
    assert heard.text("stdout").replace("\ufffd", "") == "a\0b"
    assert heard.text("stderr") == "\N{GRINNING FACE}"


@pytest.mark.both
async def test_output_comes_as_it_is_written_without_a_newline(client: CodeOcean, runner: str) -> None:
    socket = await opened(client, runner, "printf 'Name? '; read -r name; printf 'Hello %s' \"$name\"")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(socket.closed)
        with trio.fail_after(PATIENCE):
            await socket.said("Name? ")
            await socket.type("Ada\n")
            await socket.said("Hello Ada")


@pytest.mark.both
@pytest.mark.parametrize(
    "events",
    [
        [TextMessage("words\n")],
        [BytesMessage(b"wor"), TextMessage("ds\n")],
        [Ping(b"x"), BytesMessage(b""), TextMessage(""), BytesMessage(b"words\n")],
        [TextMessage("wo", message_finished=False), Ping(b""), TextMessage("rds\n")],
    ],
    ids=["text", "binary and text", "empty ones and pings", "fragments"],
)
async def test_every_frame_is_input_also_before_the_command_runs(
    client: CodeOcean, runner: str, events: Sequence[Event]
) -> None:
    heard = await run(client, runner, 'read -r said; echo "heard $said"', *events)
    assert heard.text("stdout").endswith("heard words\r\n")


@pytest.mark.both
async def test_an_execution_has_one_client(client: CodeOcean, runner: str) -> None:
    url = await created(client, runner, "read -r x")
    first = await open_socket(url, client.token)
    with pytest.raises(HandshakeRefused, match="404"):
        await open_socket(url, client.token)
    await first.type("\n")
    with trio.fail_after(PATIENCE):
        assert (await first.closed()).result == ("exit", 0)
    with pytest.raises(HandshakeRefused, match="404"):
        await open_socket(url, client.token)


@pytest.mark.both
async def test_a_handshake_without_the_token_is_401_and_takes_nothing(client: CodeOcean, runner: str) -> None:
    url = await created(client, runner, "true")
    with pytest.raises(HandshakeRefused, match="401"):
        await open_socket(url, "wrong")
    with trio.fail_after(PATIENCE):
        assert (await (await open_socket(url, client.token)).closed()).result == ("exit", 0)


@pytest.mark.both
async def test_an_execution_of_a_gone_runner_is_410(client: CodeOcean) -> None:
    runner = await client.claim(1)
    url = await created(client, runner, "true")
    await client.release(runner)
    with pytest.raises(HandshakeRefused, match="410"):
        await open_socket(url, client.token)


@pytest.mark.both
async def test_a_client_that_closes_is_answered_and_its_command_stopped(client: CodeOcean, runner: str) -> None:
    for _ in range(2):  # a close, then one more: the second is not heard any more
        socket = await opened(client, runner, "trap '' QUIT; echo on; exec sleep 4712")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(socket.closed)
            with trio.fail_after(PATIENCE):
                await socket.said("on")
                await socket.send(CloseConnection(1000))
        assert (socket.heard.code, socket.heard.broken) == (1000, "")
    with trio.fail_after(PATIENCE):
        while (await run(client, runner, "grep -lzx '471[2]' /proc/[0-9]*/cmdline")).text("stdout"):
            await trio.sleep(0.05)


@pytest.mark.both
async def test_the_url_is_absolute_and_of_the_host_that_was_asked(client: CodeOcean, runner: str) -> None:
    url = await created(client, runner, "true")
    assert url.startswith(client.url.replace("http://", "ws://") + f"/runners/{runner}/websocket?executionID=")
    answer = await client.http.post(
        f"/runners/{runner}/execute", content=json.dumps({"command": "true"}), headers={"Host": "127.0.0.1:1"}
    )
    assert answer.json()["websocketUrl"].startswith("ws://127.0.0.1:1/")

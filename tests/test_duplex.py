"""The WebSocket client of `run`: neither direction holds up the other."""

from functools import partial

import trio
from websockets.trio.client import ClientConnection
from websockets.trio.server import ServerConnection, serve

from poseidon.cli.conversation import connection
from poseidon.cli.target import Target

BLOCK = b"x" * 65_536
BLOCKS = 400
"""Together more than all buffers on the way."""


async def speak_before_listening(socket: ServerConnection) -> None:
    """A peer that takes no input before its output has been read, and asks for signs of life meanwhile."""
    for number in range(BLOCKS):
        if number % 10 == 0:
            await socket.ping()
        await socket.send(BLOCK)
    for _ in range(BLOCKS):
        await socket.recv()


async def test_input_that_the_daemon_doesnt_take_yet_never_keeps_its_output_from_being_read() -> None:
    heard = 0
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve, speak_before_listening, 0, host="127.0.0.1", compression=None))
        port = server.listeners[0].socket.getsockname()[1]
        with trio.fail_after(20):
            async with connection(f"ws://127.0.0.1:{port}", Target("", "")) as socket, trio.open_nursery() as both:
                both.start_soon(speak, socket)
                for _ in range(BLOCKS):
                    heard += len(await socket.recv())
            assert socket.close_code == 1000
        nursery.cancel_scope.cancel()
    assert heard == BLOCKS * len(BLOCK)


async def speak(socket: ClientConnection) -> None:
    """All of our input."""
    for _ in range(BLOCKS):
        await socket.send(BLOCK)

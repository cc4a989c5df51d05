"""Executions as a client sees them: a WebSocket, its messages, how it ended."""

import json
import time
from dataclasses import dataclass
from typing import Any

import trio
from websockets.trio.client import connect

from bench.daemons import Client

WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """All frames of a WebSocket, not yet understood: that costs the client more than all the rest."""

    frames: list[str | bytes]
    took: float
    """Milliseconds from opening the WebSocket to the final message."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(frame) for frame in self.frames]

    def output(self) -> str:
        """Of a program that succeeded. Raises RuntimeError if it didn't."""
        messages = self.messages
        if messages[-1] != {"type": "exit", "data": 0}:
            raise RuntimeError(f"the execution ended with {messages[-1]!r}")
        return "".join(message["data"] for message in messages if message["type"] == "stdout")


async def converse(url: str, *, pause: float = 0) -> Said:
    """Take what comes until the close, resting *pause* seconds after each message."""
    frames: list[str | bytes] = []
    began = last = time.perf_counter()
    with trio.fail_after(WITHIN):
        async with connect(url, compression=None, proxy=None, ping_interval=None, max_size=None) as channel:
            async for frame in channel:
                frames.append(frame)
                last = time.perf_counter()
                if pause:
                    await trio.sleep(pause)
    return Said(frames, 1000 * (last - began))


async def run(client: Client, runner: str, command: str, *, tty: bool) -> str:
    """Its output."""
    return (await converse(await client.create(runner, command, tty=tty))).output()

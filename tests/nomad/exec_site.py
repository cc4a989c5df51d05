"""What the tests of executions share: boxes in which commands really run, and a server that leads to them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, AllocationId, ClientStatus, JobId
from poseidon.executors.base import Exit, Process, Stream
from poseidon.executors.nomad.exec import ExecTarget, open_exec
from tests.fakes.nomad_exec import Boxes, ExecServer, open_boxes, open_exec_server
from tests.fakes.nomad_exec_boxes import Box

PATIENCE = 30.0


def allocation_of(identity: str) -> Allocation:
    return Allocation(AllocationId(identity), JobId("1-job"), 1, 1, ClientStatus.RUNNING)


@dataclass(slots=True)
class Site:
    """One allocation behind one server."""

    boxes: Boxes
    server: ExecServer
    box: Box
    target: ExecTarget

    @property
    def allocation(self) -> Allocation:
        return allocation_of(self.box.id)

    @asynccontextmanager
    async def open(self, command: Command, **changes: Any) -> AsyncIterator[Process]:
        """Run it; what the daemon would do in the end is left to the test."""
        with trio.fail_after(PATIENCE):
            target = replace(self.target, **changes) if changes else self.target
            async with open_exec(target, self.allocation, command) as process:
                yield process

    async def run(self, line: str, *, stdin: bytes = b"", **options: Any) -> "Result":
        """Run it to its end."""
        async with self.open(Command(line, **options)) as process, trio.open_nursery() as nursery:
            nursery.start_soon(feed, process, stdin)
            out, err = await drain(process)
            ended = await process.wait()
        return Result(out.decode(), err.decode(), ended)

    async def until_empty(self) -> None:
        """Wait until nothing of any command is left."""
        with trio.fail_after(PATIENCE):
            while self.box.processes():
                await trio.sleep(0.005)

    def scripts(self, word: str) -> int:
        """How many requests ran a script with this word."""
        return sum(word in " ".join(head.words) for head in self.server.requests)


@dataclass(frozen=True, slots=True)
class Result:
    """What a command gave."""

    out: str
    err: str
    exit: Exit

    @property
    def code(self) -> int:
        return self.exit.code


@asynccontextmanager
async def open_site(driver: str, folder: Path, **options: Any) -> AsyncIterator[Site]:
    """*options* are of the target."""
    async with open_boxes() as boxes, open_exec_server(boxes) as server:
        box = await boxes.open(driver, folder)
        yield Site(boxes, server, box, ExecTarget(server.url, **{"set_user": "", **options}))


async def feed(process: Process, data: bytes) -> None:
    """Send it all, then the end."""
    await process.send(data)
    await process.close_stdin()


async def drain(process: Process) -> tuple[bytes, bytes]:
    """All output until both streams have ended."""
    found = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
    while chunk := await process.receive():
        assert 0 < len(chunk[1]) <= 65536
        found[chunk[0]] += chunk[1]
    return bytes(found[Stream.STDOUT]), bytes(found[Stream.STDERR])


async def read_until(process: Process, text: str) -> str:
    """Read output until *text* has come."""
    found = b""
    while text.encode() not in found:
        chunk = await process.receive()
        assert chunk, f"the output ended: {found!r}"
        found += chunk[1]
    return found.decode()

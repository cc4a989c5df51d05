"""The helper's protocol, and what a helper that has been taken over may try with it."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from poseidon.core.command import Command
from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError
from poseidon.executors.local import inside, wire
from poseidon.executors.local.commands import Commands
from poseidon.executors.local.launch import open_folder
from poseidon.executors.local.limits import Execution, Group
from poseidon.executors.local.process import LocalProcess
from tests.local.support import PATIENCE

HELLO = (b"poseidon", b"1")


def test_both_sides_agree_on_frames_and_version() -> None:
    items = [b"", b"a", bytes(range(256)) * 1000]
    assert inside.pack(*items) == wire.pack(*items)
    assert wire.unpack(inside.pack(*items)[4:]) == inside.unpack(wire.pack(*items)[4:]) == items
    assert inside.VERSION == wire.VERSION


def test_the_helper_runs_on_old_and_new_pythons() -> None:
    source = Path(inside.__file__).read_text()
    compile(source, "inside.py", "exec")
    assert "match " not in source.replace("re.match", "")
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names)


async def send(*chunks: bytes, descriptors: tuple[int, ...] = ()) -> list[bytes]:
    """What the daemon makes of these bytes."""
    ours, theirs = socket.socketpair()
    channel = wire.Channel(ours)
    try:
        for chunk in chunks:
            socket.send_fds(theirs, [chunk], descriptors)
        theirs.close()
        with trio.fail_after(PATIENCE):
            return await channel.receive()
    finally:
        channel.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x05\0\0\0\x09a", b"\0\0\x10\x01" + b"x" * 4097],
    ids=["nothing", "half a length", "huge", "item too long", "oversized"],
)
async def test_a_malformed_frame_is_a_lost_connection(data: bytes) -> None:
    with pytest.raises(ConnectionLost):
        await send(data) if data else await send()


async def test_a_frame_in_pieces_is_put_together() -> None:
    frame = wire.pack(b"exited", b"0")
    assert await send(*(frame[i : i + 1] for i in range(len(frame)))) == [b"exited", b"0"]


async def test_more_descriptors_than_asked_for_are_refused_and_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionLost):
        await send(wire.pack(b"started", b"1"), descriptors=tuple(range(3)) * 50)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_only_the_master_of_a_terminal_is_taken_for_one() -> None:
    master, slave = os.openpty()
    null, pipe = os.open("/dev/null", os.O_RDWR), os.pipe()
    try:
        for descriptor, fine in ((master, True), (slave, False), (null, False), (pipe[0], False)):
            ours, theirs = socket.socketpair()
            channel = wire.Channel(ours)
            socket.send_fds(theirs, [wire.pack(b"started", b"1")], [descriptor])
            await channel.receive()
            if fine:
                os.close(channel.take_terminal())
            else:
                with pytest.raises(ConnectionLost):
                    channel.take_terminal()
            with pytest.raises(ConnectionLost):
                channel.take_terminal()
            channel.close()
            theirs.close()
    finally:
        for number in (master, slave, null, *pipe):
            os.close(number)


Talk = Callable[[trio.SocketStream], object]


async def with_helper(folder: Path, replies: bytes, command: Command, *, then_close: bool) -> object:
    """Run *command* against a helper that answers everything with *replies*."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    server = trio.SocketListener(trio.socket.from_stdlib_socket(listener))

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(replies)
            if not then_close:
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, [server])
        gone = trio.Event()
        commands = Commands(open_folder(folder), Group((), ""), processes=1, gone=gone, nursery=nursery)
        try:
            with trio.fail_after(PATIENCE):
                async with commands.open(command) as process:
                    return await process.wait()
        finally:
            commands.close()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        (b"", AllocationGone),
        (wire.pack(b"nonsense"), AllocationGone),
        (wire.pack(b"failed", b"x", b""), AllocationGone),
        (wire.pack(b"failed", b"11", b""), ExecutorError),
        (wire.pack(b"failed", b"7", b""), ExecutorError),
        (wire.pack(b"started", b"1"), ConnectionLost),
        (wire.pack(b"started", b"1") + wire.pack(b"exited", b"256"), ConnectionLost),
        (wire.pack(b"started", b"1") + wire.pack(b"exited"), ConnectionLost),
        (wire.pack(b"started", b"1") + wire.pack(b"exited", b"-1"), ConnectionLost),
    ],
)
async def test_a_helper_that_lies_ends_the_execution_with_an_error(
    tmp_path: Path, replies: bytes, error: type[Exception]
) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        await with_helper(tmp_path, replies, Command("true", tty=False), then_close=True)
    assert caught.group_contains(error)


async def test_a_kill_is_believed_only_if_the_cgroup_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.executors.local.process.KILL_PATIENCE", 0.05)
    monkeypatch.setattr("poseidon.executors.local.process.GONE_PATIENCE", 0.01)
    group = Execution(tmp_path, tmp_path, tmp_path, b"")
    for left, certain, believed in (("", b"1", True), ("4711\n", b"1", False), ("", b"0", False)):
        (tmp_path / "cgroup.procs").write_text(left)
        ours, theirs = socket.socketpair()
        null, out, err = os.open("/dev/null", os.O_WRONLY), os.pipe(), os.pipe()
        process = LocalProcess(
            wire.Channel(ours),
            [null, out[0], err[0]],
            terminal=False,
            group=group,
            out_of_memory=lambda: False,
            sandbox_gone=trio.Event(),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.listen)
            theirs.send(wire.pack(b"killed", certain))
            assert await process.kill() is believed
            process.close()
        theirs.close()
        os.close(out[1])
        os.close(err[1])


async def test_a_terminal_that_isnt_sent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        await with_helper(tmp_path, wire.pack(b"started", b"1"), Command("true"), then_close=False)
    assert caught.group_contains(AllocationGone)


async def test_a_helper_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.executors.local.commands.PATIENCE", 0.05)
    with pytest.raises(BaseExceptionGroup) as caught:
        await with_helper(tmp_path, b"", Command("true", tty=False), then_close=False)
    assert caught.group_contains(ExecutorError)

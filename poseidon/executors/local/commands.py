"""Running commands in a sandbox: the request to its helper, and the descriptors that go with it."""

import errno
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager

import trio

from poseidon.core.command import Command
from poseidon.errors import AllocationGone, BadRequest, ConnectionLost, ExecutorError, ExecutorUnreachable
from poseidon.executors.local import wire
from poseidon.executors.local.limits import Execution, Group
from poseidon.executors.local.process import LocalProcess, open_host_terminal
from poseidon.executors.local.root import WORKSPACE

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATIENCE = 10.0
TERMINALS_USED_UP = (errno.ENOSPC, errno.EIO, errno.ENOENT)
OUT_OF_PROCESSES = (errno.EAGAIN, errno.ENOMEM)


class Refused(Exception):
    """The helper couldn't start the command."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class Commands:
    """The commands of one sandbox."""

    def __init__(self, folder: int, group: Group, *, processes: int, gone: trio.Event, nursery: trio.Nursery) -> None:
        self._folder = folder
        """Descriptor of the runner's folder, where the helper's socket is; closed by `close`."""
        self._group = group
        self._processes = processes
        self._gone = gone
        self._nursery = nursery
        self._number = group.highest_execution()
        self._leftover: list[Execution] = []

    @asynccontextmanager
    async def open(self, command: Command) -> AsyncIterator[LocalProcess]:
        """Run *command*. Raises AllocationGone, ExecutorUnreachable, BadRequest, ExecutorError."""
        process, group = await self._start(command)
        self._nursery.start_soon(process.listen)
        try:
            yield process
        finally:
            process.close()
            if group:
                self._leftover.append(group)
                self._sweep()

    async def _start(self, command: Command) -> tuple[LocalProcess, Execution | None]:
        words = [*words_of(command), *environment_of(command)]
        kills = self._kills()
        with ExitStack() as undo, ExitStack() as theirs:
            group = self._new_group(undo)
            channel = self._connect()
            undo.callback(channel.close)
            streams = await self._request(Request(command, words, group, undo, theirs), channel)
            process = LocalProcess(
                channel,
                streams,
                terminal=command.tty,
                group=group,
                out_of_memory=lambda: self._kills() > kills,
                sandbox_gone=self._gone,
            )
            undo.pop_all()
            return process, group

    async def _request(self, request: "Request", channel: wire.Channel) -> tuple[int, int, int]:
        """Ask the helper for it; the answer is our ends of stdin, stdout and stderr."""
        try:
            with trio.fail_after(PATIENCE):
                return await (request.with_terminal(channel) if request.command.tty else request.with_pipes(channel))
        except Refused as refusal:
            if refusal.number in OUT_OF_PROCESSES:
                raise ExecutorError("the runner has reached its limit of processes, nothing can be started") from None
            raise ExecutorError(f"the command can't be started: {refusal}") from None
        except ConnectionLost as error:
            raise AllocationGone("the sandbox doesn't run any more") from error
        except trio.TooSlowError as error:
            raise ExecutorUnreachable("the sandbox's helper doesn't answer") from error

    def _connect(self) -> wire.Channel:
        try:
            return wire.Channel(wire.connect(self._folder))
        except BlockingIOError as error:
            raise ExecutorUnreachable("the sandbox's helper doesn't answer") from error
        except OSError as error:
            raise AllocationGone("the sandbox doesn't run any more") from error

    def _new_group(self, undo: ExitStack) -> Execution | None:
        self._sweep()
        self._number += 1
        try:
            group = self._group.execution(self._number, self._processes)
        except OSError as error:
            raise AllocationGone("the sandbox doesn't run any more") from error
        if group:
            undo.callback(self._leftover.append, group)
        return group

    def _kills(self) -> int:
        return self._group.out_of_memory_kills()

    def _sweep(self) -> None:
        """Remove the cgroups of executions of which nothing is left."""
        self._leftover = [group for group in self._leftover if not group.remove()]

    def close(self) -> None:
        """No more commands."""
        os.close(self._folder)


class Request:
    """What is asked of a helper. *undo* closes our ends of the streams, *theirs* the other ends."""

    def __init__(
        self, command: Command, words: list[bytes], group: Execution | None, undo: ExitStack, theirs: ExitStack
    ) -> None:
        self.command = command
        self._flags = b"p" if command.privileged else b""
        if group:
            self._flags += b"c:" + group.stop_text
        self._rest = [str(command.rows).encode(), str(command.columns).encode(), encode(command.cwd or WORKSPACE)]
        self._rest += [str(len(command.arguments())).encode(), *words]
        self._undo, self._theirs = undo, theirs
        self._stderr, their_stderr = pipe(undo, theirs)
        self._always = [their_stderr, *cgroup_files(group, theirs)]

    async def with_pipes(self, channel: wire.Channel) -> tuple[int, int, int]:
        """Pipes for all three."""
        their_stdin, stdin = pipe(self._theirs, self._undo, ours_reads=False)
        stdout, their_stdout = pipe(self._undo, self._theirs)
        await run(channel, [self._flags, *self._rest], [their_stdin, their_stdout, *self._always])
        return stdin, stdout, self._stderr

    async def with_terminal(self, channel: wire.Channel) -> tuple[int, int, int]:
        """A terminal of the sandbox; one of this machine if runners have used up all that they may have."""
        try:
            await run(channel, [b"t" + self._flags, *self._rest], self._always)
            master = undo_close(channel.take_terminal(), self._undo)
        except Refused as refusal:
            if refusal.number not in TERMINALS_USED_UP:
                raise
            master, slave = open_host_terminal()
            undo_close(master, self._undo)
            undo_close(slave, self._theirs)
            await run(channel, [b"s" + self._flags, *self._rest], [slave, *self._always])
        return master, master, self._stderr


async def run(channel: wire.Channel, items: list[bytes], descriptors: list[int]) -> None:
    """Send the request, see it accepted. Raises Refused, ConnectionLost."""
    await channel.send(b"run", *items, descriptors=descriptors)
    match await channel.receive():
        case [b"started", _]:
            return
        case [b"failed", number, _] if number.isdigit():
            raise Refused(int(number))
    raise ConnectionLost("the sandbox's helper sent an unexpected answer")


def pipe(reader: ExitStack, writer: ExitStack, *, ours_reads: bool = True) -> tuple[int, int]:
    """A pipe whose ends are closed by the two stacks; our end doesn't block."""
    read, write = os.pipe()
    undo_close(read, reader)
    undo_close(write, writer)
    os.set_blocking(read if ours_reads else write, False)
    return read, write


def undo_close(descriptor: int, stack: ExitStack) -> int:
    """Have *stack* close it."""
    stack.callback(os.close, descriptor)
    return descriptor


def cgroup_files(group: Execution | None, stack: ExitStack) -> list[int]:
    """What the helper needs to put a command into its cgroup, and to kill it by that."""
    if group is None:
        return []
    try:
        entrance = undo_close(os.open(group.entrance, os.O_RDWR | os.O_CLOEXEC), stack)
        return [entrance, undo_close(os.open(group.stop_file, os.O_WRONLY | os.O_CLOEXEC), stack)]
    except OSError as error:
        raise AllocationGone("the sandbox doesn't run any more") from error


def encode(text: str) -> bytes:
    """As execve wants it. Raises BadRequest."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadRequest("the command or its environment isn't valid Unicode") from error
    if b"\0" in data:
        raise BadRequest("the command or its environment holds a NUL character")
    return data


def words_of(command: Command) -> list[bytes]:
    """The argument vector."""
    return [encode(word) for word in command.arguments()]


def environment_of(command: Command) -> list[bytes]:
    """The entries of the environment: ours, then the client's, then what it may not change."""
    ours: Mapping[str, str] = {
        "PATH": PATH,
        "HOME": "/root" if command.privileged else WORKSPACE,
        "USER": "root" if command.privileged else "user",
        "LANG": "C.UTF-8",
        **({"TERM": "xterm-256color"} if command.tty else {}),
        **command.environment,
        "CODEOCEAN": "true",
    }
    for name in ours:
        if not name or "=" in name:
            raise BadRequest(f"{name!r} can't be the name of an environment variable")
    return [encode(f"{name}={value}") for name, value in ours.items()]

"""A real executor without sandboxes: jobs are entries in memory, commands are processes of this machine.

For tests and for measurements that want an executor which costs nothing. It isolates nothing.
"""

import os
import pty
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from uuid import uuid4

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, AllocationId, JobId
from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError, Unsupported
from poseidon.executors.base import Exit, Process, Stream
from tests.fakes.scripted import ScriptedExecutor

MARK = "POSEIDON_PLAIN"
CHUNK = 64 * 1024


@dataclass
class PlainExecutor(ScriptedExecutor):
    """Workspaces are folders below *root*. What it shall do wrong is set by the test."""

    root: Path = Path("/nonexistent")
    one_user: bool = False
    """Refuse privileged commands, as an executor without root does."""
    unkillable: bool = False
    """Say of each kill that something may be left."""
    ends_as: Exit | None = None
    """What each command ends with, whatever it did."""
    start_failure: ExecutorError | None = None
    """What `execute` raises."""
    start_delay: float = 0.0
    stuck: trio.Event | None = None
    """A start that is given up takes until then."""
    identity: str = field(default_factory=lambda: uuid4().hex)
    """So that executors of several test runs at once don't kill each other's processes."""
    kills: int = 0
    """How often it was asked to kill a command."""
    processes: dict[AllocationId, set["PlainProcess"]] = field(default_factory=dict)

    def register(self, job: JobId, *, used: bool | None = None) -> None:
        super().register(job, used=used)
        self.workspace(self.newest(job).id).mkdir(parents=True, exist_ok=True)

    def remove(self, job: JobId) -> None:
        for allocation in [known.id for known in self.allocations.values() if known.job == job]:
            self.lose(allocation)
            if self.processes.pop(allocation, None) is not None:
                kill_all(f"{self.identity}/{allocation}/")
            shutil.rmtree(self.workspace(allocation), ignore_errors=True)
        super().remove(job)

    def workspace(self, allocation: AllocationId) -> Path:
        """Where commands of *allocation* begin."""
        return self.root / allocation

    def lose(self, allocation: AllocationId) -> None:
        """The connections of all commands there break, and nothing of them is left."""
        for process in list(self.processes.get(allocation, ())):
            process.lose()

    def clean(self) -> None:
        """Leave no process behind."""
        for allocation in self.processes:
            self.lose(allocation)
            kill_all(f"{self.identity}/{allocation}/")

    @asynccontextmanager
    async def execute(self, allocation: Allocation, command: Command) -> AsyncIterator[Process]:
        try:
            await trio.sleep(self.start_delay)
        finally:
            if self.stuck is not None:
                with trio.CancelScope(shield=True):
                    await self.stuck.wait()
        if self.start_failure is not None:
            raise self.start_failure
        if command.privileged and self.one_user:
            raise Unsupported("there is only one user here")
        if allocation.id not in self.allocations:
            raise AllocationGone("the allocation doesn't run")
        running = self.processes.setdefault(allocation.id, set())
        async with trio.open_nursery() as nursery:
            with _started(command, f"{self.identity}/{allocation.id}", self.workspace(allocation.id)) as started:
                process = PlainProcess(started, nursery, self)
                running.add(process)
                try:
                    yield process
                finally:
                    running.discard(process)
                    process.destroy()
            nursery.cancel_scope.cancel()


@dataclass
class Started:
    """A process with our ends of its streams."""

    popen: "subprocess.Popen[bytes]"
    stdin: int
    stdout: int
    stderr: int
    tty: bool
    mark: str


@contextmanager
def _started(command: Command, place: str, folder: Path) -> Iterator[Started]:
    mark = f"{place}/{uuid4().hex}"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        **command.environment,
        "CODEOCEAN": "true",
        MARK: mark,
    }
    ours, theirs, stderr = _terminal(command) if command.tty else _pipes()
    arguments = ["setsid", "--ctty", *command.arguments()] if command.tty else list(command.arguments())
    if signal.SIG_IGN in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGQUIT)):
        arguments = ["env", "--default-signal", *arguments]  # a shell that started us in its background ignores these
    popen = subprocess.Popen(
        arguments,
        stdin=theirs[0],
        stdout=theirs[1],
        stderr=stderr[1],
        cwd=folder / command.cwd,
        env=environment,
        start_new_session=not command.tty,
    )
    for descriptor in {*theirs, stderr[1]}:
        os.close(descriptor)
    yield Started(popen, ours[0], ours[1], stderr[0], command.tty, mark)


def _terminal(command: Command) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    master, slave = pty.openpty()
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", command.rows, command.columns, 0, 0))
    return (os.dup(master), master), (slave, slave), os.pipe()


def _pipes() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    (stdin_out, stdin_in), (stdout_out, stdout_in) = os.pipe(), os.pipe()
    return (stdin_in, stdout_out), (stdin_out, stdout_in), os.pipe()


class PlainProcess:
    """One of its commands."""

    def __init__(self, started: Started, nursery: trio.Nursery, executor: PlainExecutor) -> None:
        self._popen = started.popen
        self._tty = started.tty
        self._mark = started.mark
        self._executor = executor
        self._stdin = trio.lowlevel.FdStream(started.stdin)
        self._outputs = {
            Stream.STDOUT: trio.lowlevel.FdStream(started.stdout),
            Stream.STDERR: trio.lowlevel.FdStream(started.stderr),
        }
        self._terminal = started.stdout
        self._exit: Exit | None = None
        self._lost = False
        self._ended = trio.Event()
        self._send, self._receive = trio.open_memory_channel[tuple[Stream, bytes]](1)
        for stream in Stream:
            nursery.start_soon(self._read, stream, self._send.clone())
        self._send.close()
        nursery.start_soon(self._reap)

    async def send(self, data: bytes) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stdin.send_all(data)

    async def close_stdin(self) -> None:
        if self._tty:
            await self.send(b"\x04")
        else:
            await self._stdin.aclose()

    async def resize(self, rows: int, columns: int) -> None:
        if self._tty:
            ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        await trio.lowlevel.checkpoint()

    async def signal(self, number: int) -> None:
        await trio.lowlevel.checkpoint()
        if self._ended.is_set():
            return
        with suppress(OSError):
            group = os.tcgetpgrp(self._terminal) if self._tty else self._popen.pid
            if group > 0:  # a terminal without a session has none, and group 0 would be ourselves
                os.killpg(group, number)

    async def receive(self) -> tuple[Stream, bytes] | None:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._lost:
                raise ConnectionLost("the connection was cut") from None
            return None

    async def wait(self) -> Exit:
        await self._ended.wait()
        if self._exit is None:
            raise ConnectionLost("the connection was cut")
        return self._executor.ends_as or self._exit

    async def kill(self) -> bool:
        self._executor.kills += 1
        kill_all(self._mark)
        await self._reap()  # here, for our own tasks may have been cancelled
        return not self._executor.unkillable

    def lose(self) -> None:
        """Break the connection, and leave nothing running."""
        self._lost = True
        self._ended.set()
        kill_all(self._mark)

    def destroy(self) -> None:
        """For the end of the context. What an ended command left in the background lives on."""
        if not self._ended.is_set():
            kill_all(self._mark)
        self._popen.wait()
        self._receive.close()

    async def _reap(self) -> None:
        pidfd = os.pidfd_open(self._popen.pid) if self._popen.returncode is None else None
        if pidfd is not None:
            try:
                await trio.lowlevel.wait_readable(pidfd)
            finally:
                os.close(pidfd)
        code = self._popen.wait()
        if not self._lost:
            self._exit = Exit(code if code >= 0 else 128 - code)
            self._ended.set()

    async def _read(self, stream: Stream, channel: trio.MemorySendChannel[tuple[Stream, bytes]]) -> None:
        source = self._outputs[stream]
        try:
            with suppress(trio.BrokenResourceError):  # of a terminal that nobody holds any more, or of who listens
                while data := await source.receive_some(CHUNK):
                    await channel.send((stream, data))
        finally:
            channel.close()
            with trio.CancelScope(shield=True):
                await source.aclose()
                if stream is Stream.STDOUT:
                    await self._stdin.aclose()


def kill_all(mark: str) -> None:
    """Kill whatever bears a mark that begins so, until nothing does."""
    while pids := list(_marked(mark)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if any(each.startswith(wanted) for each in (entry / "environ").read_bytes().split(b"\0")):
                    yield int(entry.name)

"""Allocations in which commands really run, for the exec endpoint of `nomad_exec`.

A "docker" box is a process namespace of its own, whose first process is a `sleep` that reaps nobody, as in production.
A "raw_exec" box is this machine.
"""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import trio

FRAME = {"docker": 1024, "raw_exec": 4096}
ROOT = os.geteuid() == 0
LABEL = "FAKE_BOX"
QUIET = 0.5
"""Seconds."""


class Refused(Exception):
    """A close code and reason, as Nomad gives them after the upgrade."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Box:
    """The place of one allocation."""

    def __init__(self, identity: str, driver: str, folder: Path, nursery: trio.Nursery) -> None:
        self.id = identity
        self.driver = driver
        self.folder = folder
        self.running = True
        self.task = "default-task"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TERM": "xterm",
            LABEL: identity,
            "NOMAD_ALLOC_ID": identity,
            "NOMAD_TASK_NAME": self.task,
            "NOMAD_META_secret": "a b",
        }
        self._nursery = nursery
        self._first: subprocess.Popen[bytes] | None = None
        self.init = 0
        self._commands: list[Command] = []
        self._fifos: set[Path] = set()
        """A box shares its /tmp with all others, and what would remove them there is killed with it."""

    async def begin(self) -> None:
        """Docker: make the namespace."""
        if self.driver != "docker":
            return
        user = () if ROOT else ("--user", "--map-root-user")
        command = ("unshare", *user, "--fork", "--pid", "--mount-proc", "--kill-child", "sleep", "infinity")
        self._first = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self.environment)
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        with trio.fail_after(30), suppress(FileNotFoundError, ProcessLookupError):  # it is stopped meanwhile
            while not (found := children.read_text().split()):
                await trio.sleep(0.002)
            self.init = int(found[0])
            while Path(f"/proc/{self.init}/comm").read_text() != "sleep\n":
                await trio.sleep(0.002)

    def arguments(self, words: list[str], *, tty: bool) -> list[str]:
        """How to run *words* here."""
        leader = ["setsid", "--ctty"] if tty else ["setsid"]
        if self.driver != "docker":
            return [*leader, *words] if tty else words
        user = [] if ROOT else ["--user", "--preserve-credentials"]
        enter = ["nsenter", f"--target={self.init}", *user, "--pid", "--mount"]
        return [*enter, "env", f"--chdir={self.folder}", *leader, *words]

    def run(self, words: list[str], *, tty: bool) -> "Command":
        """Begin to run *words*."""
        self._fifos |= {Path(word) for word in words if word.endswith(".fifo")}
        command = Command(self, words, tty=tty)
        self._commands.append(command)
        self._nursery.start_soon(command.live)
        return command

    def processes(self) -> list[int]:
        """All that were ever begun here and still run, but the first."""
        return [pid for pid in labelled(self.id) if pid not in (self.init, self._first.pid if self._first else 0)]

    def stop(self) -> None:
        """Kill all that runs here, the first process included."""
        self.running = False
        if self._first:
            with suppress(ProcessLookupError):
                if self.init:  # 0 would be everybody in our process group, ourselves included
                    os.kill(self.init, signal.SIGKILL)
            self._first.kill()
            self._first.wait()
        for command in self._commands:  # one that has only just begun has no label yet
            command.kill()
        while left := list(labelled(self.id)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for fifo in self._fifos:
            fifo.unlink(missing_ok=True)


def labelled(identity: str) -> Iterator[int]:
    """Processes whose environment names this box, zombies apart."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"{LABEL}={identity}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


class Boxes:
    """Allocations by their ids."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._boxes: dict[str, Box] = {}

    async def open(self, driver: str, folder: Path, identity: str = "") -> Box:
        """A new one."""
        box = Box(identity or str(uuid4()), driver, folder, self._nursery)
        self._boxes[box.id] = box
        await box.begin()
        return box

    def find(self, identity: str, task: str) -> Box:
        """Raises Refused, in the recorded words."""
        box = self._boxes.get(identity)
        if len(identity) != 36:
            raise Refused(1011, "alloc lookup failed: index error: UUID must be 36 characters")
        if box is None:
            raise Refused(1008, f'Unknown allocation "{identity}"')
        if task != box.task:
            raise Refused(1011, "task not found")
        if not box.running:
            raise Refused(1008, f'task "{task}" is not running.')
        return box

    def close(self) -> None:
        for box in self._boxes.values():
            box.stop()


@asynccontextmanager
async def open_boxes() -> AsyncIterator[Boxes]:
    """Whatever runs in them is killed in the end."""
    async with trio.open_nursery() as nursery:
        boxes = Boxes(nursery)
        try:
            yield boxes
        finally:
            boxes.close()
            nursery.cancel_scope.cancel()


Sink = Callable[[str, bytes], Awaitable[None]]


class Command:
    """A process with its streams; it and they live on when nobody listens any more."""

    def __init__(self, box: Box, words: list[str], *, tty: bool) -> None:
        self.box, self.tty = box, tty
        self.sink: Sink | None = None
        self.code = -1
        self.ended = trio.Event()
        self._pieces = 0
        self._passing = 0
        self.drained = {"stdout": trio.Event()} if tty else {"stdout": trio.Event(), "stderr": trio.Event()}
        theirs: list[int] = []
        try:
            self._open_streams(theirs)
            stdin, stdout, stderr = theirs if not tty else theirs * 3
            self._process = subprocess.Popen(
                box.arguments(words, tty=tty),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=box.folder,
                env=box.environment,
                **({"start_new_session": True} if box.driver == "docker" else {"process_group": 0} if not tty else {}),
            )
        finally:
            for fd in theirs:
                os.close(fd)

    def _open_streams(self, theirs: list[int]) -> None:
        if self.tty:
            master, slave = pty.openpty()
            theirs.append(slave)
            self.stdin = trio.lowlevel.FdStream(master)
            self.outputs = {"stdout": self.stdin}
            return
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        stderr, their_stderr = os.pipe()
        theirs += [their_stdin, their_stdout, their_stderr]
        self.stdin = trio.lowlevel.FdStream(stdin)
        self.outputs = {"stdout": trio.lowlevel.FdStream(stdout), "stderr": trio.lowlevel.FdStream(stderr)}

    async def live(self) -> None:
        """Pass on what it writes, until it has ended and its output has too."""
        try:
            async with trio.open_nursery() as nursery:
                for name, stream in self.outputs.items():
                    nursery.start_soon(self._pump, name, stream)
                await self._wait()
        finally:
            self._process.kill()
            self._process.wait()
            with trio.CancelScope(shield=True):
                for stream in (self.stdin, *self.outputs.values()):
                    await stream.aclose()

    async def _wait(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, and been reaped, before we looked
            descriptor = os.pidfd_open(self._process.pid)
            try:
                await trio.lowlevel.wait_readable(descriptor)
            finally:
                os.close(descriptor)
        code = self._process.wait()
        self.code = code if code >= 0 else 128 - code
        self.ended.set()

    async def _pump(self, name: str, stream: trio.lowlevel.FdStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await stream.receive_some(FRAME[self.box.driver]):
                self._pieces += 1
                self._passing += 1
                if self.sink:
                    await self.sink(name, data)
                self._passing -= 1
        self.drained[name].set()

    def kill(self) -> None:
        """What the box knows of it, that is; its descendants live on."""
        self._process.kill()

    async def write(self, data: bytes) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stdin.send_all(data)

    async def close_stdin(self) -> None:
        if not self.tty:
            await self.stdin.aclose()

    def resize(self, rows: int, columns: int) -> None:
        if self.tty:
            fcntl.ioctl(self.stdin.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def all_drained(self) -> None:
        for event in self.drained.values():
            await event.wait()

    async def run_dry(self) -> None:
        """Wait until all has been passed on; if others hold the streams, until nothing has come for a while.

        What a terminal was given may take its time through a busy kernel.
        """
        with trio.move_on_after(QUIET) as waiting:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._put_off, waiting)
                await self.all_drained()
                nursery.cancel_scope.cancel()

    async def _put_off(self, waiting: trio.CancelScope) -> None:
        seen = self._pieces
        while True:
            await trio.sleep(0.02)
            if self._passing or seen != self._pieces:
                seen = self._pieces
                waiting.deadline = trio.current_time() + QUIET

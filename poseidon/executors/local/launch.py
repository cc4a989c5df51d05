"""Launching a sandbox, from its folder to the helper's greeting.

The chain is a shell that enters the cgroups, nsenter (as root), bwrap, the helper. It is detached from us: the sandbox
outlives the daemon. If the daemon dies before it has sent the "go", the helper sees the end of its birth channel and
ends.
"""

import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from poseidon.errors import ConnectionLost, ExecutorError
from poseidon.executors.local import root, wire
from poseidon.executors.local.binary import Binary
from poseidon.executors.local.settings import LocalSettings
from poseidon.executors.local.users import ENVIRONMENT, entering

ENTER_AND_DETACH = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit; shift; n=$((n-1)); done; "$@" &'
LOCK, NETWORK_LOCK = "lock", "network.lock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOG_SHOWN = 500
COMPILE_PATIENCE = 20
COMPILE = """
import importlib._bootstrap_external as loader, marshal, sys
code = compile(sys.stdin.buffer.read(), "poseidon", "exec", dont_inherit=True)
sys.stdout.buffer.write(loader.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""
"""A file of bytecode: its magic number, no flags, no time, no size."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a launch depends on."""

    folder: Path
    entrances: Sequence[str]
    """Files of cgroups."""
    namespace: int
    """Descriptor of the user namespace; -1: bwrap makes one."""
    memory_mb: int
    image: str
    rlimits: tuple[int, int, int, int]
    """Open files, processes, address space, file size; 0: none."""
    resolver: str = ""
    """Content of /etc/resolv.conf."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """Port inside → descriptor of the socket that listens for it outside."""
    tie: int = -1
    """Descriptor of a socket whose other end is the network's: the sandbox ends when that does. -1: none."""


@dataclass(slots=True)
class Born:
    """A helper that has greeted and waits for the go."""

    pid: int
    started: str
    pidfd: int
    hold: wire.Channel
    birth: wire.Channel | None = None

    async def go(self) -> None:
        """Let it serve; that it may be dead by now shows elsewhere."""
        if self.birth:
            with suppress(ConnectionLost):
                await self.birth.send(b"go")

    def close_birth(self) -> None:
        """Without a go, this ends it."""
        if self.birth:
            self.birth.close()


def identity(pid: int) -> str | None:
    """Boot id and start ticks of a process: no other one, ever, has the same pid and this. None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else f"{BOOT_ID.read_text().strip()}:{fields[19].decode()}"


def is_held(folder: Path, name: str = LOCK) -> bool:
    """A launch or a sandbox still holds the folder's lock, which all its processes inherit."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def open_folder(folder: Path) -> int:
    """A descriptor by which its socket can be reached whatever the length of its path. Raises OSError."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class Launcher:
    """Knows what all launches have in common."""

    def __init__(self, settings: LocalSettings, binary: Binary, seccomp: bytes | None) -> None:
        self._settings = settings
        self._binary = binary
        self._seccomp = seccomp
        self._program = HelperProgram()

    async def launch(self, plan: Plan) -> Born:
        """Launch a sandbox up to its greeting. Raises ExecutorError; then nothing of it will ever serve."""
        try:
            with ExitStack() as ours:
                channel = wire.Channel(await trio.to_thread.run_sync(self._begin, plan))
                ours.callback(channel.close)
                with trio.fail_after(self._settings.start_timeout):
                    await greeting(channel)
                    born = await meet(plan.folder)
                ours.pop_all()
                born.birth = channel
                return born
        except OSError as error:
            raise ExecutorError(f"a sandbox can't be launched: {error}") from error
        except (ConnectionLost, trio.TooSlowError, subprocess.SubprocessError) as error:
            raise ExecutorError(f"a sandbox didn't come up: {log_of(plan.folder) or 'no reason given'}") from error

    def _begin(self, plan: Plan) -> socket.socket:
        """Start the chain of programs; the answer is our end of the birth channel."""
        plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with ExitStack() as undo, ExitStack() as inherited:
            undo.callback(ours.close)
            inherited.callback(theirs.close)
            passed = [inherited.enter_context(opened(fd)) for fd in (listener(plan.folder), lock(plan.folder))]
            log = inherited.enter_context((plan.folder / "log").open("wb"))
            command, more = self._command(plan, passed[0], theirs.fileno(), passed[1], inherited)
            subprocess.run(
                ["/bin/sh", "-c", ENTER_AND_DETACH, "sh", str(len(plan.entrances)), *plan.entrances, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(*passed, theirs.fileno(), *more),
                env={**ENVIRONMENT, **self._binary.environment},
                cwd="/",
                start_new_session=True,
                timeout=self._settings.start_timeout,
                check=True,
            )
            undo.pop_all()
        return ours

    def _command(
        self, plan: Plan, listening: int, birth: int, locked: int, inherited: ExitStack
    ) -> tuple[list[str], list[int]]:
        """The command line of the chain, and the descriptors that it needs."""
        programs = self._program.files(plan.image, forwards=bool(plan.ports))
        small = {**root.texts(plan.image, plan.resolver), **programs}
        data = {path: inherited.enter_context(memory_file(content)) for path, content in small.items()}
        if not plan.image:
            flags = os.O_RDONLY | os.O_CLOEXEC
            data |= {str(path): inherited.enter_context(opened(os.open(path, flags))) for path in root.host_files()}
        seccomp = inherited.enter_context(memory_file(self._seccomp)) if self._seccomp else -1
        abandon_after = self._settings.abandon_after * 3600
        view = root.View(
            image=plan.image,
            shown=self._settings.shown,
            sizes=self._settings.sizes(plan.memory_mb),
            data=data,
            seccomp=seccomp,
            own_users=plan.namespace >= 0,
        )
        arguments = inherited.enter_context(memory_file(b"".join(os.fsencode(a) + b"\0" for a in root.arguments(view))))
        ports = ",".join(f"{port}:{descriptor}" for port, descriptor in plan.ports.items())
        words = (listening, birth, locked, plan.tie, ports, int(plan.namespace >= 0), abandon_after, *plan.rlimits)
        entry = entering(plan.namespace) if plan.namespace >= 0 else []
        helper = root.helper_command(plan.image, next(iter(programs)))
        command = [*entry, self._binary.path, "--args", str(arguments), "--", *helper, *(str(word) for word in words)]
        needed = [arguments, seccomp, plan.namespace, plan.tie, *plan.ports.values(), *data.values()]
        needed += self._binary.descriptors
        return command, [fd for fd in needed if fd >= 0]


async def greeting(channel: wire.Channel) -> None:
    """Wait for the helper's greeting. Raises ConnectionLost, also if it speaks another version."""
    words = await channel.receive()
    if words != [b"poseidon", b"%d" % wire.VERSION]:
        raise ConnectionLost("the sandbox's helper speaks another version")


async def meet(folder: Path) -> Born:
    """Connect to the helper that listens in *folder*, see which process it is. Raises OSError, ConnectionLost."""
    with opened(open_folder(folder)) as descriptor:
        connection = wire.connect(descriptor)
    with ExitStack() as undo:
        hold = wire.Channel(connection)
        undo.callback(hold.close)
        pid = wire.listening_pid(connection)
        pidfd = os.pidfd_open(pid)
        undo.callback(os.close, pidfd)
        started = identity(pid)
        if started is None:
            raise ConnectionLost("the sandbox's helper has ended")
        await hold.send(b"hold")
        undo.pop_all()
        return Born(pid, started, pidfd, hold)


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close it at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """A descriptor to read *content* from, once."""
    descriptor = os.memfd_create("poseidon", os.MFD_CLOEXEC)
    with opened(descriptor):
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor


def listener(folder: Path) -> int:
    """A socket, bound outside of the sandbox: what is inside can neither replace it nor fill the disk beside it."""
    with opened(open_folder(folder)) as descriptor, suppress(FileNotFoundError):
        os.unlink("socket", dir_fd=descriptor)
    with opened(open_folder(folder)) as descriptor:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound.bind(f"/proc/self/fd/{descriptor}/socket")
        except OSError:
            bound.close()
            raise
        return bound.detach()


def lock(folder: Path, name: str = LOCK) -> int:
    """The locked lock file."""
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def log_of(folder: Path, name: str = "log") -> str:
    """What the programs of the launch had to say."""
    with suppress(OSError):
        return (folder / name).read_text(errors="replace").strip()[-LOG_SHOWN:]
    return ""


def listening_in(folder: Path) -> int:
    """The pid of the process that listens in *folder*; 0 if none does."""
    with suppress(OSError), opened(open_folder(folder)) as descriptor:
        connection = wire.connect(descriptor)
        try:
            return wire.listening_pid(connection)
        finally:
            connection.close()
    return 0


def remove_folder(folder: Path) -> None:
    """Remove it with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


class HelperProgram:
    """The helper's programs, compiled for this machine's Python: that makes a start a fifth faster."""

    def __init__(self) -> None:
        self._sources = [Path(__file__).with_name(name).read_bytes() for name in ("inside.py", "forwarder.py")]
        self._compiled_for: tuple[int, int] | None = None
        self._compiled: list[bytes] = []

    def files(self, image: str, *, forwards: bool) -> dict[str, bytes]:
        """Path and content, the one to run first. The source for an image's own Python, of whatever version."""
        contents, ending = self._sources, ""
        if not image or not root.has_python(image):
            what = Path(root.PYTHON).stat()
            if (what.st_ino, what.st_mtime_ns) != self._compiled_for:  # else it has been upgraded under our feet
                self._compiled_for = (what.st_ino, what.st_mtime_ns)
                self._compiled = [code for code in map(compiled, self._sources) if code]
            if len(self._compiled) == len(self._sources):
                contents, ending = self._compiled, "c"
        paths = [root.HELPER + ending, *([root.FORWARDER + ending] if forwards else [])]
        return dict(zip(paths, contents, strict=False))


def compiled(source: bytes) -> bytes | None:
    """*source* as bytecode of this machine's Python; None if that fails."""
    made = subprocess.run(
        [root.PYTHON, "-I", "-S", "-E", "-B", "-c", COMPILE],
        input=source,
        capture_output=True,
        timeout=COMPILE_PATIENCE,
        check=False,
        env={},
        cwd="/",
    )
    return made.stdout if made.returncode == 0 else None

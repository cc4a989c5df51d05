"""The helper: pid 1 of a sandbox, starts the commands in it and reaps what is left behind.

It runs under the Python of the sandbox (3.9 or newer), so it is one file and imports the standard library only; it
takes `_socket` and `_signal` for `socket` and `signal`, which would double the time that it needs to start. It never
reads anything that user code can write, and does nothing that could block: its loop serves all connections.

Protocol (version 1). A frame is a length (4 bytes, big-endian) and as many bytes: items, each with its own such length.

Birth: once listening, the helper sends `poseidon, VERSION` over the channel that it inherited, and waits for `go`. The
end of that channel without a `go` means that nobody has recorded this sandbox, so it ends.

Then each connection to the socket that the daemon bound outside is one of:
  hold                                      answered `poseidon, VERSION`; only keeps the helper from being abandoned
  run, FLAGS, ROWS, COLUMNS, CWD, COUNT, COUNT arguments, environment entries...
      FLAGS is a text of letters, the descriptors come with the frame in the order of this list:
      "t" make a terminal for stdin and stdout; "s" take the slave that is sent; else stdin and stdout are sent
      stderr is always sent; "c" a cgroup for this execution: its tasks or cgroup.procs, and a file to which the text
      after ":" in FLAGS is written to stop all forks in it; "p" as root of the sandbox
      answered `started, PID` (with the terminal's master for "t") or `failed, ERRNO, TEXT`, later `exited, CODE`
      signal, NUMBER                        to the foreground processes, while the main process runs
      kill                                  answered `killed, 1` if it is certain that nothing is left, else `killed, 0`
      end of the connection before `exited` kills the execution
"""

from __future__ import annotations

import _ctypes
import _signal as signal  # type: ignore[import-not-found]
import _socket as sockets
import errno
import fcntl
import gc
import os
import resource
import select
import sys
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VERSION = 1
USER = 1000
LARGEST_FRAME = 8 << 20
MOST_DESCRIPTORS = 8
OOM_SCORE = b"900"  # commands die before the helper does
KILL_PATIENCE = 2.0
KILL_INTERVAL = 0.003
FORWARDING_PAUSE = 1.0
SHELL_NOT_FOUND, SHELL_NOT_EXECUTABLE = 127, 126
SET_DUMPABLE = 4


def pack(*items: bytes) -> bytes:
    body = b"".join(len(item).to_bytes(4, "big") + item for item in items)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes) -> list[bytes]:
    items, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        items.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return items


def set_dumpable(value: int) -> None:
    """Zero closes /proc/PID of a process to others of its uid, and forbids them to trace it."""
    # By the module below ctypes, which itself would cost 3 ms and 1 MB.
    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    _ctypes.call_function(_ctypes.dlsym(library, "prctl"), (SET_DUMPABLE, value, 0, 0, 0))


class Limits:
    """Resource limits of every command; 0 leaves one as it is."""

    def __init__(self, open_files: int, processes: int, address_space: int, file_size: int) -> None:
        self.values = (
            (resource.RLIMIT_NOFILE, open_files),
            (resource.RLIMIT_NPROC, processes),
            (resource.RLIMIT_AS, address_space),
            (resource.RLIMIT_FSIZE, file_size),
        )

    def apply(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, value in self.values:
            if value:
                hard = resource.getrlimit(kind)[1]
                most = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(kind, (most, most))


class Request:
    """A parsed `run` with its descriptors."""

    def __init__(self, items: Sequence[bytes], descriptors: list[int]) -> None:
        flags, rows, columns, self.cwd, count = items[:5]
        letters, _, self.stop_text = flags.partition(b":")
        end = 5 + int(count)
        self.arguments = list(items[5:end])
        self.environment = dict(entry.split(b"=", 1) for entry in items[end:])
        self.rows, self.columns = int(rows), int(columns)
        self.makes_terminal, self.has_slave = b"t" in letters, b"s" in letters
        self.privileged = b"p" in letters
        rest = list(descriptors)
        self.stdin = -1 if self.makes_terminal else rest.pop(0)
        self.stdout = self.stdin if self.makes_terminal or self.has_slave else rest.pop(0)
        self.stderr = rest.pop(0)
        self.procs, self.stop = (rest.pop(0), rest.pop(0)) if b"c" in letters else (-1, -1)

    def open_terminal(self, owner: int) -> int:
        """Make the terminal inside of the sandbox, where it has a name; return its master."""
        master, slave = os.openpty()
        os.set_inheritable(slave, False)
        self.stdin = self.stdout = slave
        if owner >= 0:
            os.fchown(slave, owner, owner)  # else /dev/stdout could not be opened
        return master

    def resize_terminal(self) -> None:
        if (self.makes_terminal or self.has_slave) and self.rows > 0 and self.columns > 0:
            size = b"".join(min(n, 65535).to_bytes(2, sys.byteorder) for n in (self.rows, self.columns, 0, 0))
            fcntl.ioctl(self.stdin, termios.TIOCSWINSZ, size)


class Child:
    """What happens between fork and exec. Nothing of the helper may reach the command."""

    def __init__(self, request: Request, limits: Limits, *, changes_user: bool) -> None:
        self.request = request
        self.limits = limits
        self.changes_user = changes_user

    def run(self) -> None:
        request = self.request
        code = SHELL_NOT_EXECUTABLE
        try:
            self.isolate()
            self.become_victim()
            self.limits.apply()
            if self.changes_user and not request.privileged:
                os.setgroups([])
                os.setresgid(USER, USER, USER)
                os.setresuid(USER, USER, USER)
            os.chdir(request.cwd)
            self.execute()
        except OSError as error:
            at_start = error.filename != request.cwd
            if at_start and error.errno in (errno.ENOENT, errno.ENOTDIR):
                code = SHELL_NOT_FOUND
            what = request.arguments[0] if at_start else request.cwd
            os.write(2, what + b": " + os.strerror(error.errno or 0).encode() + b"\n")
        finally:
            os._exit(code)

    def execute(self) -> None:
        """Like execvpe, which would import more by now."""
        name = self.request.arguments[0]
        failure: OSError | None = None
        folders = [b""] if b"/" in name else self.request.environment.get(b"PATH", b"").split(b":")
        for folder in folders:
            try:
                os.execve(os.path.join(folder, name), self.request.arguments, self.request.environment)
            except (FileNotFoundError, NotADirectoryError) as error:
                failure = failure or error
            except PermissionError as error:
                failure = error
        raise failure or FileNotFoundError(errno.ENOENT, "")

    def isolate(self) -> None:
        request = self.request
        if request.procs >= 0:
            os.write(request.procs, b"0")  # first of all: whatever follows can be killed by the cgroup
        os.setsid()
        if request.makes_terminal or request.has_slave:
            fcntl.ioctl(request.stdin, termios.TIOCSCTTY, 0)
        streams = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (request.stdin, request.stdout, request.stderr)]
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.closerange(3, 1 << 16)
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)

    def become_victim(self) -> None:
        """Be the first choice of the out-of-memory killer; nothing but this command can be seen in us by now."""
        set_dumpable(1)
        try:
            with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
                file.write(OOM_SCORE)
        except OSError:
            pass


class Processes:
    """What runs in the sandbox beside the helper's *own* processes, read from /proc."""

    def __init__(self, own: set[int]) -> None:
        self.parents: dict[int, int] = {}
        self.sessions: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in own:
                self.read(int(name))

    def read(self, pid: int) -> None:
        try:
            with open("/proc/%d/stat" % pid, "rb") as file:
                state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
        except OSError:
            return
        if state not in (b"Z", b"X"):
            self.parents[pid] = int(parent)
            self.sessions[pid] = int(session)

    def of(self, main: int) -> set[int]:
        """The processes of *main*'s session, and all that descend from one of them."""
        found = {pid for pid, session in self.sessions.items() if session == main or pid == main}
        while True:
            more = {pid for pid, parent in self.parents.items() if parent in found} - found
            if not more:
                return found
            found |= more


class Connection:
    """One connection of the daemon: at most one execution."""

    def __init__(self, helper: Helper, descriptor: int) -> None:
        self.helper = helper
        self.socket = sockets.socket(fileno=descriptor)
        self.descriptor = descriptor
        self.buffer = bytearray()
        self.received: list[int] = []
        self.main = 0
        self.running = False
        self.open = True
        self.master = self.procs = self.stop = -1
        self.stop_text = b""
        self.give_up = 0.0
        """When to answer that the kill didn't succeed; 0: no kill is going on."""

    def readable(self) -> None:
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(
                65536,
                sockets.CMSG_SPACE(4 * MOST_DESCRIPTORS),
                sockets.MSG_DONTWAIT | sockets.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        for _, _, raw in ancillary:
            self.received += [int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw) - 3, 4)]
        if not data or flags & sockets.MSG_CTRUNC:
            self.lost()
            return
        self.buffer += data
        while self.open and len(self.buffer) >= 4:
            size = int.from_bytes(self.buffer[:4], "big")
            if size > LARGEST_FRAME:
                self.lost()
            if len(self.buffer) < 4 + size:
                return
            body = bytes(self.buffer[4 : 4 + size])
            del self.buffer[: 4 + size]
            self.handle(unpack(body))

    def handle(self, items: list[bytes]) -> None:
        verb = items[0]
        if verb == b"hold":
            self.send(b"poseidon", b"%d" % VERSION)
        elif verb == b"run" and not self.main:
            self.run(items[1:])
        elif verb == b"signal":
            self.signal(int(items[1]))
        elif verb == b"kill":
            self.kill()

    def send(self, *items: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)
        ancillary = [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, rights)] if rights else []
        try:
            self.socket.sendmsg([pack(*items)], ancillary, sockets.MSG_DONTWAIT | sockets.MSG_NOSIGNAL)
        except OSError:
            self.lost()

    def run(self, items: list[bytes]) -> None:
        descriptors, self.received = self.received, []
        request = Request(items, descriptors)
        self.procs, self.stop, self.stop_text = request.procs, request.stop, request.stop_text
        try:
            if request.makes_terminal:
                owner = USER if self.helper.changes_user and not request.privileged else -1
                self.master = request.open_terminal(owner)
                descriptors.append(request.stdin)
            request.resize_terminal()
            self.main = self.helper.fork(request)
        except OSError as error:
            descriptors += [self.master] if self.master >= 0 else []
            self.master = self.procs = self.stop = -1
            self.send(b"failed", b"%d" % (error.errno or 0), os.strerror(error.errno or 0).encode())
        else:
            self.running = True
            self.helper.mains[self.main] = self
            self.send(b"started", b"%d" % self.main, descriptors=[self.master] if self.master >= 0 else [])
        finally:
            for fd in descriptors:
                if fd not in (self.procs, self.stop):
                    os.close(fd)

    def exited(self, status: int) -> None:
        self.running = False
        if self.open:
            self.send(
                b"exited", b"%d" % (128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
            )

    def signal(self, number: int) -> None:
        if not self.running:
            return
        try:
            group = os.tcgetpgrp(self.master) if self.master >= 0 else self.main
            os.killpg(group if group > 1 else self.main, number)
        except OSError:
            pass

    def kill(self) -> None:
        """Begin to kill the execution; `go_on_killing` tells how it went."""
        if not self.give_up:
            self.give_up = time.monotonic() + KILL_PATIENCE
            self.helper.killing.append(self)
        self.go_on_killing()

    def go_on_killing(self) -> None:
        left, certain = self.left()
        for pid in left:
            send_signal(pid, signal.SIGSTOP)  # so that they can't fork while we look at the others
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        if left and time.monotonic() < self.give_up:
            return
        self.give_up = 0.0
        self.helper.killing.remove(self)
        if self.open:
            self.send(b"killed", b"1" if certain and not left else b"0")
        else:
            self.close_descriptors()

    def left(self) -> tuple[set[int], bool]:
        """What still runs of the execution, and whether that is certain."""
        if self.procs >= 0:
            try:
                os.write(self.stop, self.stop_text)
            except OSError:
                pass
            # The main process is named besides, as it may not have entered its cgroup yet.
            return pids_of(self.procs) | ({self.main} if self.running else set()), True
        processes = Processes(self.helper.own)
        everything = set(processes.parents)
        others: set[int] = set()
        for main, connection in self.helper.mains.items():
            if connection is not self and connection.running and connection.open:
                others |= processes.of(main)
        mine = processes.of(self.main) if self.main else set()
        unknown = everything - others - mine
        if not others or not self.open:
            return mine | unknown, True
        return mine - others, not unknown

    def lost(self) -> None:
        """The daemon has left: what it wanted to run here must not go on."""
        if not self.open:
            return
        self.open = False
        self.helper.forget(self)
        self.socket.close()
        for fd in self.received:
            os.close(fd)
        if self.running:
            self.kill()
        elif not self.give_up:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        for fd in (self.master, self.procs, self.stop):
            if fd >= 0:
                os.close(fd)
        self.master = self.procs = self.stop = -1


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def pids_of(procs: int) -> set[int]:
    """The pids in a cgroup, by its open list."""
    # Opened anew: cgroup v1 answers a second read of the same open file from a cache that is up to a second old.
    data = b""
    try:
        descriptor = os.open("/proc/self/fd/%d" % procs, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return set()  # the cgroup has been removed
    try:
        while True:
            more = os.read(descriptor, 65536)
            if not more:
                break
            data += more
    except OSError:
        pass  # it is being removed
    finally:
        os.close(descriptor)
    return {int(pid) for pid in data.split()} - {0, 1}


class Forwarding:
    """The process that forwards ports: apart from us, as users' data mustn't keep us from our work."""

    def __init__(self, ports: dict[int, int]) -> None:
        sys.path.insert(0, os.path.dirname(__file__))
        self.program = __import__("poseidon_forwarder")
        self.ports = ports
        self.pid = 0

    def start(self) -> None:
        """By a fork alone: so there is no moment at which others could trace it, or take its descriptors."""
        try:
            self.pid = os.fork()
        except OSError:
            self.pid = 0  # the sandbox is full; the loop tries again
        else:
            if not self.pid:
                self.run()

    def run(self) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in self.ports:
                    try:
                        os.close(int(name))
                    except OSError:
                        pass  # the one of the listing itself
            self.program.serve(self.ports)
        finally:
            os._exit(1)


class Helper:
    """The loop: accepts, reads, reaps, kills."""

    def __init__(self, listener: int, limits: Limits, *, changes_user: bool, abandon_after: float) -> None:
        self.listener = sockets.socket(fileno=listener)
        self.limits = limits
        self.changes_user = changes_user
        self.abandon_after = abandon_after
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.connections: dict[int, Connection] = {}
        self.mains: dict[int, Connection] = {}
        self.killing: list[Connection] = []
        self.forwarding: Forwarding | None = None
        self.alone_since = time.monotonic()
        self.wake, wake = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(self.wake, self.reap)
        self.watch(listener, self.accept)

    @property
    def own(self) -> set[int]:
        return {1, self.forwarding.pid if self.forwarding else 1}

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self.handlers[descriptor] = handler
        self.poll.register(descriptor, select.EPOLLIN)

    def forget(self, connection: Connection) -> None:
        self.poll.unregister(connection.descriptor)
        del self.handlers[connection.descriptor]
        del self.connections[connection.descriptor]
        self.alone_since = time.monotonic()

    def accept(self) -> None:
        try:
            descriptor, _ = self.listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        connection = Connection(self, descriptor)
        self.connections[descriptor] = connection
        self.watch(descriptor, connection.readable)

    def fork(self, request: Request) -> int:
        pid = os.fork()
        if not pid:
            Child(request, self.limits, changes_user=self.changes_user).run()
        return pid

    def reap(self) -> None:
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self.mains:
                self.mains.pop(pid).exited(status)
            if self.forwarding and pid == self.forwarding.pid:
                self.forwarding.pid = 0

    def network_lost(self) -> None:
        """What carried our packets has ended: we end as well, and with us the runner."""
        sys.exit(0)

    def timeout(self) -> float:
        if self.killing:
            return KILL_INTERVAL
        if self.forwarding and not self.forwarding.pid:
            return FORWARDING_PAUSE
        return -1 if self.connections else self.abandon_after

    def serve(self) -> None:
        while self.connections or time.monotonic() - self.alone_since < self.abandon_after:
            for descriptor, _ in self.poll.poll(self.timeout()):
                handler = self.handlers.get(descriptor)
                if handler:
                    handler()
            for connection in list(self.killing):
                connection.go_on_killing()
            if self.forwarding and not self.forwarding.pid:
                self.forwarding.start()


def wait_for_go(birth: int) -> bool:
    channel = sockets.socket(fileno=birth)
    channel.send(pack(b"poseidon", b"%d" % VERSION))
    answer = b""
    while len(answer) < len(pack(b"go")):
        more = channel.recv(64)
        if not more:
            return False
        answer += more
    channel.close()
    return answer == pack(b"go")


def main(arguments: Sequence[str]) -> None:
    """LISTENER BIRTH LOCK TIE PORTS CHANGES_USER ABANDON_AFTER OPEN_FILES PROCESSES ADDRESS_SPACE FILE_SIZE"""
    listener, birth, lock, tie = (int(word) for word in arguments[:4])
    ports = {int(fd): int(port) for port, fd in (pair.split(":") for pair in arguments[4].split(",") if pair)}
    kept = (listener, birth, lock, *((tie,) if tie >= 0 else ()), *ports)
    set_dumpable(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one of the listing itself
    for descriptor in kept:
        os.set_inheritable(descriptor, False)
    limits = Limits(*(int(word) for word in arguments[7:11]))
    helper = Helper(listener, limits, changes_user=arguments[5] == "1", abandon_after=float(arguments[6]))
    helper.listener.listen(128)
    if tie >= 0:
        helper.watch(tie, helper.network_lost)
    if ports:
        helper.forwarding = Forwarding(ports)
    gc.freeze()
    if wait_for_go(birth):
        os.dup2(0, 2)
        if helper.forwarding:
            helper.forwarding.start()
        helper.serve()


if __name__ == "__main__":
    main(sys.argv[1:])

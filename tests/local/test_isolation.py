"""What a sandbox sees: nothing of the host, of the daemon, or of its neighbours."""

import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from poseidon.executors.base import Exit
from tests.local.support import IS_ROOT, PATIENCE, Result, World, run, start

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root has two users in a sandbox")
USERS = [False, pytest.param(True, marks=needs_root)]


@pytest.mark.parametrize("privileged", USERS)
async def test_no_file_of_the_host_is_there_but_system_paths(world: World, privileged: bool) -> None:
    secret = world.folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    async with world.executor() as executor:
        allocation = await start(executor)
        top = (await run(executor, allocation, "ls -A /", privileged=privileged)).out.split()
        closed = "find / -xdev -not -path '/proc*' -not -path '/usr/*' -type d -not -perm -o=rx"
        top_closed = set((await run(executor, allocation, closed)).out.split()) - {"/root"}
        for path in (secret, "/etc/shadow", "/home/user", "/var/log", "/sys", "/boot", "/proc/1/root/etc", world.state):
            assert (await run(executor, allocation, f"ls -A {path}", privileged=privileged)).code, path
        found = await run(executor, allocation, "find / -xdev -name secret 2>/dev/null", privileged=privileged)
    assert not top_closed
    allowed = {"bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin"}
    assert set(top) <= allowed | {"tmp", "usr", "var", "workspace"}
    assert not found.out


@pytest.mark.parametrize("privileged", USERS)
async def test_nothing_can_be_written_but_the_three_file_systems(world: World, privileged: bool) -> None:
    script = (
        "for d in $(find / -xdev -type d 2>/dev/null; echo /workspace /tmp /dev /dev/shm /proc/sys/kernel); do"
        "  (echo > $d/written) 2>/dev/null && echo $d; done"
    )
    async with world.executor() as executor:
        result = await run(executor, await start(executor), script, privileged=privileged)
    assert set(result.out.split()) == {"/dev/shm", "/tmp", "/workspace"}


@pytest.mark.parametrize("privileged", USERS)
async def test_the_daemons_environment_isnt_visible(
    world: World, monkeypatch: pytest.MonkeyPatch, privileged: bool
) -> None:
    monkeypatch.setenv("POSEIDON_SECRET", "very-secret")
    async with world.executor() as executor:
        allocation = await start(executor)
        script = "env; cat /proc/*/environ; tr '\\0' ' ' < /proc/1/cmdline"
        result = await run(executor, allocation, script, privileged=privileged)
    assert "very-secret" not in result.out
    assert "POSEIDON_SECRET" not in result.out


@pytest.mark.parametrize("privileged", USERS)
async def test_a_command_has_exactly_its_three_descriptors(world: World, privileged: bool) -> None:
    with ExitStack() as stack:
        for number in (os.open("/etc/hostname", os.O_RDONLY), socket.socket().detach(), *os.pipe()):
            stack.callback(os.close, number)
            os.set_inheritable(number, True)
        async with world.executor() as executor:
            allocation = await start(executor)
            for tty in (False, True):
                result = await run(
                    executor, allocation, argv=("/bin/ls", "/proc/self/fd"), privileged=privileged, tty=tty
                )
                assert result.out.split() == ["0", "1", "2", "3"]  # the last is the listing's own


@needs_root
async def test_the_helper_holds_only_what_it_needs(world: World) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    with listener:
        async with world.executor() as executor:
            await run(executor, await start(executor), "true")
            pid = next(iter(executor._site.book)).pid
            with trio.fail_after(PATIENCE):
                while kinds_of_descriptors(pid) != HELD:
                    await trio.sleep(0.005)


@needs_root
async def test_no_process_of_a_launch_has_the_daemons_environment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSEIDON_SECRET", "very-secret")
    async with world.executor() as executor:
        await start(executor)
        helper = next(iter(executor._site.book)).pid
        environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in world.processes()}
    assert len(environments) == 2
    assert environments[helper] == b"LANG=C.UTF-8\0PWD=/\0"
    assert not any(b"POSEIDON" in environment for environment in environments.values())


HELD = ["anon_inode", "lock", "null", "null", "null", "pipe", "pipe", "socket", "socket"]
"""Its epoll, wake-up pipe, listener and the connection that holds it."""


def kinds_of_descriptors(pid: int) -> list[str]:
    """What a process has open, sorted."""
    found = (os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))
    return sorted(target.split(":")[0].rpartition("/")[2] for target in found)


@pytest.mark.parametrize("privileged", USERS)
async def test_the_helper_cant_be_read_traced_or_signalled(world: World, privileged: bool) -> None:
    script = (
        "readlink /proc/1/fd/2; readlink /proc/1/exe; cat /proc/1/environ /proc/1/maps; head -c1 /proc/1/mem;"
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -INT 1; echo still here"
    )
    traced = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.ptrace(16, 1, 0, 0))"
    async with world.executor() as executor:
        allocation = await start(executor)
        result = await run(executor, allocation, script, privileged=privileged)
        assert result.out == "still here\n"
        assert result.err.count("Permission denied") == 3
        result = await run(executor, allocation, argv=("python3", "-c", traced), privileged=privileged)
        assert result.out == "-1\n"


@pytest.mark.parametrize("privileged", USERS)
async def test_no_process_of_the_host_or_of_a_neighbour_is_visible(world: World, privileged: bool) -> None:
    async with world.executor() as executor:
        first, second = await start(executor), await start(executor)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, executor, first, "exec -a neighbour sleep 0.2")
            await trio.sleep(0.05)
            result = await run(executor, second, "cat /proc/[0-9]*/comm | sort -u", privileged=privileged)
            nursery.cancel_scope.cancel()
    assert set(result.out.split()) <= {"python3", "bash", "cat", "sort"}


@pytest.mark.parametrize("privileged", USERS)
async def test_no_network_not_even_the_hosts_loopback(world: World, privileged: bool) -> None:
    name = f"poseidon-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as service, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        script = f"""
import socket
for family, address in [(socket.AF_INET, ("127.0.0.1", {service.getsockname()[1]})), (socket.AF_INET, ("10.0.0.1", 80)),
                        (socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_UNIX, "\\0{name}")]:
    try:
        socket.socket(family).connect(address)
        print("connected", address)
    except OSError as error:
        print(error.strerror)
"""
        async with world.executor() as executor:
            allocation = await start(executor)
            result = await run(executor, allocation, argv=("python3", "-c", script), privileged=privileged)
    assert result.out.splitlines() == [
        "Connection refused",
        "Network is unreachable",
        "Network is unreachable",
        "Connection refused",
    ]


@pytest.mark.parametrize("privileged", USERS)
async def test_the_sandboxs_own_loopback_works(world: World, privileged: bool) -> None:
    script = """
import socket
with socket.create_server(("127.0.0.1", 8080)) as server, socket.create_connection(("localhost", 8080)) as client:
    client.send(b"hello")
    print(server.accept()[0].recv(9))
"""
    async with world.executor() as executor:
        allocation = await start(executor)
        result = await run(executor, allocation, argv=("python3", "-c", script), privileged=privileged)
    assert result.out == "b'hello'\n", result.err


CALLS = """
import ctypes, socket, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = dict(x86_64=dict(keyctl=250, add_key=248, bpf=321, io_uring_setup=425, userfaultfd=323, perf_event_open=298,
                           unshare=272, mount=165, clone=56),
               aarch64=dict(keyctl=219, add_key=217, bpf=280, io_uring_setup=425, userfaultfd=282,
                            perf_event_open=241, unshare=97, mount=40, clone=220))[platform.machine()]
for name, number in numbers.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0x10000011, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 28, 38):  # a new userns
        print("allowed", name, ctypes.get_errno())
for family in (17, 38, 40, 31):  # packet, alg, vsock, bluetooth
    try:
        socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_RAW)
        print("family", family)
    except OSError as error:
        print("refused") if error.errno == 97 else print(family, error)
socket.socket(socket.AF_INET6), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
if libc.syscall(0x40000000 | 39) != -1:
    print("x32")
"""


@pytest.mark.parametrize("privileged", USERS)
async def test_dangerous_system_calls_are_refused(world: World, privileged: bool) -> None:
    async with world.executor() as executor:
        allocation = await start(executor)
        result = await run(executor, allocation, argv=("python3", "-c", CALLS), privileged=privileged)
    assert result.out.splitlines() == ["refused"] * 4, result.err


@pytest.mark.parametrize("privileged", USERS)
async def test_no_privilege_can_be_won(world: World, privileged: bool) -> None:
    script = (
        "unshare -Ur true; unshare -m true; mount -t tmpfs x /tmp; mount -o remount,rw /; mount -o remount,rw /usr;"
        "chroot / true; hostname evil; mknod /workspace/disk b 8 0; su -c true; date -s 2000-01-01;"
        "echo 1 > /proc/sys/kernel/ns_last_pid; echo b > /proc/sysrq-trigger; dmesg;"
        "echo 0 > /proc/sys/user/max_user_namespaces; nsenter -t 1 -m true; cat /dev/vda /dev/mem /dev/kmsg"
    )
    async with world.executor() as executor:
        allocation = await start(executor)
        for line in script.split(";"):
            assert (await run(executor, allocation, line.strip(), privileged=privileged)).code, line
        status = (await run(executor, allocation, "cat /proc/self/status", privileged=privileged)).out
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert lines["NoNewPrivs"] == "1"
    assert lines["Seccomp"] == "2"
    assert int(lines["CapEff"], 16) == (0xEB if privileged else 0)


@needs_root
async def test_no_uid_inside_is_anybody_outside_and_no_two_runners_share_one(world: World) -> None:
    async with world.executor() as executor:
        first, second = await start(executor), await start(executor)
        uids = []
        for allocation in (first, second):
            for privileged in (True, False):
                line = "read -r _ outside _ < <(sed -n '/^ *'$(id -u)' /p' /proc/self/uid_map); echo $outside"
                uids.append(int((await run(executor, allocation, line, privileged=privileged)).out))
    assert len(set(uids)) == 4
    assert set(uids) <= set(world.uids())
    assert min(uids) > 1_000_000


async def test_the_system_inside_is_complete_enough(world: World) -> None:
    script = """
import ssl, pwd, socket, time, sqlite3, ctypes.util, locale
print(pwd.getpwuid(1000).pw_name, pwd.getpwnam("user").pw_dir, socket.gethostname(), socket.gethostbyname("localhost"))
print(bool(ssl.create_default_context().get_ca_certs()))
open("/dev/null", "w").write("x"), open("/dev/urandom", "rb").read(1), open("/dev/tty")
"""
    async with world.executor() as executor:
        allocation = await start(executor)
        result = await run(executor, allocation, argv=("python3", "-c", script), tty=True)
        certificates = str(Path("/etc/ssl/certs/ca-certificates.crt").exists())
        assert result.out.split() == ["user", "/workspace", "runner", "127.0.0.1", certificates], result.err
        assert (await run(executor, allocation, "echo x > /dev/stdout; echo y > /dev/tty", tty=True)).out.split() == [
            "x",
            "y",
        ]
        for program in ("awk", "which", "perl -e 1"):
            assert (await run(executor, allocation, f"{program} --version >/dev/null 2>&1; test $? != 127")).code == 0


def make_image(folder: Path) -> Path:
    """A tiny system: bash, cat, ls and id with their libraries, and a passwd of its own."""
    for program in ("bash", "cat", "ls", "id"):
        for path in libraries(f"/bin/{program}") | {f"/bin/{program}"}:
            target = folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(path).read_bytes())
            target.chmod(0o755)
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text(
        "root:x:0:0::/:/bin/sh\nsomebody:x:1000:1000::/:/bin/sh\nother:x:5:5::/:/bin/sh\n"
    )
    (folder / "marker").write_text("the image's\n")
    return folder


def libraries(program: str) -> set[str]:
    """What the dynamic linker loads for it."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return {word for word in listing.split() if word.startswith("/")}


async def test_an_image_is_the_root_even_without_a_python(world: World, readable: Path) -> None:
    image = make_image(readable / "image")
    async with world.executor(images={"some-image": str(image)}) as executor:
        allocation = await start(executor)
        result = await run(executor, allocation, "cat /marker; id -un; cat /etc/passwd; ls /usr/share 2>&1; ls /bin")
    lines = result.out.splitlines()
    assert lines[:2] == ["the image's", "user"]
    assert "other:x:5:5::/:/bin/sh" in lines
    assert not any("somebody" in line for line in lines)
    assert lines[-4:] == ["bash", "cat", "id", "ls"]


async def test_further_paths_are_shown_read_only_if_configured(world: World, readable: Path) -> None:
    shown = readable / "shown"
    shown.mkdir(mode=0o755)
    (shown / "file").write_text("content")
    async with world.executor(shown=(str(shown),)) as executor:
        allocation = await start(executor)
        assert (await run(executor, allocation, argv=("cat", f"{shown}/file"))) == Result("content", "", Exit(0))
        assert (await run(executor, allocation, f"echo > {shown}/file")).code

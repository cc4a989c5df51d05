"""What a sandbox sees: the arguments of bwrap. Nothing of the host but read-only system paths."""

import os
import pwd
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import ExecutorError
from poseidon.executors.local.settings import Sizes

WORKSPACE = "/workspace"
HELPER = "/run/poseidon.py"
PYTHON = "/usr/bin/python3"
HOST_SYSTEM = "/run/host"
HOSTNAME = "runner"
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")

PASSWD = (
    "root:x:0:0:root:/root:/bin/bash\n"
    f"user:x:1000:1000:user:{WORKSPACE}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
GROUP = "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"
HOSTS = f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost {HOSTNAME}\n"

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf", "ca-certificates"),
    *("ca-certificates.conf", "pki/tls/certs", "pki/ca-trust/extracted", "localtime", "timezone", "locale.alias"),
    *("protocols", "services", "mime.types", "magic", "inputrc", "bash.bashrc", "terminfo", "fonts", "python3*"),
    *("java*", "perl", "R", "php", "octave.conf", "ghc", "sgml", "xml", "texmf", "emacs", "vim"),
)
"""Programs need these; /etc as a whole holds what isn't theirs to read."""
NOT_OF_AN_IMAGE = frozenset({"proc", "dev", "sys", "tmp", "run", "workspace", "root", "home", "boot", "lost+found"})


@dataclass(frozen=True, slots=True)
class View:
    """What goes into the arguments beside the host's own paths. Data by open descriptors, read once each."""

    image: str
    """Root folder; empty: this machine's system."""
    shown: tuple[str, ...]
    sizes: Sizes
    data: Mapping[str, int]
    """Path inside → descriptor of its content."""
    seccomp: int
    """Descriptor of the filter; -1: none."""
    own_users: bool
    """We are root of a prepared user namespace; else bwrap makes one with a single user."""


def texts(image: str) -> dict[str, bytes]:
    """The small files that every sandbox has for itself."""
    written = {"/etc/passwd": PASSWD, "/etc/group": GROUP, "/etc/hosts": HOSTS, "/etc/hostname": HOSTNAME + "\n"}
    if not image:
        written["/etc/nsswitch.conf"] = "passwd: files\ngroup: files\nhosts: files dns\n"
        return {path: text.encode() for path, text in written.items()}
    found = {}
    for path, text in written.items():
        original = Path(image + path)
        if original.is_file():  # a read-only image has no place for others
            found[path] = (merged(original, text) if path in ("/etc/passwd", "/etc/group") else text).encode()
    return found


def merged(original: Path, text: str) -> str:
    """An image's accounts with ours in place of those of the same name or number."""
    ours = {key for line in text.splitlines() for key in keys(line)}
    kept = [line for line in original.read_text(errors="replace").splitlines() if not keys(line) & ours]
    return text + "".join(line + "\n" for line in kept)


def keys(line: str) -> set[str]:
    """Name and number of an account."""
    fields = line.split(":")
    return {fields[0], *fields[2:3]}


def arguments(view: View) -> list[str]:
    """All arguments of bwrap, up to the command. The order counts: what is read-only in the end is written before."""
    return [
        *(image_system(view.image) if view.image else host_system(view.shown)),
        *("--proc", "/proc", "--dev", "/dev"),
        *tmpfs("/dev/shm", view.sizes.shm),  # noqa: S108 - of the sandbox
        *("--remount-ro", "/dev"),
        *tmpfs(WORKSPACE, view.sizes.workspace),
        *tmpfs("/tmp", view.sizes.tmp),  # noqa: S108 - of the sandbox
        *("--perms", "0700", "--dir", "/root", "--dir", "/home", "--dir", "/run"),
        *(word for path, fd in view.data.items() for word in ("--perms", "0444", "--ro-bind-data", str(fd), path)),
        *("--remount-ro", "/"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", HOSTNAME, "--new-session", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--as-pid-1"),
        *("--chdir", "/", "--cap-drop", "ALL"),
        *users(own=view.own_users),
        *(("--seccomp", str(view.seccomp)) if view.seccomp >= 0 else ()),
    ]


def users(*, own: bool) -> Iterator[str]:
    """Who is there, and what the helper may."""
    if own:
        for name in CAPABILITIES:
            yield from ("--cap-add", f"CAP_{name}")
    else:
        yield from ("--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000")


def tmpfs(path: str, size: int) -> tuple[str, ...]:
    """A writable file system of a limited size, as of /tmp: everybody writes, nobody removes what is another's."""
    return ("--size", str(size), "--perms", "1777", "--tmpfs", path)


def host_system(shown: tuple[str, ...]) -> Iterator[str]:
    """This machine's programs."""
    yield from ("--dir", "/etc", "--ro-bind", "/usr", "/usr")
    for path in (Path("/", name) for name in SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for found in sorted(str(path) for pattern in ETC for path in Path("/etc").glob(pattern)):
        yield from ("--ro-bind-try", found, found)
    yield from ("--dir", "/var", "--symlink", "../run", "/var/run")
    yield from ("--symlink", "../tmp", "/var/tmp")  # noqa: S108 - of the sandbox
    for extra in shown:
        yield from ("--ro-bind", extra, extra)


def image_system(image: str) -> Iterator[str]:
    """An image's folders, each at its place; and this machine's Python elsewhere if the image has none."""
    for source in sorted(Path(image).iterdir()):
        if source.name in NOT_OF_AN_IMAGE:
            continue
        if source.is_symlink():
            yield from ("--symlink", str(source.readlink()), f"/{source.name}")
        else:
            yield from ("--ro-bind", str(source), f"/{source.name}")
    if not has_python(image):
        for path in (Path("/usr"), Path("/lib"), Path("/lib64")):
            if path.is_dir():
                yield from ("--ro-bind", str(path.resolve()), f"{HOST_SYSTEM}{path}")


def has_python(image: str) -> bool:
    """The image brings an interpreter for the helper, followed as inside of it."""
    path = Path(image + PYTHON)
    target = str(path.readlink()) if path.is_symlink() else ""
    return Path(image + target).is_file() if target.startswith("/") else path.is_file()


def helper_command(image: str, path: str) -> list[str]:
    """How to run the helper, which is at *path*: nothing but the standard library, none of the environment."""
    options = ["-I", "-S", "-E", "-B", path]
    if not image or has_python(image):
        return [PYTHON, *options]
    loader = next((str(path) for folder in ("/lib64", "/lib") for path in Path(folder).glob("ld-linux-*.so*")), "")
    if not loader:
        raise ExecutorError(f"image {image!r} has no {PYTHON}, and this machine's can't be lent to it")
    folders = [*(str(path) for path in Path("/usr/lib").glob("*-linux-gnu")), "/usr/lib64", "/usr/lib"]
    libraries = ":".join(HOST_SYSTEM + folder for folder in folders)
    return [HOST_SYSTEM + loader, "--library-path", libraries, f"{HOST_SYSTEM}{Path(PYTHON).resolve()}", *options]


def account_name() -> str:
    """Who we are, for messages."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())

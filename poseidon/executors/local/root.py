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
FORWARDER = "/run/poseidon_forwarder.py"
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
ETC_FOLDERS = (
    *("alternatives", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted", "terminfo", "fonts", "python3.*"),
    *("java*", "perl", "R", "php", "ghc", "texmf"),
)
ETC_FILES = (
    *("ld.so.cache", "localtime", "timezone", "locale.alias", "ssl/openssl.cnf", "protocols", "services", "mime.types"),
    *("inputrc", "bash.bashrc", "octave.conf"),
)
"""Programs need these; /etc as a whole holds what isn't theirs to read. Files are copied: a mount would take longer."""
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


def host_files() -> Iterator[Path]:
    """Small files of this machine that a sandbox gets a copy of."""
    for path in (Path("/etc", name) for name in ETC_FILES):
        if path.is_file() and os.access(path, os.R_OK):
            yield path


def texts(image: str, resolver: str = "") -> dict[str, bytes]:
    """The small files that are written for a sandbox; *resolver*: how names are resolved."""
    written = {"/etc/passwd": PASSWD, "/etc/group": GROUP, "/etc/hosts": HOSTS, "/etc/hostname": HOSTNAME + "\n"}
    if resolver:
        written["/etc/resolv.conf"] = resolver
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
        *(image_system(view.image) if view.image else host_system()),
        *("--proc", "/proc", "--dev", "/dev"),
        *tmpfs("/dev/shm", view.sizes.shm),  # noqa: S108 - of the sandbox
        *("--remount-ro", "/dev"),
        *tmpfs(WORKSPACE, view.sizes.workspace),
        *tmpfs("/tmp", view.sizes.tmp),  # noqa: S108 - of the sandbox
        *(() if view.image else (word for path in view.shown for word in bind(path))),
        *("--perms", "0700", "--dir", "/root", "--dir", "/home", "--dir", "/run"),
        *files(view),
        *("--remount-ro", "/"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", HOSTNAME, "--new-session", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--as-pid-1"),
        *("--chdir", "/", "--cap-drop", "ALL"),
        *users(own=view.own_users),
        *(("--seccomp", str(view.seccomp)) if view.seccomp >= 0 else ()),
    ]


def files(view: View) -> Iterator[str]:
    """Small files. Those that an image has too can only be covered, as it is read-only."""
    for path, descriptor in view.data.items():
        covers = view.image and not path.startswith("/run/")
        yield from () if covers else folders_to(path)
        yield from ("--perms", "0444", "--ro-bind-data" if covers else "--file", str(descriptor), path)


def bind(source: str, path: str = "") -> Iterator[str]:
    """Show *source* read-only, at its own place or another."""
    yield from folders_to(path or source)
    yield from ("--ro-bind-try", source, path or source)


def folders_to(path: str) -> Iterator[str]:
    """Make the folders above *path*: those that bwrap makes by itself are closed to all but root."""
    for parent in reversed(Path(path).parents[:-1]):
        yield from ("--dir", str(parent))


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


def host_system() -> Iterator[str]:
    """This machine's programs."""
    yield from ("--ro-bind", "/usr", "/usr")
    for path in (Path("/", name) for name in SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for found in sorted(str(path) for pattern in ETC_FOLDERS for path in Path("/etc").glob(pattern)):
        yield from bind(found)
    yield from ("--dir", "/var", "--symlink", "../run", "/var/run")
    yield from ("--symlink", "../tmp", "/var/tmp")  # noqa: S108 - of the sandbox


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
            if path.is_dir() and not path.is_symlink():
                yield from bind(str(path), f"{HOST_SYSTEM}{path}")


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
    return [
        f"{HOST_SYSTEM}{Path(loader).resolve()}",
        "--library-path",
        libraries,
        f"{HOST_SYSTEM}{Path(PYTHON).resolve()}",
        *options,
    ]


def account_name() -> str:
    """Who we are, for messages."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())

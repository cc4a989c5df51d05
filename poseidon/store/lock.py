"""One daemon a database: a lock that ends with its process, whatever kills it."""

import fcntl
import os
from pathlib import Path

from poseidon.errors import StoreLocked


def take_lock(database: Path) -> int:
    """Hold `<database>.lock` until the returned descriptor is closed, or raise StoreLocked at once.

    The file stays when the lock ends: removing it would let two in.
    """
    file = os.open(f"{database}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        if not isinstance(error, BlockingIOError):
            raise
        raise StoreLocked(f"another Poseidon (process {holder}) works on {database}") from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file

"""Host uids for sandboxes: two each, of a range that nobody else uses, in a user namespace of their own.

Only root can do this. Inside, 0 is the sandbox's root and 1000 is `user`; neither is anybody on the host.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import trio

from poseidon.errors import ConfigError, ExecutorError

FIRST, LAST = 1_880_000_000, 2_140_000_000
"""Above what container managers and systemd take, below the sign bit that some programs stumble over."""
COUNT = 2_000
PER_SANDBOX = 2
USER = 1000
PATIENCE = 10
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def choose_range(instance: str, base: int, count: int, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """First uid and their number. Derived from the store's id if not given. Raises ConfigError."""
    count = count or COUNT
    ranges = sorted(taken)
    if base:
        for start, size in ranges:
            if base < start + size and start < base + count:
                raise ConfigError(
                    f"[local] uid_base: {base} to {base + count - 1} overlaps with a range from {start} on"
                )
        return base, count
    blocks = (LAST - FIRST) // count
    for step in range(blocks):
        base = FIRST + (int(instance, 16) + step) % blocks * count
        if not any(base < start + size and start < base + count for start, size in ranges):
            return base, count
    raise ConfigError("[local] uid_base: no range of uids is free; give one")


def taken_ranges(etc: Path = Path("/etc")) -> list[tuple[int, int]]:
    """What /etc/subuid and /etc/subgid give to others, and single accounts."""
    found = []
    for name in ("subuid", "subgid"):
        if (etc / name).exists():
            for line in (etc / name).read_text().splitlines():
                fields = line.split(":")
                if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
                    found.append((int(fields[1]), int(fields[2])))
    for name in ("passwd", "group"):
        if (etc / name).exists():
            accounts = [line.split(":") for line in (etc / name).read_text().splitlines()]
            found += [(int(fields[2]), 1) for fields in accounts if len(fields) > 2 and fields[2].isdigit()]
    return found


class Users:
    """Slots of the range, and the user namespace of each. A slot is given back only when its sandbox is proven gone."""

    def __init__(self, base: int, count: int) -> None:
        self._base = base
        self._slots = count // PER_SANDBOX
        self._namespaces: dict[int, int] = {}
        self._used: Counter[int] = Counter()
        """How many sandboxes hold a slot. More than one: those before the last have ended, but aren't removed yet."""
        self._making = trio.Lock()

    def _free(self) -> int:
        return next((n for n in range(self._slots) if not self._used[n]), -1)

    def take(self) -> int:
        """A free slot; -1 if there is none."""
        slot = self._free()
        if slot >= 0:
            self._used[slot] += 1
        return slot

    def occupy(self, slot: int) -> None:
        """Mark the slot of a sandbox that was found again."""
        self._used[slot] += 1

    def give_back(self, slot: int) -> None:
        """Its sandbox is gone."""
        self._used[slot] -= 1

    async def namespace(self, slot: int) -> int:
        """A descriptor of the slot's user namespace, made at first use. Raises ExecutorError."""
        async with self._making:
            if slot not in self._namespaces:
                first = self._base + slot * PER_SANDBOX
                self._namespaces[slot] = await trio.to_thread.run_sync(make_namespace, first)
        return self._namespaces[slot]

    async def prepare(self) -> None:
        """Have the namespace ready that the next sandbox will need."""
        slot = self._free()
        if slot >= 0:
            with suppress(ExecutorError):
                await self.namespace(slot)

    def close(self) -> None:
        """Forget the namespaces; those in use live on."""
        for descriptor in self._namespaces.values():
            os.close(descriptor)
        self._namespaces.clear()


def make_namespace(first: int) -> int:
    """A user namespace in which 0 is *first* and USER is the next, and which can't have any below it."""
    try:
        with subprocess.Popen(
            ["unshare", "--user", "--", "/bin/sh", "-c", "echo; read _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
        ) as holder:
            assert holder.stdout
            if holder.stdout.read(1) != b"\n":
                raise ExecutorError("no user namespace can be made here")
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{holder.pid}/{name}").write_text(f"0 {first} 1\n{USER} {first + 1} 1\n")
            namespace = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        forbid_more(namespace)
    except (OSError, subprocess.SubprocessError) as error:
        raise ExecutorError(f"no user namespace can be made here: {error}") from error
    return namespace


def forbid_more(namespace: int) -> None:
    """Let no further user namespace be made inside: each brings capabilities, and the kernel's bugs behind them."""
    subprocess.run(
        [*entering(namespace), "/bin/sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces"],
        pass_fds=(namespace,),
        check=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd="/",
    )


def entering(namespace: int, *, own_users: bool = True) -> list[str]:
    """The words that run what follows as root of *namespace*. Without users of its own, its root is who we are."""
    who = ["--setuid", "0", "--setgid", "0"] if own_users else ["--preserve-credentials"]
    return ["nsenter", f"--user=/proc/self/fd/{namespace}", *who, "--"]

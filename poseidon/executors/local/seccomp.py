"""A filter of system calls, as the kernel wants it: what no program of a learner needs and what has broken kernels.

Namespaces and lost capabilities do the isolating; this makes the kernel's surface smaller.
"""

import platform
import struct
from dataclasses import dataclass
from errno import EAFNOSUPPORT, ENOSYS, EPERM
from types import MappingProxyType
from typing import Final

LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
X32_BIT = 0x40000000
FAMILIES: Final = (1, 2, 10, 16)
"""unix, inet, inet6, netlink. Not vsock, above all: no network namespace holds it, it reaches the hypervisor's host."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Numbers of one architecture."""

    audit: int
    socket: int
    denied: tuple[int, ...]
    unknown: tuple[int, ...]
    """Answered like a kernel that doesn't have them, as programs then do without."""


SAME_EVERYWHERE: Final = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_*, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr."""
ARCHITECTURES: Final = MappingProxyType(
    {
        "x86_64": Architecture(
            audit=0xC000003E,
            socket=41,
            # acct, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, kexec_*, *_module, mount, umount2,
            # pivot_root, swapon, swapoff, reboot, quotactl, iopl, ioperm, open_by_handle_at,
            # name_to_handle_at, lookup_dcookie, syslog, settimeofday, clock_settime, clock_adjtime, adjtimex,
            # fanotify_init, vhangup, unshare, setns, nfsservctl, move_pages, migrate_pages, mbind, set_mempolicy,
            # uselib
            denied=(
                *(163, 248, 249, 250, 321, 298, 323, 246, 320, 175, 176, 313, 165, 166, 155, 167, 168, 169, 179),
                *(172, 173, 304, 303, 212, 103, 164, 227, 305, 159, 300, 153, 272, 308, 180, 279, 256, 237, 238, 134),
            ),
            unknown=SAME_EVERYWHERE,
        ),
        "aarch64": Architecture(
            audit=0xC00000B7,
            socket=198,
            denied=(
                *(89, 217, 218, 219, 280, 241, 282, 104, 294, 105, 106, 273, 40, 39, 41, 224, 225, 142, 60),
                *(265, 264, 18, 116, 170, 112, 266, 171, 262, 58, 97, 268, 42, 239, 238, 235, 237),
            ),
            unknown=SAME_EVERYWHERE,
        ),
    }
)


class Program:
    """A sequence of instructions; each test returns at once, so no jump is longer than one step."""

    def __init__(self) -> None:
        self.code = b""

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self.code += struct.pack("=HBBI", operation, if_true, if_false, value)

    def load(self, offset: int) -> None:
        self.add(LOAD_WORD, offset)

    def answer(self, value: int) -> None:
        self.add(RETURN, value)

    def refuse_if(self, test: int, value: int, error: int) -> None:
        self.add(test, value, 0, 1)
        self.answer(ERRNO | error)

    def refuse_unless_equal(self, value: int, error: int) -> None:
        self.add(JUMP_EQUAL, value, 1, 0)
        self.answer(ERRNO | error)


def program(machine: str = "") -> bytes | None:
    """The filter for this machine's architecture, None if it isn't one that we know."""
    known = ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    code = Program()
    code.load(ARCHITECTURE)
    code.refuse_unless_equal(known.audit, ENOSYS)
    code.load(NUMBER)
    code.refuse_if(JUMP_AT_LEAST, X32_BIT, ENOSYS)
    for number in known.denied:
        code.refuse_if(JUMP_EQUAL, number, EPERM)
    for number in known.unknown:
        code.refuse_if(JUMP_EQUAL, number, ENOSYS)
    code.add(JUMP_EQUAL, known.socket, 1, 0)
    code.answer(ALLOW)
    code.load(FIRST_ARGUMENT)
    for family in FAMILIES:
        code.add(JUMP_EQUAL, family, 0, 1)
        code.answer(ALLOW)
    code.answer(ERRNO | EAFNOSUPPORT)
    return code.code

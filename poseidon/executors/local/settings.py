"""The settings of the local executor, as in the table `[local]` of poseidon.toml, and what is derived from them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MIB = 1 << 20
SMALLEST_MEMORY_MB = 16
"""Below this not even a shell with its small programs is sure to work."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Units are in the names or given here; 0 means: derived from this machine, unless said otherwise."""

    images: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Image name → root folder. Any other image means this machine's own system, read-only."""
    require_image: bool = False
    """Refuse images that aren't in `images`."""
    shown: tuple[str, ...] = ()
    """Further paths of this machine that runners without an image of their own see, read-only (/opt, for instance)."""
    require: tuple[str, ...] = ()
    """Abilities without which Poseidon must not serve: memory, processes, cpu, users, network, isolation."""
    memory_mb: int = 256
    """Of a runner whose environment names no limit."""
    overhead_mb: int = 24
    """Added to a runner's memory limit for the helper in it."""
    processes: int = 128
    """Of one execution and of one runner (threads count)."""
    open_files: int = 256
    """Of one process. Low, as terminals are a resource that all share."""
    workspace_mb: int = 0
    """Of /workspace. Derived: 5/16 of the memory limit."""
    tmp_mb: int = 0
    """Of /tmp. Derived: 2/16 of the memory limit."""
    shm_mb: int = 0
    """Of /dev/shm. Derived: 1/16 of the memory limit. The sum of the three is at most half of the memory limit."""
    memory_budget_mb: int = 0
    """What all runners together may be promised. Derived: three quarters of this machine's memory."""
    max_runners: int = 0
    """How many at once. Derived: 64 per CPU, at most 1000."""
    cpu_quota: float = 0.0
    """CPUs that one runner may use at most; 0: no fixed limit, only shares in proportion to cpuLimit."""
    cpu_shares: int = 1024
    """Of a runner whose environment names no cpuLimit."""
    uid_base: int = 0
    """First host uid (and gid) of runners. Derived: by the store's id, above all ranges that are in use elsewhere."""
    uid_count: int = 0
    """How many; each runner takes two. Derived: 2000."""
    abandon_after: float = 24.0
    """Hours after which a runner that no daemon has visited ends itself."""
    start_concurrency: int = 0
    """Runners that are launched at the same time. Derived: the number of CPUs, at least 2."""
    start_timeout: float = 30.0
    """Seconds until a launched runner must have reported."""
    network_blocked: tuple[str, ...] = ("169.254.0.0/16",)
    """Networks that runners with networkAccess can't reach, beside all addresses of this machine."""
    name_servers: tuple[str, ...] = ()
    """IPv4 addresses for runners with networkAccess. Derived: this machine's own ones that aren't on itself."""
    port_address: str = "127.0.0.1"
    """IP address of this machine on which exposed ports are reached."""
    port_host: str = ""
    """How clients are told that address. Derived: as it is, or this machine's name if it stands for all."""
    port_range: tuple[int, ...] = ()
    """First and last port of this machine for exposed ones. Empty: whichever is free."""
    user_cgroup: str = ""
    """A cgroup (v2) of this machine, as a path, that Poseidon may divide. Empty: its own, if it may."""

    def memory_of(self, limit_mb: int) -> int:
        """Megabytes for a runner's commands."""
        return limit_mb or self.memory_mb

    def sizes(self, memory_mb: int) -> "Sizes":
        """How large a runner's three file systems are."""
        return Sizes(
            workspace=self.workspace_mb * MIB or memory_mb * MIB * 5 // 16,
            tmp=self.tmp_mb * MIB or memory_mb * MIB * 2 // 16,
            shm=self.shm_mb * MIB or memory_mb * MIB // 16,
        )

    def least_memory(self) -> int:
        """Megabytes below which a limit is refused: file systems of a fixed size may fill half of it, no more."""
        least = SMALLEST_MEMORY_MB
        while self.sizes(least).total > least * MIB // 2:
            least += 1
        return least

    def budget(self) -> int:
        """Megabytes that all runners together may be promised."""
        return self.memory_budget_mb or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4 // MIB

    def runners(self) -> int:
        """How many runners there may be at once."""
        return self.max_runners or min(1000, 64 * (os.cpu_count() or 1))

    def launches(self) -> int:
        """How many runners are launched at the same time."""
        return self.start_concurrency or max(2, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a runner's writable file systems, in bytes; they live in its memory."""

    workspace: int
    tmp: int
    shm: int

    @property
    def total(self) -> int:
        return self.workspace + self.tmp + self.shm

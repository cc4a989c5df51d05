"""What the local executor must remember, and the seam to whoever keeps it: executors don't know the store."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """One sandbox, from before it is launched until it is proven gone."""

    allocation: str
    job: str
    environment: int
    generation: int
    slot: int
    """Which uids it has: of the executor's range, those with this number. -1: none of its own."""
    pid: int
    """Of the helper, as this machine sees it; 0 while not started."""
    started: str
    """"<boot id>:<process start ticks>" of the helper; "" while not started."""
    folder: str
    memory_mb: int
    """Promised to its commands; the helper's overhead comes on top."""
    created: int
    version: int
    state: str
    """"asked", "running", "ended" or "stopped"."""
    reason: str
    created_at: float
    ended_at: float | None
    ports: str = ""
    """Exposed ports and where they are reached: "<port>=<host:port>" each, blanks between."""


class Ledger(Protocol):
    """Durable memory. When a call returns, what it says is on disk."""

    @property
    def instance(self) -> str:
        """12 hexadecimal digits that name this store on its machine."""

    async def reserve(self, count: int) -> int:
        """The first of *count* version numbers that were never given before."""

    async def save(self, record: SandboxRecord) -> None:
        """Insert or replace, by allocation."""

    async def forget(self, allocation: str) -> None:
        """Remove; an unknown one is fine."""

    async def load(self) -> tuple[SandboxRecord, ...]:
        """All."""

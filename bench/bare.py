"""The local executor without Poseidon round it, in this process: what there is to be measured beside."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import trio

from bench.daemons import MEMORY_MB
from poseidon.core.command import Command
from poseidon.core.model import Allocation, ClientStatus, Environment, EnvironmentId, JobGone, JobId
from poseidon.executors.base import Executor
from poseidon.executors.local.binary import bundled
from poseidon.executors.local.executor import open_local
from poseidon.executors.local.ledger import SandboxRecord
from poseidon.executors.local.settings import LocalSettings
from poseidon.store.ledger import StoreLedger
from poseidon.store.store import open_store

ENVIRONMENT = Environment(EnvironmentId(1), "default", 0, cpu_limit=20, memory_limit=MEMORY_MB)
WITHIN = 30.0


@dataclass(slots=True)
class Bare:
    """Starts and stops sandboxes, and knows from the executor's stream when they are up and gone."""

    executor: Executor
    up: dict[JobId, Allocation] = field(default_factory=dict)
    gone: set[JobId] = field(default_factory=set)
    moved: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    async def follow(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self.executor.follow(None) as batches:
            task_status.started()
            async for batch in batches:
                for value in batch.values:
                    if isinstance(value, Allocation) and value.client is ClientStatus.RUNNING:
                        self.up[value.job] = value
                    elif isinstance(value, JobGone):
                        self.gone.add(value.job)
                self.moved.unpark_all()

    async def start(self, memory_mb: int = MEMORY_MB) -> Allocation:
        """A new sandbox, ready."""
        job = JobId(f"{ENVIRONMENT.id}-{uuid4()}")
        with trio.fail_after(WITHIN):
            await self.executor.start(job, replace(ENVIRONMENT, memory_limit=memory_mb))
            while job not in self.up:
                await self.moved.park()
        return self.up[job]

    async def stop(self, allocation: Allocation) -> None:
        """Proven gone when this returns."""
        with trio.fail_after(WITHIN):
            await self.executor.stop(allocation.job)
            while allocation.job not in self.gone:
                await self.moved.park()

    async def run(self, allocation: Allocation, line: str, *, tty: bool) -> int:
        """Bytes of output of a command that succeeds."""
        return await self.feed(allocation, Command(line, tty=tty))

    async def feed(self, allocation: Allocation, command: Command, data: bytes | None = None) -> int:
        """The same with *data* as its input."""
        size = 0
        async with self.executor.execute(allocation, command) as process:
            if data is not None:
                await process.send(data)
                await process.close_stdin()
            while chunk := await process.receive():
                size += len(chunk[1])
            if (await process.wait()).code != 0:
                raise RuntimeError(f"{command.arguments()} has failed in the bare executor")
        return size


@asynccontextmanager
async def open_bare(folder: Path) -> AsyncIterator[Bare]:
    """Nothing of it is left at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    async with open_store(folder / "poseidon.db") as store:
        settings = LocalSettings(max_runners=200)
        async with open_local(settings, folder, StoreLedger(store, SandboxRecord)) as executor:
            bare = Bare(executor)
            async with trio.open_nursery() as nursery:
                await nursery.start(bare.follow)
                try:
                    yield bare
                finally:
                    with trio.move_on_after(WITHIN, shield=True):
                        for job in {*bare.up} - bare.gone:
                            await bare.stop(bare.up[job])
                    nursery.cancel_scope.cancel()


def bubblewrap() -> list[str]:
    """A sandbox with nothing but this machine's system in it."""
    system = [
        ("--symlink", f"usr/{name}", f"/{name}") for name in ("lib", "lib64", "bin") if Path(f"/{name}").is_symlink()
    ]
    words = ["--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [str(bundled() or "bwrap"), *words, *(word for words in system for word in words)]


PYTHON_INSIDE = ("/usr/bin/python3", "-I", "-S", "-c")


async def run_bubblewrap() -> None:
    """A bare sandbox with a bare python, from exec to exit."""
    await run_process([*bubblewrap(), *PYTHON_INSIDE, "pass"])


async def run_process(command: list[str]) -> None:
    """As `subprocess.run`, the event loop held: nothing disturbs it."""
    await trio.lowlevel.checkpoint()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


async def run_true() -> None:
    """On the host."""
    await run_process(["/bin/true"])


def python(code: str) -> list[str]:
    """With this environment's packages, as the daemon is run."""
    return [sys.executable, "-c", code]

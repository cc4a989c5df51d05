"""The shell on a real store and a scripted executor, as the daemon puts it together."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from poseidon.core.fleet import Fleet
from poseidon.core.model import Environment, EnvironmentId, JobId
from poseidon.runners.assembly import Shell, open_shell
from poseidon.store.store import Store, open_store
from poseidon.supervisor import Supervisor, open_supervisor
from tests.fakes.scripted import ScriptedExecutor

ONE = EnvironmentId(1)


@dataclass
class Rig:
    """What a test works with."""

    executor: ScriptedExecutor
    store: Store
    shell: Shell
    supervisor: Supervisor

    @property
    def fleet(self) -> Fleet:
        return self.shell.dispatchers[self.executor.name].fleet

    def idle(self) -> int:
        return self.shell.environments.statistics()[ONE].idle

    def jobs(self) -> list[JobId]:
        return [job.id for job, _, _ in self.fleet.jobs(ONE)]

    async def put(self, size: int, **changes: object) -> bool:
        return await self.shell.environments.put(environment(size, **changes))

    async def full(self, size: int) -> None:
        await until(lambda: self.idle() == size)


def environment(size: int, **changes: object) -> Environment:
    return Environment(**{"id": ONE, "image": "bare", "pool_size": size, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def open_rig(
    folder: Path, executor: ScriptedExecutor | None = None, *, claim_wait: float = 5.0
) -> AsyncIterator[Rig]:
    """A daemon's shell; opened again on the same folder it is one that was restarted."""
    executor = executor or ScriptedExecutor()
    async with open_store(folder / "poseidon.db") as store, open_supervisor() as supervisor:
        shell = await open_shell([executor], store, supervisor, claim_wait=claim_wait)
        await shell.run()
        yield Rig(executor, store, shell, supervisor)


async def until(holds: Callable[[], bool], *, within: float = 30.0) -> None:
    """Wait until *holds*; the message of a failure names it."""
    with trio.move_on_after(within):
        while not holds():
            await trio.sleep(0.005)
        return
    raise AssertionError(f"not within {within} s: {holds}")

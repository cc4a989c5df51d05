"""Whatever keeps Nomad from answering: health says what, idle runners are still handed out, and all comes back."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio

from poseidon.errors import ExecutorUnreachable, Overloaded
from poseidon.executors.nomad.executor import open_nomad
from poseidon.runners.delays import Delays
from poseidon.runners.overview import Overview
from tests.fakes.nomad import NomadFake, open_nomad_fake
from tests.nomad.test_cluster import settings
from tests.runners.shell import ONE, Rig, open_rig
from tests.runners.shell import until as until_soon

OURS, ANOTHER = str(UUID(int=1)), str(UUID(int=2))
WANTED: dict[str, Any] = {"executor": "nomad", "cpu_limit": 20, "memory_limit": 100}


async def unreachable(fake: NomadFake) -> None:
    fake.stop_server()
    await until(lambda: fake.server.down)


async def leaderless(fake: NomadFake) -> None:
    fake.lose_leader()


async def busy(fake: NomadFake) -> None:
    fake.fault("/v1/", times=None, status=429, text="Too many requests")


async def distrustful(fake: NomadFake) -> None:
    fake.refuse_tokens(ANOTHER)


async def confused(fake: NomadFake) -> None:
    fake.fault("/v1/", times=None, status=200, garbage=b"<html>It works!</html>")


OUTAGES: dict[str, tuple[Callable[[NomadFake], Awaitable[None]], str]] = {
    "unreachable": (unreachable, "can't be reached"),
    "no leader": (leaderless, "has no cluster leader at present"),
    "429": (busy, "is asked too often (429)"),
    "token": (distrustful, "refuses the token (nomad.token)"),
    "something else answers": (confused, "It works!"),
}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between attempts are shorter."""
    usual = Delays.next
    monkeypatch.setattr(Delays, "next", lambda delays: usual(delays) / 10)


async def until(holds: Callable[[], bool]) -> None:
    await until_soon(holds, within=30)


@dataclass
class Scene:
    fake: NomadFake
    rig: Rig

    def ailment(self) -> tuple[str, str]:
        """Code and message of health."""
        found = Overview(self.rig.shell, 0.0, 0.0).ailment()
        return ("", "") if found is None else (found.code, found.message)

    async def tells(self, words: str) -> None:
        await until(lambda: words in self.ailment()[1])
        code, message = self.ailment()
        assert code == "NOMAD_UNREACHABLE"
        assert message.startswith("executor nomad: ")
        assert OURS not in message
        [executor] = Overview(self.rig.shell, 0.0, 0.0).executors()
        assert (executor.reachable, executor.trouble) == (False, message.removeprefix("executor nomad: "))

    async def put(self, size: int) -> None:
        await self.rig.put(size, **WANTED)

    async def recovers(self, size: int) -> None:
        """Nothing is left of the outage."""
        await self.fake.heal()
        await until(lambda: self.ailment() == ("", ""))
        await until(lambda: len(self.rig.jobs()) == size and self.rig.fleet.unproven_stops() == 0)
        templates = {f"template-{environment.id}" for environment in self.rig.shell.environments.list()}
        assert set(self.rig.jobs()) == set(self.fake.jobs) - templates


@asynccontextmanager
async def opened(fake: NomadFake, folder: Path, **changes: Any) -> AsyncIterator[Scene]:
    wanted = settings(fake, **{"token": OURS, "list_interval": 0.5, **changes})
    async with open_nomad(wanted) as executor, open_rig(folder, executor, claim_wait=0.1) as rig:  # type: ignore[arg-type]
        yield Scene(fake, rig)


@asynccontextmanager
async def cluster() -> AsyncIterator[NomadFake]:
    with trio.fail_after(90):
        async with open_nomad_fake(seed=0, speed=50, tokens=[OURS]) as fake:
            yield fake


@pytest.mark.parametrize("outage", OUTAGES)
async def test_an_outage_is_told_and_what_it_put_off_is_done_afterwards(outage: str, tmp_path: Path) -> None:
    begin, words = OUTAGES[outage]
    async with cluster() as fake, opened(fake, tmp_path) as scene:
        await scene.put(1)
        await until(lambda: scene.rig.idle() == 1)
        await begin(fake)
        fake.cut_streams()
        await scene.tells(words)
        runner = await scene.rig.shell.claims.claim(ONE, timeout=60)
        with pytest.raises(Overloaded):
            await scene.rig.shell.claims.claim(ONE, timeout=60)
        with pytest.raises(ExecutorUnreachable):
            await scene.put(2)
        with pytest.raises(ExecutorUnreachable):
            await scene.rig.shell.environments.remove(ONE)
        await scene.rig.shell.claims.release(runner.id)
        assert runner.job in fake.jobs
        await scene.recovers(1)
        assert runner.job not in fake.jobs


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("outage", OUTAGES)
async def test_at_start_the_same_is_told_and_comes_right_by_itself(outage: str, known: bool, tmp_path: Path) -> None:
    begin, words = OUTAGES[outage]
    async with cluster() as fake:
        if known:
            async with opened(fake, tmp_path) as scene:
                await scene.put(1)
                await until(lambda: scene.rig.idle() == 1)
        await begin(fake)
        async with opened(fake, tmp_path) as scene:
            await scene.tells(words)
            with pytest.raises(ExecutorUnreachable):
                await scene.put(2)
            await scene.recovers(1 if known else 0)
            await scene.put(2)
            await until(lambda: scene.rig.idle() == 2)


async def test_a_missing_namespace_is_told_and_found_once_it_is_made(tmp_path: Path) -> None:
    async with cluster() as fake, opened(fake, tmp_path, namespace="teaching") as scene:
        await scene.tells("nomad has no namespace 'teaching' (nomad.namespace)")
        fake.fault("/v1/namespace/teaching", times=None, garbage=b'{"Name": "teaching"}')
        await until(lambda: scene.ailment() == ("", ""))

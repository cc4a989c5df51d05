"""Until it is sure that the executor is the one that we know, its news wait and nothing is asked of it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
import trio.testing

from poseidon.core.model import ClientStatus, JobGone, JobId, Listing
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import HasAnAddress, JobsListed
from poseidon.executors.trust import Trust
from poseidon.runners import recognition
from tests.fakes.scripted import ScriptedExecutor
from tests.runners.shell import ONE, open_rig, until


@dataclass
class DistantExecutor(ScriptedExecutor):
    """A look tells nothing, so that only a listing counts, which comes when *hand_on* is set."""

    address: str = "http://there"
    trust: Trust = field(default_factory=Trust)
    hand_on: trio.Event | None = None

    async def has(self, job: JobId) -> bool:
        await self._answer()
        return False

    async def snapshot(self) -> Listing:
        listing = await super().snapshot()
        if self.hand_on is not None:
            await self.hand_on.wait()
        return listing

    async def stop(self, job: JobId) -> int:
        await self.trust.needed()
        return await super().stop(job)


class ListingExecutor(DistantExecutor):
    """One that is compared by its jobs alone."""

    async def list_jobs(self) -> JobsListed:
        listing = await self.snapshot()
        running = frozenset(each.job for each in listing.allocations if each.client is ClientStatus.RUNNING)
        return JobsListed(replace(listing, allocations=(), allocations_index=0, jobs_only=True), running)


async def test_news_that_come_before_the_first_listing_wait_for_it_and_none_is_lost(tmp_path: Path) -> None:
    executor = DistantExecutor(list_interval=1000)
    assert isinstance(executor, HasAnAddress)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.full(1)
        runner = await rig.shell.claims.claim(ONE, timeout=0)
        await rig.full(1)
    executor.hand_on = trio.Event()
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: len(executor.followers) == 1)
        executor.die(runner.job)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.fleet.runner(runner.id) is not None
        executor.hand_on.set()
        await until(lambda: rig.fleet.runner(runner.id) is None)


async def test_what_was_to_be_stopped_is_stopped_once_it_is_sure_who_answers(tmp_path: Path) -> None:
    executor = DistantExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.full(1)
        executor.hand_on = trio.Event()
        executor.cut()
        await until(lambda: not executor.trust.given)
        runner = await rig.shell.claims.claim(ONE, timeout=0)
        await rig.shell.claims.release(runner.id)
        await trio.testing.wait_all_tasks_blocked()
        assert executor.stopped == []
        executor.hand_on.set()
        await until(lambda: runner.job in executor.stopped)


async def test_runners_that_start_while_a_listing_is_under_way_make_nobody_a_stranger(tmp_path: Path) -> None:
    executor = DistantExecutor(list_interval=1000)
    executor.hand_on = trio.Event()
    async with open_rig(tmp_path, executor) as rig:
        dispatcher = rig.shell.dispatchers["local"]
        await until(lambda: len(executor.followers) == 1)
        await trio.testing.wait_all_tasks_blocked()
        await rig.put(1)
        await rig.full(1)
        executor.hand_on.set()
        await until(lambda: dispatcher.listed or dispatcher.trouble is not None)
        assert dispatcher.trouble is None


async def test_the_end_of_a_job_that_was_never_placed_makes_nobody_a_stranger(tmp_path: Path) -> None:
    executor = DistantExecutor(list_interval=1000, held=True)
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await until(lambda: bool(executor.started))
        [job] = rig.jobs()
        await until(lambda: rig.fleet.expected() == 1)
    executor.hand_on = trio.Event()
    executor.remove(job)
    async with open_rig(tmp_path, executor) as rig:
        dispatcher = rig.shell.dispatchers["local"]
        await until(lambda: len(executor.followers) == 1)
        executor._send(JobGone(job, executor.version))  # the stream goes on where it was left
        await trio.testing.wait_all_tasks_blocked()
        executor.hand_on.set()
        await until(lambda: dispatcher.listed or dispatcher.trouble is not None)
        assert dispatcher.trouble is None


async def test_a_strangers_listing_that_others_asked_for_does_not_hold_up_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ListingExecutor(list_interval=1000)

    async def strange() -> Listing:
        return Listing((), (), 9, 9)

    async with open_rig(tmp_path, executor) as rig:
        dispatcher = rig.shell.dispatchers["local"]
        await until(lambda: dispatcher.reachable)
        await rig.put(1)
        await rig.full(1)
        runner = await rig.shell.claims.claim(ONE, timeout=0)
        with monkeypatch.context() as patch:
            patch.setattr(executor, "snapshot", strange)
            with pytest.raises(ExecutorUnreachable):
                await dispatcher.list_all()
        executor.die(runner.job)
        await until(lambda: rig.fleet.runner(runner.id) is None)
        await until(lambda: dispatcher.recognition.sure)


async def test_news_without_end_before_the_first_listing_break_the_stream_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = DistantExecutor()
    async with open_rig(tmp_path, executor) as rig:
        await rig.put(1)
        await rig.full(1)
    monkeypatch.setattr(recognition, "MOST_HELD", 2)
    executor.hand_on = trio.Event()
    async with open_rig(tmp_path, executor) as rig:
        await until(lambda: len(executor.followers) == 1)
        for _ in range(3):
            executor.run(next(iter(executor.jobs)))
        await until(lambda: "before the first listing" in (rig.shell.dispatchers["local"].trouble or ""))


async def test_who_needs_trust_waits_while_it_is_unsettled_and_fails_once_it_is_refused() -> None:
    trust = Trust()
    await trust.needed()
    trust.suspend()
    with trio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(ExecutorUnreachable, match="a stranger")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trust.needed)
            await trio.testing.wait_all_tasks_blocked()
            trust.refuse("a stranger")
    with trio.fail_after(30):
        trust.suspend()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trust.needed)
            await trio.testing.wait_all_tasks_blocked()
            trust.give()


async def test_many_who_need_trust_look_together_and_are_told_alike() -> None:
    looks = 0
    answers: list[bool | ExecutorUnreachable] = [ExecutorUnreachable("nobody there"), True]

    async def look() -> bool:
        nonlocal looks
        looks += 1
        await trio.testing.wait_all_tasks_blocked()
        answer = answers.pop(0)
        if isinstance(answer, ExecutorUnreachable):
            raise answer
        return answer

    trust = Trust()
    trust.look = look
    trust.suspend()
    failed: list[str] = []

    async def need() -> None:
        try:
            await trust.needed()
        except ExecutorUnreachable as error:
            failed.append(error.message)

    with trio.fail_after(5):
        for expected in (["nobody there"] * 5, []):
            failed.clear()
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(need)
            assert failed == expected
    assert looks == 2
    assert trust.given

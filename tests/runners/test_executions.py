"""Executions without HTTP: a client whose every move the test decides."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import ExecutionId, RunnerId
from poseidon.errors import ExecutionNotFound, Overloaded, StoreError
from poseidon.executors.base import Stream
from poseidon.runners import execution as execution_module
from poseidon.runners import executions as module
from poseidon.runners.execution import Execution
from poseidon.runners.execution_buffers import INPUT_MOST, LAST_MOST, OUTPUT_MOST, PIECE, InputBuffer, OutputBuffer
from poseidon.runners.execution_outcomes import CLIENT_GONE, Ending, Input, Outcome
from poseidon.runners.executions import Executions, open_executions
from poseidon.store.executions import WaitingExecution
from tests.api.service import until
from tests.fakes import plain
from tests.fakes.plain import PlainExecutor
from tests.runners.shell import ONE, Rig, open_rig


@dataclass
class Puppet:
    """A client. It reads only while *reads* is set."""

    reads: trio.Event = field(default_factory=trio.Event)
    heard: dict[Stream, bytearray] = field(default_factory=lambda: {stream: bytearray() for stream in Stream})
    outcome: Outcome | None = None
    started: bool = False

    async def start(self) -> None:
        assert not self.started
        self.started = True

    async def receive(self) -> Input:
        await trio.sleep_forever()
        raise AssertionError

    async def output(self, stream: Stream, data: bytes) -> None:
        assert self.outcome is None
        await self.reads.wait()
        self.heard[stream] += data

    async def end(self, outcome: Outcome) -> None:
        assert self.outcome is None
        self.outcome = outcome


@dataclass
class Bench:
    """Executions in one claimed runner."""

    rig: Rig
    executor: PlainExecutor
    executions: Executions
    runner: RunnerId

    async def create(self, line: str, **more: int) -> ExecutionId:
        return await self.executions.create(self.runner, Command(line, tty=False), **more)


@asynccontextmanager
async def open_bench(folder: Path) -> AsyncIterator[Bench]:
    executor = PlainExecutor(root=folder / "workspaces")
    async with open_rig(folder, executor) as rig:
        await rig.put(1)
        runner = await rig.shell.claims.claim(ONE, timeout=0)
        async with open_executions(rig.shell.claims, rig.store, rig.shell.clock.now, expiry=300) as executions:
            yield Bench(rig, executor, executions, runner.id)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path) as opened:
        yield opened


async def test_what_the_pipes_hold_at_the_end_reaches_a_client_that_reads_late(
    bench: Bench, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "CHUNK", 4096)
    client = Puppet()
    size = OUTPUT_MOST + 60_000  # more than is taken in while the client doesn't read, but the pipe can hold the rest
    execution = await bench.create(f"head -c {size} /dev/zero")
    nursery.start_soon(bench.executions.run, bench.runner, execution, client)
    await until(lambda: any(life.over.is_set() for life in bench.executions._lives))
    assert client.outcome is None
    client.reads.set()
    await until(lambda: client.outcome is not None)
    assert len(client.heard[Stream.STDOUT]) == size
    assert client.outcome == Outcome.exited(0)


async def test_what_was_written_before_the_limit_reaches_a_client_that_reads_late(
    bench: Bench, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "CHUNK", 4096)
    client = Puppet()
    size = OUTPUT_MOST + 60_000
    execution = await bench.create(f"head -c {size} /dev/zero; sleep 60", time_limit=1)
    nursery.start_soon(bench.executions.run, bench.runner, execution, client)
    await until(lambda: any(life.over.is_set() for life in bench.executions._lives))
    client.reads.set()
    await until(lambda: client.outcome is not None)
    assert len(client.heard[Stream.STDOUT]) == size


async def test_a_client_that_stalls_holds_neither_limit_nor_release_back(bench: Bench, nursery: trio.Nursery) -> None:
    client = Puppet()
    execution = await bench.create("yes", time_limit=1)
    nursery.start_soon(bench.executions.run, bench.runner, execution, client)
    await until(lambda: bool(bench.executor.processes))
    await until(lambda: not any(bench.executor.processes.values()))
    assert client.outcome is None
    client.reads.set()
    await until(lambda: client.outcome is not None)
    assert client.outcome is not None
    assert client.outcome.ending is Ending.TIMEOUT


async def test_a_client_that_leaves_in_the_moment_of_the_end_changes_nothing(bench: Bench) -> None:
    for delay in range(60):
        execution = await bench.create("true")
        with trio.move_on_after(delay * 0.0005):
            await bench.executions.run(bench.runner, execution, Puppet())
        await until(lambda: bench.executions.running == 0)
    assert not any(bench.executor.processes.values())
    bench.rig.shell.claims.used(bench.runner)


async def test_an_execution_that_cannot_be_recorded_does_not_begin_and_can_be_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = await bench.create("true")

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "begin_execution", refuse)
        with pytest.raises(StoreError):
            await bench.executions.run(bench.runner, execution, Puppet())
        patch.setattr(module, "save_waiting_execution", refuse)
        with pytest.raises(StoreError):
            await bench.create("true")
    assert bench.executions.waiting == 1
    client = Puppet()
    await bench.executions.run(bench.runner, execution, client)
    assert client.outcome == Outcome.exited(0)
    with pytest.raises(ExecutionNotFound):
        await bench.executions.run(bench.runner, execution, Puppet())


async def test_leaving_the_block_stops_what_runs(tmp_path: Path) -> None:
    client = Puppet()
    async with trio.open_nursery() as nursery:
        async with open_bench(tmp_path) as bench:
            nursery.start_soon(bench.executions.run, bench.runner, await bench.create("echo $$; sleep 60"), client)
            client.reads.set()
            await until(lambda: bool(client.heard[Stream.STDOUT]))
        assert not any(bench.executor.processes.values())
        nursery.cancel_scope.cancel()


async def test_the_first_outcome_counts(bench: Bench) -> None:
    waiting = WaitingExecution(ExecutionId("x"), bench.runner, Command("true"), 0, 0.0)
    life = Execution(waiting, bench.rig.shell.claims, lambda: bench.executions._halt(bench.runner))
    assert life.decide(Outcome.exited(3)) == Outcome.exited(3)
    assert life.decide(CLIENT_GONE) == Outcome.exited(3)
    assert life.outcome == Outcome.exited(3)


# The buffers


async def test_output_comes_out_in_order_in_joined_but_small_pieces() -> None:
    buffer = OutputBuffer()
    chunks = [(Stream.STDOUT, b"a"), (Stream.STDOUT, b"b"), (Stream.STDERR, b"c"), (Stream.STDOUT, b"d" * 80_000)]
    for chunk in chunks:
        buffer.add(*chunk)
    buffer.end()
    pieces = []
    while piece := await buffer.take():
        pieces.append(piece)
    assert pieces[:2] == [(Stream.STDOUT, b"ab"), (Stream.STDERR, b"c")]
    assert [len(data) for _, data in pieces[2:]] == [PIECE, PIECE, 80_000 - 2 * PIECE]
    assert buffer.received == {Stream.STDOUT: 80_002, Stream.STDERR: 1}
    assert buffer.size == 0


async def test_a_full_output_buffer_makes_the_producer_wait_until_it_is_lifted(autojump_clock: trio.abc.Clock) -> None:
    buffer = OutputBuffer()
    buffer.add(Stream.STDOUT, bytes(OUTPUT_MOST))
    await buffer.room()
    buffer.add(Stream.STDOUT, b"x")
    for _ in range(2):
        with trio.move_on_after(1) as waiting:
            await buffer.room()
        assert waiting.cancelled_caught
        buffer.lift()
        await buffer.room()
        buffer.add(Stream.STDOUT, bytes(LAST_MOST + 1))


async def test_what_is_added_after_the_end_is_counted_and_dropped() -> None:
    buffer = OutputBuffer()
    buffer.end()
    buffer.add(Stream.STDERR, b"late")
    assert await buffer.take() is None
    assert buffer.total == 4


async def test_a_full_input_buffer_makes_the_client_wait_until_it_is_taken(autojump_clock: trio.abc.Clock) -> None:
    buffer = InputBuffer()
    await buffer.put(bytes(INPUT_MOST))
    with trio.move_on_after(1) as waiting:
        await buffer.put(b"more")
    assert waiting.cancelled_caught
    assert await buffer.take() == bytes(INPUT_MOST)
    assert await buffer.take() == b"more"  # a cancelled put loses nothing
    buffer.end()
    await buffer.put(b"after the end")
    assert await buffer.take() is None


async def test_a_time_limit_above_the_cap_is_cut_to_it_and_none_becomes_it(bench: Bench) -> None:
    for asked, capped, uncapped in ((0, 60, 0), (59, 59, 59), (60, 60, 60), (3600, 60, 3600)):
        assert module.Caps(time_limit=60).cut(asked) == capped
        assert module.Caps().cut(asked) == uncapped
    bench.executions._caps = module.Caps(time_limit=60)
    waiting = await bench.executions.create(bench.runner, Command("true"))
    assert bench.executions.find(bench.runner, waiting).time_limit == 60


async def test_a_runner_has_a_bounded_number_of_executions_and_room_again_when_one_is_over(bench: Bench) -> None:
    bench.executions._caps = module.Caps(per_runner=3)
    refused = 0

    async def create() -> None:
        nonlocal refused
        try:
            await bench.executions.create(bench.runner, Command("true"))
        except Overloaded as error:
            assert "3 executions already" in error.message
            refused += 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(create)
    assert refused == 2
    assert bench.executions.waiting == 3
    puppet = Puppet()
    puppet.reads.set()
    await bench.executions.run(bench.runner, next(iter(bench.executions._waiting)), puppet)
    assert puppet.outcome is not None
    await until(lambda: not bench.executions.running)
    await create()
    assert (refused, bench.executions.waiting) == (2, 3)
    await create()
    assert (refused, bench.executions.waiting) == (3, 3)


async def test_executions_that_have_expired_take_no_room(bench: Bench) -> None:
    bench.executions._caps = module.Caps(per_runner=1)
    late = await bench.executions.create(bench.runner, Command("true"))
    with pytest.raises(Overloaded):
        await bench.executions.create(bench.runner, Command("true"))
    waiting = bench.executions._waiting
    waiting[late] = replace(waiting[late], created_at=waiting[late].created_at - 301)
    await bench.executions.create(bench.runner, Command("true"))


async def test_the_time_limit_is_no_end_of_input(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "GRACE", 0.3)
    mark = tmp_path / "fooled"
    puppet = Puppet()
    puppet.reads.set()
    waiting = await bench.create(f"read -r line || touch '{mark}'; sleep 60", time_limit=1)
    with trio.fail_after(30):
        await bench.executions.run(bench.runner, waiting, puppet)
        await until(lambda: not bench.executions.running)
    assert puppet.outcome is not None and puppet.outcome.ending is Ending.TIMEOUT
    assert not mark.exists()

"""One execution's life: a command on one side, its client on the other, and exactly one outcome.

The two sides are tasks of their own: the command's end, its limit and a shutdown never wait for the client, and the
client gets all output at its own pace.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol, assert_never

import structlog
import trio

from poseidon.core.model import Allocation, Reason, Runner, RunnerId
from poseidon.errors import ExecutorError, LeftRunning, PoseidonError, RunnerGone, Unsupported
from poseidon.executors.base import Executor, Exit, Process, Stream
from poseidon.runners.execution_buffers import InputBuffer, OutputBuffer
from poseidon.runners.execution_outcomes import (
    CLIENT_GONE,
    OUT_OF_MEMORY,
    SHUTDOWN,
    TIMEOUT,
    Ending,
    EndOfInput,
    Input,
    Outcome,
    Resize,
    Signal,
)
from poseidon.store.executions import WaitingExecution

log = structlog.get_logger(__name__)

GRACE = 3.0
"""Seconds from SIGQUIT to the kill, when the time limit is over."""
SHORT_GRACE = 1.0
"""The same, when nobody is there any more."""
KILL_WITHIN = 6.0
DRAIN = 0.2
"""Seconds that output may still come after the command's end: what it left in the background may hold the pipes."""
PAUSE = 0.005
"""Seconds without output after which there is none left."""
EXPLANATION = 1.0
"""Seconds that the news of a runner's end may be later than what it did to the command."""
SUSPICIOUS = (128, 137)
"""Exit codes that a kill for want of memory looks like from afar."""


class Claims(Protocol):
    """What an execution needs to know of runners, and does to them."""

    def used(self, runner: RunnerId) -> Runner: ...

    def place(self, runner: Runner) -> tuple[Executor, Allocation]: ...

    def active(self, runner: RunnerId) -> None: ...

    def hold(self, runner: RunnerId) -> AbstractContextManager[None]: ...

    def on_end(self, runner: RunnerId, callback: Callable[[Reason], None]) -> AbstractContextManager[None]: ...

    async def release(self, runner: RunnerId, reason: Reason = ...) -> None: ...


class Client(Protocol):
    """The client's end. A caller is cancelled as soon as the client is gone."""

    async def start(self) -> None:
        """Accept the client, and tell it that its execution begins."""

    async def receive(self) -> Input:
        """The next thing that comes from it."""

    async def output(self, stream: Stream, data: bytes) -> None:
        """Pass output on. Returns when the client takes more."""

    async def end(self, outcome: Outcome) -> None:
        """The one final message, and the close."""


class Execution:
    """*halting*: a context in which no other execution may start in the runner."""

    def __init__(
        self, waiting: WaitingExecution, claims: Claims, halting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.id = waiting.id
        self.runner = waiting.runner
        self.command = waiting.command
        self.output = OutputBuffer()
        self.input = InputBuffer()
        self.over = trio.Event()
        """The command's side is done."""
        self.told = trio.Event()
        """The client's side is done."""
        self._claims = claims
        self._halting = halting
        self._time_limit = waiting.time_limit
        self._limit = trio.current_time() + (waiting.time_limit or float("inf"))
        self._starting = trio.CancelScope(deadline=self._limit)
        self._process: Process | None = None
        self._up = trio.Event()
        self._pumped = trio.Event()
        self._outcome: Outcome | None = None
        self._decided = trio.Event()

    @property
    def outcome(self) -> Outcome:
        """How it ended; asked for when it has."""
        assert self._outcome is not None
        return self._outcome

    def decide(self, outcome: Outcome) -> Outcome:
        """It ends like this, unless it has ended already; what counts is returned."""
        if self._outcome is None:
            self._outcome = outcome
            self._decided.set()
            self._up.set()
            if self._process is None:
                self.output.end()  # there is none, and the client needn't wait for those who wait for the command
                self._starting.cancel(reason="the execution ends")
        return self._outcome

    # The client's side

    async def converse(self, client: Client) -> None:
        """Serve the client until all is said. Its leaving cancels this, and ends the command."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, client)
                await self._speak(client)
                nursery.cancel_scope.cancel(reason="all is said")
        finally:
            self.decide(CLIENT_GONE)
            self.output.discard()
            self.told.set()

    async def _speak(self, client: Client) -> None:
        await client.start()
        while piece := await self.output.take():
            await client.output(*piece)
        await client.end(self.outcome)

    async def _listen(self, client: Client) -> None:
        await self._up.wait()
        while True:
            match await client.receive():
                case bytes(data):
                    await self.input.put(data)
                case EndOfInput():
                    self.input.end()
                case Resize() | Signal() as control:
                    await self._control(control)
                case other:
                    assert_never(other)

    async def _control(self, control: Resize | Signal) -> None:
        if self._process is None:
            return
        with suppress(ExecutorError):  # the process's end tells of it
            match control:
                case Resize(rows, columns):
                    await self._process.resize(rows, columns)
                case Signal(number):
                    await self._process.signal(number)

    # The command's side

    async def perform(self) -> None:
        """Run the command to its outcome, and make sure that nothing is left of it where it didn't end by itself."""
        try:
            with self._claims.on_end(self.runner, self._runner_ended), self._active():
                await self._execute()
        except Exception:
            self.decide(Outcome.failed("internal error"))
            raise
        finally:
            self.decide(SHUTDOWN)  # cancelled, else there is an outcome
            self._leave()

    def _leave(self) -> None:
        self._process = None
        self.input.discard()
        self.output.end()
        self.over.set()

    def _runner_ended(self, reason: Reason) -> None:
        self.decide(Outcome.runner_gone(reason))

    @contextmanager
    def _active(self) -> Iterator[None]:
        """An execution with a time limit needs no other deadline; one without isn't activity but at both its ends."""
        self._claims.active(self.runner)
        with self._claims.hold(self.runner) if self._time_limit else nullcontext():
            yield
        self._claims.active(self.runner)

    async def _execute(self) -> None:
        try:
            executor, allocation = self._claims.place(self._claims.used(self.runner))
            with self._starting as starting:
                async with executor.execute(allocation, self.command) as process:
                    with trio.CancelScope(shield=True):  # once it runs it is only left by a decision
                        await self._attend(process, remote=executor.settle > 0)
        except LeftRunning as error:
            with trio.CancelScope(shield=True):
                await self._fail(error)
                await self._destroy()
        except PoseidonError as error:
            await self._fail(error)
        else:
            if starting.cancelled_caught:
                self.decide(TIMEOUT)

    async def _fail(self, error: PoseidonError) -> None:
        if isinstance(error, Unsupported):
            self.output.add(Stream.STDERR, f"{error.message}\n".encode())
        elif isinstance(error, ExecutorError):
            await self._wait_for_explanation()
        self.decide(Outcome.failed(error.message))

    async def _wait_for_explanation(self) -> None:
        """The command is lost; that its runner ended, and why, may become known a moment later."""
        with trio.move_on_after(EXPLANATION):
            await self._decided.wait()

    async def _attend(self, process: Process, *, remote: bool) -> None:
        async with trio.open_nursery() as nursery:
            self._process = process
            self._starting.deadline = float("inf")  # from here on the limit is a decision, and cancels nothing
            self._up.set()
            nursery.start_soon(self._feed, process)
            nursery.start_soon(self._pump, process)
            nursery.start_soon(self._watch, process, remote)
            with trio.move_on_at(self._limit):
                await self._decided.wait()
            await self._conclude(process, self.decide(TIMEOUT))
            nursery.cancel_scope.cancel(reason="the execution is over")

    async def _feed(self, process: Process) -> None:
        try:
            while data := await self.input.take():
                await process.send(data)
            if self._outcome is None:  # else it is we who gave up: a program that waits is stopped, not fooled
                await process.close_stdin()
        except ExecutorError:
            pass  # the process's end tells of it
        self.input.discard()

    async def _pump(self, process: Process) -> None:
        with suppress(ExecutorError):  # the process's end tells of it
            while chunk := await process.receive():
                self.output.add(*chunk)
                await self.output.room()
        self._pumped.set()

    async def _watch(self, process: Process, remote: bool) -> None:
        try:
            ended = await process.wait()
        except ExecutorError as error:
            await self._fail(error)
        else:
            await self._judge(ended, remote=remote)

    async def _judge(self, ended: Exit, *, remote: bool) -> None:
        if remote and ended.code in SUSPICIOUS:
            await self._wait_for_explanation()
        self.decide(OUT_OF_MEMORY if ended.out_of_memory else Outcome.exited(ended.code))

    async def _conclude(self, process: Process, outcome: Outcome) -> None:
        """Take what output is left, let the client know, then see to what may still run."""
        self.input.discard()
        self.output.lift()
        match outcome.ending:
            case Ending.EXIT | Ending.OUT_OF_MEMORY:
                await self._drain(DRAIN)
                self.output.end()
            case Ending.RUNNER_GONE:
                await self._drain(0)
                self.output.end()
            case Ending.TIMEOUT | Ending.CLIENT_GONE | Ending.FAILED:
                with self._halting():
                    await self._drain(0)
                    self.output.end()
                    await self._stop(process, GRACE if outcome is TIMEOUT else SHORT_GRACE)
            case other:
                assert_never(other)

    async def _drain(self, patience: float) -> None:
        with trio.move_on_after(patience):
            await self._pumped.wait()
        for _ in range(int(DRAIN / PAUSE)):  # a busy machine may have kept us from reading what is long there
            seen = self.output.total
            await trio.sleep(0 if self._pumped.is_set() else PAUSE)
            await trio.lowlevel.checkpoint()
            if self.output.total == seen:
                return

    async def _stop(self, process: Process, grace: float) -> None:
        if not await _stopped(process, grace):
            await self._destroy()

    async def _destroy(self) -> None:
        """Give the runner up, for something of the command may run on in it."""
        log.warning("execution didn't stop", execution_id=self.id, runner_id=self.runner)
        with suppress(RunnerGone):
            await self._claims.release(self.runner, Reason.UNSTOPPABLE)


async def _stopped(process: Process, grace: float) -> bool:
    """Ask the command to quit, then kill it; whether it is certain that nothing is left."""
    with suppress(ExecutorError), trio.move_on_after(grace):
        await process.signal(signal.SIGQUIT)
        await process.wait()
    with suppress(ExecutorError), trio.move_on_after(KILL_WITHIN):
        return await process.kill()
    return False

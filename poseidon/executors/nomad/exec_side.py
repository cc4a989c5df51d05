"""Sessions as seen from our scripts: one that waits to be told to begin, and short ones that are asked something."""

from contextlib import suppress

import trio

from poseidon.core.model import Allocation
from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError, ExecutorUnreachable
from poseidon.executors.nomad.exec_marks import Mark, Marks
from poseidon.executors.nomad.exec_session import Session, open_session
from poseidon.executors.nomad.exec_target import ExecTarget

SAID_MOST = 500


class Side:
    """A session as far as its script is concerned: ready, told the nonce, started."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.scope = trio.CancelScope(shield=True)
        """Only `leave` ends a session: whoever is cancelled has something to tell first."""
        self.opened = trio.Event()
        self.over = trio.Event()
        self.ready = trio.Event()
        self.started = trio.Event()
        self.said = bytearray()
        """What came before anything was to come: why it failed, if it did."""

    async def tell(self, line: bytes) -> None:
        if self.session:
            await self.session.send(line + b"\n")

    async def dismiss(self, *, tty: bool) -> None:
        """Nothing shall run. Returns when it is known to have heard that."""
        await self.opened.wait()
        if self.session:
            await self.session.send_now(b"\n")
            if not tty:
                await self.session.close_stdin()
            await self.over.wait()

    def open(self, session: Session) -> None:
        self.session = session
        self.opened.set()

    def note(self, data: bytes) -> None:
        self.said += data[: SAID_MOST - len(self.said)]

    def release(self) -> None:
        """Nobody has to wait for it any more."""
        self.ready.set()
        self.started.set()

    def end(self) -> None:
        self.opened.set()
        self.over.set()
        self.release()


async def ask(
    target: ExecTarget, addresses: tuple[str, ...], allocation: Allocation, words: tuple[str, ...]
) -> tuple[int, ...]:
    """Run a script of ours beside a command; the answer is what its mark tells. Raises ExecutorError.

    It takes no room: stopping something must be possible while all connections are in use.
    """
    error: ExecutorError = ExecutorUnreachable("Nomad can't be reached for executions")
    for address in addresses:
        try:
            async with open_session(target, address, allocation, words, tty=False) as session:
                return await _answer(session)
        except AllocationGone:
            raise
        except ExecutorError as failed:
            error = failed
    raise error


async def _answer(session: Session) -> tuple[int, ...]:
    marks = Marks(b"done")
    while piece := await session.receive():
        for part in marks.feed(piece[1]):
            if isinstance(part, Mark):
                with suppress(ExecutorError):
                    await session.close_stdin()
                return part.numbers
    raise ConnectionLost("a script of ours ended without telling how")

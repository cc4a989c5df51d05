"""The durable state of Poseidon: one SQLite file, one thread that writes it, readers that never wait for it.

The works given to it are plain functions of a SQLAlchemy Connection (`poseidon.store.queries`). A work runs in the
writer's thread, perhaps more than once before it counts: it must do nothing but SQL.
"""

import os
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import structlog
import trio
from sqlalchemy import Connection, Engine

from poseidon.errors import PoseidonError, StoreCorrupt, StoreError
from poseidon.store.connect import READERS, Synchronous, reading_engine, writing_connection
from poseidon.store.faults import store_errors
from poseidon.store.lock import take_lock
from poseidon.store.ticket import Ticket, Work
from poseidon.store.upgrade import upgrade
from poseidon.store.writer import CLOSING_PATIENCE, AnyTicket, Done, Writer

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store in numbers, for status, health and metrics."""

    queue_depth: int
    last_commit_ms: float
    wal_bytes: int
    problem: str | None
    """Why nothing can be written at present."""


@asynccontextmanager
async def open_store(path: Path, *, synchronous: Synchronous = "FULL") -> AsyncIterator["Store"]:
    """Lock, upgrade and open the database at *path*; flush and close it at the end, in bounded time.

    Raises StoreLocked, StoreTooNew, StoreCorrupt, or StoreError; the last also at the end, if something wasn't saved.
    """
    opened = await trio.to_thread.run_sync(_open, path, synchronous)
    store = Store(path, opened.connection, opened.instance)
    try:
        yield store
    finally:
        with trio.move_on_after(2 * CLOSING_PATIENCE, shield=True):
            await store.close()
        if store.closed:  # else its thread hangs in the disk, and may still write: the lock ends with the process
            os.close(opened.lock)
    if store.unsaved:
        raise StoreError(f"the database {path} was closed with changes that could not be saved: {store.unsaved}")


class _Opened(NamedTuple):
    lock: int
    connection: Connection
    instance: str


def _open(path: Path, synchronous: Synchronous) -> _Opened:
    with store_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = take_lock(path)
        try:
            upgrade(path)
            connection = writing_connection(path, synchronous)
            return _Opened(lock, connection, _instance(connection))
        except BaseException:
            os.close(lock)
            raise


class Store:
    """Opened by `open_store`; used from the Trio thread only."""

    def __init__(self, path: Path, writing: Connection, instance: str) -> None:
        self.path = path
        self.instance = instance
        """Random id of this database, made once: 12 hex digits."""
        self.failed = trio.Event()
        """A change that nobody waited for can't be saved, so memory and database differ: the daemon must end."""
        self.failure: Exception | None = None
        self.closed = False
        self._ended = trio.Event()
        self._unsaved = 0
        self._depth = 0
        self._closing = False
        self._refusing = False
        self._wal = Path(f"{path}-wal")
        self._readers: Engine = reading_engine(path)
        self._reading = trio.CapacityLimiter(READERS)
        self._writer = Writer(writing, path, self)
        # a daemon thread: one that hangs in a dead disk can't keep the process from ending
        threading.Thread(target=self._writer.run, name="store", daemon=True).start()

    def submit(self, work: Work[T]) -> Ticket[T]:
        """Queue a change that memory has made already. It will be saved, in order, as soon as the disk lets."""
        return self._queue(Ticket(work, kept=True))

    async def write(self, work: Work[T]) -> T:
        """Do *work*, durably when this returns. If it raises StoreError, it was not done and won't be."""
        return await self._queue(Ticket(work, kept=False)).wait()

    async def flush(self) -> None:
        """Wait until all that was submitted so far is durable."""
        await self.submit(_nothing).wait()

    async def read(self, query: Work[T]) -> T:
        """Run *query* on a connection that only reads and sees one consistent state. Keep it short."""
        if self._closing:
            raise StoreError(f"the database {self.path} is closed")
        return await trio.to_thread.run_sync(self._read, query, limiter=self._reading)

    def _read(self, query: Work[T]) -> T:
        with store_errors(self.path), self._readers.connect() as connection, connection.begin():
            return query(connection)

    def status(self) -> StoreStatus:
        """How it is doing."""
        wal_bytes = 0
        with suppress(OSError):
            wal_bytes = self._wal.stat().st_size
        problem = self._writer.problem
        return StoreStatus(
            queue_depth=self._depth,
            last_commit_ms=self._writer.last_commit * 1000,
            wal_bytes=wal_bytes,
            problem=problem.message if problem else None,
        )

    async def raise_failure(self) -> NoReturn:
        """A service: waits for ever, or raises why the store has failed."""
        await self.failed.wait()
        raise self.failure or StoreError(f"the database {self.path} has failed")

    def _queue(self, ticket: Ticket[T]) -> Ticket[T]:
        if self._closing:
            raise StoreError(f"the database {self.path} is closed")
        self._depth += 1
        self._writer.put(ticket)
        return ticket

    def done(self, done: Sequence[Done]) -> None:
        """From the writer: these are durable, or failed by themselves."""
        self._depth -= len(done)
        if self._refusing:
            self._refusing = False
            log.info("writing resumed", path=str(self.path))
        for ticket, result, error in done:
            if error is None:
                ticket.settle(result)
            elif not ticket.fail(error):
                self._unheard(ticket, error)

    def refused(self, tickets: Sequence[AnyTicket], error: StoreError) -> None:
        """From the writer: the disk refuses these at present."""
        if not self._refusing:
            self._refusing = True
            log.warning("writing refused", path=str(self.path), error=error.message, waiting=len(tickets))
        if isinstance(error, StoreCorrupt):  # no disk repairs itself
            self._fail(error)
        for ticket in tickets:
            if ticket.kept:
                ticket.refuse(error)
            else:
                self._depth -= 1
                ticket.fail(StoreError(error.message))

    def ended(self, error: Exception | None) -> None:
        """From the writer: its thread is over."""
        self._closing = self.closed = True
        unsaved = self._writer.leftovers()
        self._unsaved = sum(ticket.kept for ticket in unsaved)
        if error is not None:
            self._fail(error)
        for ticket in unsaved:
            ticket.fail(StoreError(f"the database {self.path} was closed before this could be saved"))
        self._ended.set()

    def _unheard(self, ticket: AnyTicket, error: Exception) -> None:
        if ticket.kept:
            self._fail(error)
        elif not isinstance(error, PoseidonError):
            log.error("write failed after its caller had left", exc_info=error)

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            log.error("store failed", path=str(self.path), exc_info=error)
        self.failure = self.failure or error
        self.failed.set()

    async def close(self) -> None:
        """For `open_store`."""
        self._closing = True
        self._writer.stop()
        await self._ended.wait()
        self._readers.dispose()

    @property
    def unsaved(self) -> int:
        """Changes that couldn't be saved before the end."""
        return self._unsaved if self.closed else self._depth


def _nothing(_: Connection) -> None:
    """For `flush`."""


def _instance(connection: Connection) -> str:
    """Read first: a start needn't wait for others' locks only for this."""
    driver = connection.connection
    (known,) = driver.execute("SELECT max(value) FROM meta WHERE key = 'instance'").fetchone()
    if known is None:
        known = secrets.token_hex(6)
        driver.execute("INSERT INTO meta VALUES ('instance', ?)", (known,))
    return str(known)

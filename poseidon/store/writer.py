"""The thread that owns the write connection: takes what has gathered, commits it as one transaction, tells.

Two kinds of failure. *A work's own* (a bug, a rule of the schema): it fails alone, its neighbours are done again
without it. *The disk's* (full, broken, locked by others for long): whoever waits is told at once; works that may be
given up are; all others stay, in their order, and are tried again until they succeed, for the memory that they come
from can't be undone. So the database is always what memory once was, never a mixture.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import trio
from sqlalchemy import Connection
from sqlalchemy.engine import RootTransaction

from poseidon.errors import StoreError
from poseidon.store.faults import is_busy, translate
from poseidon.store.ticket import Ticket

LARGEST_BATCH = 1000
"""Works in one transaction; more would let the first of them wait for too long."""
BUSY_PATIENCE = 30.0
"""Seconds that another program may hold the write lock before those who wait are told."""
CLOSING_PATIENCE = 5.0
"""Seconds that closing may try to write what the disk refuses."""
FIRST_RETRY, LONGEST_RETRY = 0.05, 1.0

AnyTicket = Ticket[Any]
Done = tuple[AnyTicket, Any, Exception | None]


class Listener(Protocol):
    """Hears what became of the works; called in the Trio thread, in order."""

    def done(self, done: Sequence[Done]) -> None:
        """These are durable, or failed by themselves."""

    def refused(self, tickets: Sequence[AnyTicket], error: StoreError) -> None:
        """The disk refuses these at present."""

    def ended(self, error: Exception | None) -> None:
        """The thread is over, because it was told so or because of *error*."""


class Writer:
    """All but `put` and `stop` runs in a thread of its own."""

    def __init__(self, connection: Connection, path: Path, listener: Listener) -> None:
        self._connection = connection
        self._path = path
        self._listener = listener
        self._token = trio.lowlevel.current_trio_token()
        self._inbox: SimpleQueue[AnyTicket | None] = SimpleQueue()
        self._pending: deque[AnyTicket] = deque()
        self._stop_by: float | None = None
        self._retry_in = 0.0
        self.problem: StoreError | None = None
        """Why nothing can be written at present."""
        self.last_commit = 0.0
        """Seconds that the newest commit took, its works included."""

    def put(self, ticket: AnyTicket) -> None:
        """Queue *ticket*; never blocks."""
        self._inbox.put(ticket)

    def stop(self) -> None:
        """Write what is queued, then end."""
        self._inbox.put(None)

    def run(self) -> None:
        """The thread."""
        error: Exception | None = None
        try:
            while self._gather():
                self._write()
        except Exception as crash:  # noqa: BLE001 – told to the Trio thread
            error = crash
        finally:
            with suppress(Exception):
                self._connection.close()
            self._tell(self._listener.ended, error)

    def leftovers(self) -> list[AnyTicket]:
        """What was never written; asked when the thread is over."""
        self._drain()
        return list(self._pending)

    def _gather(self) -> bool:
        """Wait until there is something to do (when the disk refuses: until it is time to try again)."""
        if self._retry_in:
            self._pause(self._retry_in)
        elif not self._pending and self._stop_by is None:
            self._take(self._inbox.get())
        self._drain()
        if self._stop_by is None:
            return True
        return bool(self._pending) and time.monotonic() < self._stop_by

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._stop_by is not None:
                time.sleep(min(left, FIRST_RETRY))
                return
            with suppress(Empty):
                self._take(self._inbox.get(timeout=left))

    def _drain(self) -> None:
        with suppress(Empty):
            while True:
                self._take(self._inbox.get_nowait())

    def _take(self, ticket: AnyTicket | None) -> None:
        if ticket is None:
            self._stop_by = time.monotonic() + CLOSING_PATIENCE
        else:
            self._pending.append(ticket)

    def _write(self) -> None:
        """One batch off the head of the queue."""
        batch = list(islice(self._pending, LARGEST_BATCH))
        if not batch:
            return
        began = time.perf_counter()
        try:
            done = self._attempt(batch)
        except StoreError as error:
            self._refuse(error)
            return
        self.last_commit = time.perf_counter() - began
        self._finish(done)

    def _attempt(self, batch: Sequence[AnyTicket]) -> list[Done]:
        """All of *batch* as one transaction; if one of them is bad, each as its own. Raises StoreError by the disk."""
        try:
            return self._together(batch)
        except Exception as error:  # noqa: BLE001 – told to the one who wrote the work
            self._raise_if_unavailable(error)
            if len(batch) == 1:
                return [(batch[0], None, error)]
        for ticket in batch[:-1]:
            self._finish(self._attempt([ticket]))
        return self._attempt(batch[-1:])

    def _together(self, batch: Sequence[AnyTicket]) -> list[Done]:
        with self._begin():
            return [(ticket, ticket.work(self._connection), None) for ticket in batch]

    def _begin(self) -> RootTransaction:
        """Wait for the write lock, for as long as it is bearable."""
        give_up = time.monotonic() + BUSY_PATIENCE
        while True:
            try:
                return self._connection.begin()
            except Exception as error:
                if not is_busy(error) or time.monotonic() > (self._stop_by or give_up):
                    raise
                self.problem = translate(error, self._path)
            self._drain()

    def _raise_if_unavailable(self, error: Exception) -> None:
        if isinstance(error, StoreError):
            return  # raised by a work on purpose
        if (translated := translate(error, self._path)) is not None:
            raise translated from error

    def _finish(self, done: list[Done]) -> None:
        for _ in done:
            self._pending.popleft()
        self.problem, self._retry_in = None, 0.0
        self._tell(self._listener.done, done)

    def _refuse(self, error: StoreError) -> None:
        self.problem = error
        self._retry_in = min(max(FIRST_RETRY, 2 * self._retry_in), LONGEST_RETRY)
        self._drain()
        refused = list(self._pending)
        self._pending = deque(ticket for ticket in refused if ticket.kept)
        self._tell(self._listener.refused, refused, error)

    def _tell(self, listener: Callable[..., None], *arguments: object) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(listener, *arguments)

"""What the local executor must remember of its sandboxes, kept in the store.

Executors don't know the store, and the store doesn't know them: the daemon hands the class of the records in.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from sqlalchemy import Connection

from poseidon.store import schema
from poseidon.store.statements import Row, run, select, upsert
from poseidon.store.store import Store
from poseidon.store.times import from_text, to_text

SAVE = upsert(schema.sandboxes)
COLUMNS = tuple(column.name for column in schema.sandboxes.columns)
TIMES = {"created_at", "ended_at"}
RESERVE = (
    "INSERT INTO meta VALUES ('local_version', :count) "
    "ON CONFLICT (key) DO UPDATE SET value = CAST(value AS INTEGER) + :count RETURNING CAST(value AS INTEGER) AS last"
)


class Sandbox(Protocol):
    """The fields of a record; the same as the table's columns."""

    @property
    def allocation(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def environment(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> str: ...
    @property
    def folder(self) -> str: ...
    @property
    def memory_mb(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def created_at(self) -> float: ...
    @property
    def ended_at(self) -> float | None: ...
    @property
    def ports(self) -> str: ...


S = TypeVar("S", bound=Sandbox)


class StoreLedger(Generic[S]):
    """The executor's `Ledger`. *make* builds a record from its fields by name."""

    def __init__(self, store: Store, make: Callable[..., S]) -> None:
        self._store = store
        self._make = make

    @property
    def instance(self) -> str:
        """Random id of the database: in the name of everything that belongs to it."""
        return self._store.instance

    async def reserve(self, count: int) -> int:
        """The first of *count* numbers that were never given before, nor will be again."""
        return await self._store.write(partial(reserve_versions, count=count))

    async def save(self, record: S) -> None:
        """Durable when it returns."""
        row = {name: getattr(record, name) for name in COLUMNS}
        row |= {name: to_text(row[name]) for name in TIMES}
        await self._store.write(partial(save_sandbox, row=row))

    async def forget(self, allocation: str) -> None:
        """Its end is known everywhere."""
        await self._store.write(partial(forget_sandbox, allocation=allocation))

    async def load(self) -> tuple[S, ...]:
        """All that are not forgotten, oldest first."""
        rows = await self._store.read(load_sandboxes)
        return tuple(self._make(**{**row, **{name: from_text(row[name]) for name in TIMES}}) for row in rows)


def reserve_versions(connection: Connection, count: int) -> int:
    """Advance the counter; the first version is 1."""
    (row,) = select(connection, RESERVE, {"count": count})
    return int(row["last"]) - count + 1


def save_sandbox(connection: Connection, row: Row) -> None:
    """Create or replace."""
    run(connection, SAVE, [row])


def forget_sandbox(connection: Connection, allocation: str) -> None:
    """Known or not."""
    run(connection, "DELETE FROM sandboxes WHERE allocation = :allocation", [{"allocation": allocation}])


def load_sandboxes(connection: Connection) -> list[Row]:
    """As rows, oldest first."""
    return select(connection, "SELECT * FROM sandboxes ORDER BY created, allocation")

"""The local executor's memory."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import trio

from poseidon.store.ledger import COLUMNS, StoreLedger
from poseidon.store.store import Store, open_store
from tests.store.values import NOW


@dataclass(frozen=True, slots=True)
class Record:
    """As the executor has it."""

    allocation: str
    job: str
    environment: int
    generation: int
    slot: int
    pid: int
    started: str
    folder: str
    memory_mb: int
    created: int
    version: int
    state: str
    reason: str
    created_at: float
    ended_at: float | None
    ports: str


ASKED = Record("a1", "29-x", 29, 1, 0, 0, "", "/run/a1", 64, 1, 1, "asked", "", NOW, None, "80=127.0.0.1:8000")


async def test_records_come_back_as_they_were_oldest_first(store: Store) -> None:
    ledger = StoreLedger(store, Record)
    newer = replace(ASKED, allocation="a0", created=2, ended_at=NOW + 1, state="ended", reason="out_of_memory")
    await ledger.save(newer)
    await ledger.save(ASKED)
    assert await ledger.load() == (ASKED, newer)


async def test_a_record_is_replaced_and_forgotten(store: Store) -> None:
    ledger = StoreLedger(store, Record)
    await ledger.save(ASKED)
    running = replace(ASKED, state="running", pid=7, started="boot:1", version=2)
    await ledger.save(running)
    assert await ledger.load() == (running,)
    await ledger.forget("a1")
    await ledger.forget("a1")
    assert await ledger.load() == ()


async def test_versions_are_never_given_twice(path: Path) -> None:
    given: list[int] = []

    async def reserve(ledger: StoreLedger[Record], count: int) -> None:
        first = await ledger.reserve(count)
        given.extend(range(first, first + count))

    for _ in range(2):
        async with open_store(path) as store, trio.open_nursery() as nursery:
            ledger = StoreLedger(store, Record)
            for count in (1, 5, 10, 1):
                nursery.start_soon(reserve, ledger, count)
    assert sorted(given) == list(range(1, 35))


async def test_the_instance_is_the_databases(store: Store) -> None:
    assert StoreLedger(store, Record).instance == store.instance


def test_the_record_has_the_tables_columns() -> None:
    assert tuple(asdict(ASKED)) == COLUMNS

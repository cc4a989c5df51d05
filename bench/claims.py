"""Claims: in this process with the real store, and by HTTP from a daemon whose executor costs nothing."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import trio

from bench.context import Bench, Measurement
from bench.daemons import INSTANT, Client, open_clients, open_daemon
from bench.instant import open_instant
from bench.timing import Rush, in_turn, rush
from poseidon.core.model import Environment, EnvironmentId
from poseidon.runners.assembly import Shell, open_shell
from poseidon.store.store import open_store
from poseidon.supervisor import open_supervisor

ONE = EnvironmentId(1)
CLIENTS = 50
ROW = "x" * 300
"""About what the row of a runner, and of its transition, comes to."""


async def measure_core(bench: Bench) -> None:
    """One at a time from a full pool; between two of them everything comes to rest."""
    size = bench.pick(50, 5)
    async with open_core(bench.folder / "core", size) as shell:
        with closing(bare_store(bench.folder / "core" / "bare.db")) as bare:
            claimed: list[float] = []
            committed: list[float] = []
            for _ in range(bench.pick(300, 20)):
                samples = await in_turn(1, {"claim": partial(claim, shell), "bare": partial(commit, bare)}, warm_up=0)
                claimed += samples["claim"]
                committed += samples["bare"]
                await settle(shell, size)
    bench.report.note("claim.core", claimed, committed)


@asynccontextmanager
async def open_core(folder: Path, size: int) -> AsyncIterator[Shell]:
    """A shell with a full pool."""
    async with open_store(folder / "poseidon.db") as store, open_supervisor() as supervisor:
        shell = await open_shell([await open_instant(store)], store, supervisor, claim_wait=10)
        await shell.run()
        await shell.environments.put(Environment(ONE, "default", size))
        await settle(shell, size)
        yield shell


async def claim(shell: Shell) -> None:
    await shell.claims.claim(ONE, timeout=60)


async def settle(shell: Shell, size: int) -> None:
    """Give back what is claimed, and wait until the pool is full and all is saved."""
    for runner in shell.claims.list():
        if runner.claimed_at is not None:
            await shell.claims.release(runner.id)
    with trio.fail_after(30):
        while (pool := shell.environments.statistics()[ONE]).idle < size or pool.used:
            await trio.sleep(0.001)
    await shell.store.flush()


def bare_store(path: Path) -> sqlite3.Connection:
    """As durable as ours."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in (
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = FULL",
        "CREATE TABLE runners (id INTEGER PRIMARY KEY, row TEXT)",
        "CREATE TABLE transitions (id INTEGER PRIMARY KEY, row TEXT)",
        f"INSERT INTO runners VALUES (1, '{ROW}')",
    ):
        connection.execute(statement)
    return connection


async def commit(bare: sqlite3.Connection) -> None:
    """What a claim writes: one row changes, one is added."""
    await trio.lowlevel.checkpoint()
    bare.execute("BEGIN IMMEDIATE")
    bare.execute("UPDATE runners SET row = ? WHERE id = 1", (ROW,))
    bare.execute("INSERT INTO transitions (row) VALUES (?)", (ROW,))
    bare.execute("COMMIT")


async def measure_http(bench: Bench) -> None:
    """One client, then many, from a daemon that refills its pool at once."""
    async with (
        open_daemon(bench.folder / "claims", INSTANT) as daemon,
        open_clients(daemon, CLIENTS) as clients,
    ):
        if bench.wants("claim.http"):
            await _one_client(bench, clients[0])
        if bench.wants("claims.burst"):
            await _burst(bench, clients)
        if bench.wants("claims.sustained"):
            await _sustained(bench, clients)
        if bench.wants("claims.released"):
            await _released(bench, clients)


async def _one_client(bench: Bench, client: Client) -> None:
    size = bench.pick(50, 5)
    await client.put(size)
    claimed: list[str] = []
    times: dict[str, list[float]] = {"claim": [], "version": []}
    for _ in range(bench.pick(300, 10)):
        samples = await in_turn(1, {"claim": partial(_keep, client, claimed), "version": client.version}, warm_up=0)
        for name, found in samples.items():
            times[name] += found
        await client.release(claimed.pop())
        await client.full()
    bench.report.note("claim.http", times["claim"], times["version"])


async def _burst(bench: Bench, clients: Sequence[Client]) -> None:
    size = bench.pick(1000, 100)
    await clients[0].put(size)
    rates: list[float] = []
    beside: list[float] = []
    for _ in range(bench.pick(3, 1)):
        claimed: list[str] = []
        rates.append((await rush([partial(_keep, each, claimed) for each in clients], seconds=30, most=size)).rate)
        await _release_all(clients, claimed)
        await clients[0].full()
        beside.append((await _versions(clients, seconds=30, most=size)).rate)
    bench.report.note("claims.burst", rates, beside)


async def _sustained(bench: Bench, clients: Sequence[Client]) -> None:
    await clients[0].put(CLIENTS)
    rates: list[float] = []
    beside: list[float] = []
    for _ in range(bench.pick(2, 1)):
        claimed: list[str] = []
        rates.append(
            (await rush([partial(_keep, each, claimed) for each in clients], seconds=bench.pick(2.0, 0.3))).rate
        )
        await _release_all(clients, claimed)
        await clients[0].full()
        beside.append((await _versions(clients, seconds=bench.pick(1.0, 0.2))).rate)
    bench.report.note("claims.sustained", rates, beside)


async def _released(bench: Bench, clients: Sequence[Client]) -> None:
    await clients[0].put(CLIENTS)
    rates: list[float] = []
    beside: list[float] = []
    for _ in range(bench.pick(2, 1)):
        rates.append(
            (await rush([partial(_claim_and_release, each) for each in clients], seconds=bench.pick(2.0, 0.3))).rate
        )
        beside.append((await _versions(clients, seconds=bench.pick(1.0, 0.2))).rate)
    bench.report.note("claims.released", rates, beside)


async def _versions(clients: Sequence[Client], *, seconds: float, most: int = 1_000_000) -> Rush:
    return await rush([each.version for each in clients], seconds=seconds, most=most)


async def _keep(client: Client, claimed: list[str]) -> None:
    claimed.append(await client.claim())


async def _claim_and_release(client: Client) -> None:
    await client.release(await client.claim())


async def _release_all(clients: Sequence[Client], claimed: list[str]) -> None:
    async def some(client: Client) -> None:
        while claimed:
            await client.release(claimed.pop())

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(some, client)


MEASUREMENTS = (
    Measurement(("claim.core",), measure_core),
    Measurement(("claim.http", "claims.burst", "claims.sustained", "claims.released"), measure_http),
)

"""Twenty clients on a cluster in which everything goes wrong, and a daemon that is restarted on top of it.

A round is a cluster of its own, by a seed of its own: `-k 'chaos and [7]'` is round 7 again.
POSEIDON_TEST_CHAOS_ROUNDS: how many.
"""

import os
from pathlib import Path
from random import Random

import pytest
import trio

from tests.fakes.nomad import open_nomad_fake
from tests.nomad.chaos import SPEED, Client, Daemon, Ledger, Quiet, Storm, hurry, open_daemon, put_environments

ROUNDS = int(os.environ.get("POSEIDON_TEST_CHAOS_ROUNDS", "3"))
CLIENTS = 20
LIFE = 2.0
"""Seconds that a daemon lives amid trouble, at least."""
ENOUGH = 12
"""Runners that are given out in a life, at least: a busy machine is slow."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_no_trouble_gives_a_runner_to_two_clients_or_loses_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    ledger = Ledger()
    clients = [Client(number, Random(1000 * seed + number), ledger) for number in range(CLIENTS)]
    with trio.fail_after(240):
        async with open_nomad_fake(nodes=3, seed=seed, speed=SPEED) as fake:
            storm = Storm(fake, seed)
            async with open_daemon(fake, tmp_path) as daemon:
                await put_environments(daemon)
                storm.begin()
                await _serve(daemon, clients, ledger)
            async with open_daemon(fake, tmp_path) as daemon:
                await _serve(daemon, clients, ledger)
                await storm.end()
                assert ledger.twice() == []
                await Quiet(fake, daemon, clients).reached(within=60)
                for client in clients:
                    await client.look_back(daemon)
    assert ledger.twice() + ledger.wrongs == []
    assert len(ledger.given) > CLIENTS


async def _serve(daemon: Daemon, clients: list[Client], ledger: Ledger) -> None:
    """One life: its clients are cut off at the end, as by a restart, and keep their runners."""
    before = len(ledger.given)
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.live, daemon)
        await trio.sleep(LIFE)
        while len(ledger.given) < before + ENOUGH:
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel(reason="the daemon stops")
    assert daemon.crashes() == []

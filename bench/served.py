"""`poseidon serve` with the instant executor instead of the real ones; for a process of its own."""

import sys
from contextlib import AsyncExitStack

from bench.instant import open_instant
from poseidon import opening
from poseidon.cli.main import main
from poseidon.config import Config
from poseidon.executors.base import Executor
from poseidon.store.store import Store


async def open_executors(config: Config, store: Store, stack: AsyncExitStack) -> list[Executor]:
    """In the place of the daemon's own."""
    return [await open_instant(store)]


if __name__ == "__main__":
    opening.open_executors = open_executors
    sys.exit(main(["serve", *sys.argv[1:]]))

"""kill -9 in the middle of it: what was acknowledged is there, and the file is sound."""

import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import trio

from poseidon.store.backup import check
from poseidon.store.connect import raw_connection
from poseidon.store.store import open_store
from tests.store.processes import ENVIRONMENT, python

LOAD = """
import os, sys, trio
from functools import partial
from pathlib import Path
from poseidon.store.store import open_store
from poseidon.store.records import save_changes
from poseidon.store.environments import save_environment
from poseidon.core.model import Changes, Phase
from tests.store.values import NOW, environment, life

async def claim(store, numbers):
    for number in numbers:
        one = life(number)
        store.submit(partial(save_changes, executor="local", changes=one.changes, at=NOW))
        used = life(number, Phase.USED).runner
        await store.submit(partial(save_changes, executor="local", changes=Changes(runners=(used,)), at=NOW)).wait()
        os.write(1, used.id.encode() + b"\\n")

async def main():
    first = int(sys.argv[2])
    async with open_store(Path(sys.argv[1])) as store, trio.open_nursery() as nursery:
        await store.write(partial(save_environment, environment=environment(), at=NOW))
        for task in range(20):
            nursery.start_soon(claim, store, range(first + task, first + 10**6, 20))

trio.run(main)
"""


def killed_under_load(path: Path, first: int, enough: int) -> list[str]:
    """Runs until *enough* claims are acknowledged. Returns all that were."""
    with subprocess.Popen(python(LOAD, path, first), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(enough)]
        process.kill()
        acknowledged += process.stdout.readlines()
    return [line.strip() for line in acknowledged if line.endswith("\n")]


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_by_a_kill(path: Path) -> None:
    acknowledged: list[str] = []
    with trio.fail_after(60):
        for number, enough in enumerate((1, 137, 500)):
            acknowledged += await trio.to_thread.run_sync(killed_under_load, path, number * 10**6, enough)
            async with open_store(path):
                with closing(raw_connection(path, read_only=True)) as connection:
                    found = {id_ for (id_,) in connection.execute("SELECT id FROM runners WHERE phase = 'used'")}
                assert found.issuperset(acknowledged)
                assert check(path).problems == ()
    assert len(acknowledged) >= 638


@pytest.mark.slow
async def test_a_kill_while_the_database_is_made_leaves_nothing_half_made(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nimport poseidon.store.migrate as m\nfrom alembic import op\n"
        "import os\n"
        "op.execute = lambda statement: os.kill(os.getpid(), 9)\n"
        "from poseidon.store.upgrade import upgrade\nupgrade(Path(sys.argv[1]))\n"
    )
    path = tmp_path / "poseidon.db"
    done = await trio.to_thread.run_sync(lambda: subprocess.run(python(script, path), env=ENVIRONMENT, check=False))
    assert done.returncode == -9
    with trio.fail_after(30):
        async with open_store(path):
            assert check(path).problems == ()

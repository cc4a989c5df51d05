"""Input and output of an execution don't wait for each other, however much of both there is."""

from pathlib import Path

import pytest
import trio

from poseidon.core.command import Command
from tests.nomad.exec_site import feed, open_site

SIZE = 6_000_000


@pytest.mark.parametrize("driver", ["raw_exec", "docker"])
async def test_a_program_that_echoes_much_input_gets_on(driver: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * (SIZE // 256)
    async with open_site(driver, tmp_path) as site, site.open(Command("cat", tty=False)) as process:
        echoed = 0
        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed, process, data)
                await trio.sleep(0.2)  # so that both directions are full
                while chunk := await process.receive():
                    echoed += len(chunk[1])
            assert (await process.wait()).code == 0
        assert echoed == len(data)

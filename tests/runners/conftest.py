"""An API over a real socket with one claimed runner: what tests of its files begin with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.service import Service, open_service


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_service(tmp_path) as opened:
        await opened.put(1)
        yield opened


@pytest.fixture
async def runner(service: Service) -> str:
    return await service.claim()


@pytest.fixture
async def workspace(service: Service, runner: str) -> Path:
    return service.workspace(runner)

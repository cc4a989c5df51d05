"""One running service per executor for all tests; which a test meets is told by its marker."""

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from tests.acceptance.codeocean import CodeOcean, open_codeocean
from tests.acceptance.sites import TOKEN, Kind, Site, open_site

SITES: dict[str, tuple[Kind, ...]] = {
    "both": ("local", "nomad"),
    "fake_nomad": ("nomad",),
    "sandboxes": ("local",),
}
ENVIRONMENTS = count(100)
"""Numbers that no other test has. (Those of the static ones below stay clear of them.)"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "site" in metafunc.fixturenames:
        kinds = [
            kind for name, kinds in SITES.items() if metafunc.definition.get_closest_marker(name) for kind in kinds
        ]
        assert kinds, f"{metafunc.definition.name} doesn't say where it holds: {', '.join(SITES)}"
        metafunc.parametrize("site", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The running service."""
    with open_site(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.fixture
def number() -> int:
    """Of an environment that is this test's own."""
    return next(ENVIRONMENTS)


@pytest.fixture
async def client(site: Site) -> AsyncIterator[CodeOcean]:
    """The client, before environment 1, which has a pool of two."""
    async with open_codeocean(site.url, TOKEN) as opened:
        await opened.ensure(1)
        yield opened


@pytest.fixture
async def runner(client: CodeOcean) -> AsyncIterator[str]:
    """A claimed runner of environment 1."""
    claimed = await client.claim(1)
    yield claimed
    await client.request("DELETE", f"/runners/{claimed}")

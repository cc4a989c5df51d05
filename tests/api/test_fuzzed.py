"""Requests made from the OpenAPI document, right and wrong ones: the API keeps to what it says of itself."""

import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS

from poseidon.api.openapi import document
from poseidon.core.command import Command
from poseidon.core.model import Allocation, Environment, JobId
from poseidon.errors import PlacementFailed
from poseidon.executors.base import Process
from tests.api.service import open_service
from tests.fakes.plain import PlainExecutor

TOKEN = {"Poseidon-Token": "secret"}
ENVIRONMENT = {"image": "plain", "prewarmingPoolSize": 1}
EXAMPLES = int(os.environ.get("POSEIDON_TEST_FUZZ_EXAMPLES", "5"))
"""Made at random for each operation, beside those that go through all values at the edges."""
LEFT_OUT = {
    "positive_data_acceptance",  # a runner may be gone, and no schema says that 1.0 isn't taken for 1
    "negative_data_rejection",  # unknown fields and parameters are ignored, and a runner that is gone is told first
    "not_a_server_error",  # some are documented; see `refused_on_purpose`
}


INERT = Command(argv=("/bin/sh", "-c", "cat > /dev/null; printf output; printf errors >&2"), tty=False)
"""What is run instead of anything that is asked for: commands and paths are made at random, some of them of constants
found in our own code, and this executor keeps nobody from harming this machine."""


@dataclass
class SmallExecutor(PlainExecutor):
    """Room for a few: some of the pools that are asked for are absurd."""

    @asynccontextmanager
    async def execute(self, allocation: Allocation, command: Command) -> AsyncIterator[Process]:
        async with super().execute(allocation, INERT) as process:
            yield process

    async def start(self, job: JobId, environment: Environment) -> int:
        if len(self.jobs) >= 6:
            raise PlacementFailed("no room")
        return await super().start(job, environment)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service in a thread of its own, as the generated requests come from synchronous code."""
    started, addresses, stops = threading.Event(), [], []

    async def serve(folder: Path) -> None:
        executor = SmallExecutor(root=folder / "workspaces")
        async with open_service(folder, executor=executor, token="secret", claim_wait=0.05, fill_wait=0.05) as service:
            stop = trio.Event()
            addresses.append(service.url)
            stops.append((stop, trio.lowlevel.current_trio_token()))
            started.set()
            await stop.wait()

    with TemporaryDirectory() as folder:
        thread = threading.Thread(target=trio.run, args=(serve, Path(folder)))
        thread.start()
        try:
            assert started.wait(60)
            yield addresses[0]
        finally:
            for stop, token in stops:
                trio.from_thread.run_sync(stop.set, trio_token=token)
            thread.join(60)
    assert not thread.is_alive()


def runner_of(url: str) -> str:
    """A runner that is in use; the requests before may have taken any other away."""
    with httpx.Client(base_url=url, headers=TOKEN, trust_env=False, timeout=30) as http:
        for runner in http.get("/runners").json()["runners"]:
            if runner["phase"] == "used":
                return str(runner["id"])
        http.put("/execution-environments/1", json=ENVIRONMENT)
        claimed = http.post("/runners", json={"executionEnvironmentId": 1}).json()
        return str(claimed.get("runnerId", "none"))


schema = schemathesis.openapi.from_dict(document("1"))


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # the service, in its thread, does
@schema.exclude(path_regex="/(websocket|docs.*)$").parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_the_api_keeps_to_its_description(url: str, case: schemathesis.Case[Any]) -> None:
    if "runner" in (case.path_parameters or {}) and case.path_parameters["runner"] == "0":
        case.path_parameters["runner"] = runner_of(url)
    case.call_and_validate(
        base_url=url,
        headers=TOKEN,
        timeout=60,
        excluded_checks=[CHECKS.get_one(name) for name in LEFT_OUT],  # type: ignore[misc]  # of classes
        additional_checks=[refused_on_purpose],
    )


def refused_on_purpose(_: object, response: schemathesis.Response, case: schemathesis.Case[Any]) -> None:
    """A server's error is one that we know, never a fault."""
    if response.status_code >= 500:
        assert response.json()["message"] != "internal error", case.as_curl_command()

"""What is asked of Nomad doesn't grow with the number of runners."""

from collections import Counter
from pathlib import Path

import trio

from poseidon.executors.nomad.executor import open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from tests.nomad.crowd import Crowd
from tests.nomad.loopback import Loopback
from tests.runners.shell import open_rig, until

SIZE = 1000


def asked(nomad: Loopback, since: int = 0) -> Counter[str]:
    """By what each request is for; all jobs are the same."""
    kinds = {"/v1/jobs": "jobs", "/v1/allocations": "allocations", "/v1/event/stream": "stream"}
    return Counter(
        kinds.get(request.path, "a job") if "prefix" not in request.query else "templates"
        for request in nomad.requests[since:]
        if request.path != "/v1/job/template-10" and request.method == "GET"
    )


async def test_a_thousand_known_runners_cost_two_lists_at_start_and_after_a_break(tmp_path: Path) -> None:
    crowd = Crowd(SIZE)
    await trio.to_thread.run_sync(crowd.remember, tmp_path / "poseidon.db")
    with trio.fail_after(60):
        async with crowd.serve() as nomad:
            settings = NomadSettings(address=nomad.url, list_interval=1000, settle=0.01)
            async with (
                open_nomad(settings) as executor,
                open_rig(tmp_path, executor) as rig,  # type: ignore[arg-type]
            ):
                dispatcher = rig.shell.dispatchers["nomad"]
                await until(lambda: dispatcher.reachable and asked(nomad)["templates"] == 1, within=30)
                first = asked(nomad)
                assert (first["jobs"], first["allocations"], first["stream"]) == (1, 1, 1)
                assert first["a job"] <= 2
                before = len(nomad.requests)
                crowd.breaking.set()
                await until(lambda: asked(nomad, before)["allocations"] == 1, within=30)
                await until(lambda: dispatcher.reachable, within=30)
                again = asked(nomad, before)
                assert (again["jobs"], again["allocations"], again["stream"]) == (1, 1, 1)
                assert again["a job"] <= 2
                assert sum(1 for _ in rig.fleet.runners()) == SIZE
                assert all(request.method == "GET" for request in nomad.requests)

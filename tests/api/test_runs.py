"""One-shot runs: an answer with all that happened, and never a runner left behind."""

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, EnvironmentId, JobId
from poseidon.errors import AllocationGone, PlacementFailed
from poseidon.executors.base import Process, Usage
from tests.api.service import Service, open_service, until
from tests.fakes.plain import PlainExecutor


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_service(tmp_path) as opened:
        await opened.put(1)
        yield opened


async def run(service: Service, command: str, **more: object) -> dict[str, Any]:
    body = {"executionEnvironmentId": 1, "command": command, **more}
    answer = await service.http.post("/runs", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def destroyed(service: Service, runner: str) -> None:
    """It is gone, and nobody has one."""
    told = (await service.http.get(f"/runners/{runner}")).json()
    assert (told["phase"], told["reason"]) == ("gone", "released")
    assert service.used() == 0
    await until(lambda: service.executions.running == 0)


async def test_a_run_tells_what_happened_and_leaves_no_runner(service: Service) -> None:
    told = await run(service, "echo out; echo err >&2; exit 3")
    assert (told["outcome"], told["exitCode"], told["detail"]) == ("exit", 3, None)
    assert (told["stdout"], told["stderr"]) == ("out\n", "err\n")
    assert (told["stdoutTruncated"], told["stderrTruncated"]) == (False, False)
    assert (told["node"], told["resources"]) == ("here", None)
    times = list(told["times"].values())
    assert times == sorted(times)
    assert list(told["times"]) == ["queuedAt", "claimedAt", "copiedAt", "startedAt", "endedAt"]
    assert set(told["durations"]) == {"waiting", "copying", "running"}
    await destroyed(service, told["runnerId"])


async def test_nothing_is_too_long_to_arrive(service: Service) -> None:
    content, text = bytes(range(256)) * 1000, "ä'\"\\" + "x" * 50_000
    files = [{"path": "x", "content": b64encode(content).decode()}]
    script = 'sha1sum <x; printf %s "$NAME" | wc -c; wc -c; : ' + "y" * 50_000
    told = await run(service, script, files=files, stdin="z" * 50_000, environment={"NAME": text})
    assert told["stdout"].split() == [sha1(content).hexdigest(), "-", str(len(text.encode())), "50000"]


async def test_files_input_and_variables_arrive(service: Service) -> None:
    files = [{"path": "in/"}, {"path": "in/x", "content": b64encode(b"from the file\n").decode()}]
    told = await run(service, 'cat in/x -; echo "$V"', files=files, stdin="from stdin ä\n", environment={"V": "it's"})
    assert told["stdout"] == "from the file\nfrom stdin ä\nit's\n"


async def test_much_input_arrives_and_ends(service: Service) -> None:
    told = await run(service, "wc -c", stdin="x" * 3_000_000)
    assert told["stdout"].strip() == "3000000"


async def test_long_texts_arrive_whole_wherever_they_stand(service: Service) -> None:
    content = bytes(range(256)) * 400
    files = [{"path": "x", "content": b64encode(content).decode()}, {"path": "y", "content": "eQ=="}]
    told = await run(
        service,
        f"wc -c < x; cat y; echo ${{#V}}; wc -c # {'ü' * 20_000}",
        files=files,
        environment={"V": "v" * 50_000},
        stdin="ä" * 30_000,
    )
    assert told["stdout"].split() == ["102400", "y50000", "60000"]
    body = {"executionEnvironmentId": 1, "command": "true", "files": [{"path": "x", "content": "?" * 50_000}]}
    refused = await service.http.post("/runs", json=body)
    assert (refused.status_code, refused.json()["message"].split(":")[0]) == (400, "files.0.content")


async def test_each_run_has_a_runner_of_its_own(service: Service) -> None:
    first, second = await run(service, "touch there; ls"), await run(service, "ls")
    assert (first["stdout"], second["stdout"]) == ("there\n", "")
    assert first["runnerId"] != second["runnerId"]


async def test_a_run_out_of_time_is_answered_and_destroyed(service: Service) -> None:
    told = await run(service, "echo begun; sleep 600", timeLimit=3)
    assert (told["outcome"], told["exitCode"], told["stdout"]) == ("timeout", None, "begun\n")
    await destroyed(service, told["runnerId"])


async def test_a_flood_is_cut_at_the_limit_and_the_rest_dropped(service: Service) -> None:
    told = await run(service, "yes | head -c 3000000; echo short >&2", outputLimit=1000)
    assert told["outcome"] == "exit"
    assert (told["stdout"], told["stdoutTruncated"]) == ("y\n" * 500, True)
    assert (told["stderr"], told["stderrTruncated"]) == ("short\n", False)


async def test_an_endless_flood_ends_with_its_time(service: Service) -> None:
    told = await run(service, "yes", outputLimit=10, timeLimit=3)
    assert (told["outcome"], told["stdout"]) == ("timeout", "y\n" * 5)
    await destroyed(service, told["runnerId"])


async def test_output_is_text_with_what_is_none_replaced_but_no_half_character_at_the_cut(service: Service) -> None:
    told = await run(service, r"printf 'a\xff\x00'; printf 'aää' >&2", outputLimit=4)
    assert (told["stdout"], told["stdoutTruncated"]) == ("a\ufffd\0", False)
    assert (told["stderr"], told["stderrTruncated"]) == ("aä", True)


async def test_a_client_that_hangs_up_ends_its_run(service: Service) -> None:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, service, "sleep 600")
            await until(lambda: service.executions.running == 1)
            nursery.cancel_scope.cancel()
    await until(lambda: service.used() == 0 and service.executions.running == 0)
    await until(lambda: len(service.shell.claims.list()) == 1)  # the next one for the pool


async def test_a_run_waits_for_a_runner_and_gives_up_with_a_hint(tmp_path: Path) -> None:
    async with open_service(tmp_path, claim_wait=0.1) as service:
        service.executor.refusal = PlacementFailed("no room")
        await service.put(1)
        answer = await service.http.post("/runs", json={"executionEnvironmentId": 1, "command": "true"})
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
        assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"command": "a\0b"}, "NUL"),
        ({"command": "x" * 200_000}, "131071"),
        ({"environment": {"a=b": "c"}}, "a=b"),
        ({"files": [{"path": "a\0b"}]}, "NUL"),
        ({"files": [{"path": "x", "content": "?"}]}, "files.0.content"),
        ({"timeLimit": -1}, "timeLimit"),
        ({"outputLimit": 10**9}, "outputLimit"),
        ({"stdin": 5}, "stdin"),
        ({"networkAccess": True}, "networkAccess"),
    ],
)
async def test_what_cannot_be_right_is_refused_before_a_runner_is_taken(
    service: Service, wrong: dict[str, object], word: str
) -> None:
    await until(lambda: len(service.shell.claims.list()) == 1)
    idle = service.shell.claims.list()
    answer = await service.http.post("/runs", json={"executionEnvironmentId": 1, "command": "true"} | wrong)
    assert (answer.status_code, set(answer.json())) == (400, {"message"}), answer.text
    assert word in answer.json()["message"]
    assert service.shell.claims.list() == idle


async def test_an_unknown_environment_is_404(service: Service) -> None:
    answer = await service.http.post("/runs", json={"executionEnvironmentId": 9, "command": "true"})
    assert (answer.status_code, set(answer.json())) == (404, {"message"})


async def test_files_that_cannot_be_copied_fail_the_run_and_destroy_the_runner(service: Service) -> None:
    files = [{"path": "/proc/nothing/here", "content": ""}]
    body = {"executionEnvironmentId": 1, "command": "true", "files": files}
    answer = await service.http.post("/runs", json=body)
    assert (answer.status_code, answer.json()["errorCode"]) == (500, "UNKNOWN")
    assert "file copy failed" in answer.json()["message"]
    assert service.used() == 0


async def test_a_run_that_the_shutdown_ends_can_be_repeated_elsewhere(service: Service) -> None:
    answers: list[httpx.Response] = []

    async def ask() -> None:
        body = {"executionEnvironmentId": 1, "command": "sleep 600"}
        answers.append(await service.http.post("/runs", json=body))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: service.executions.running == 1)
            await service.executions.drain(0)
    assert (answers[0].status_code, answers[0].json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
    assert "Retry-After" in answers[0].headers
    assert service.used() == 0


@dataclass
class FragileExecutor(PlainExecutor):
    """Its first runners end in the moment in which they are used."""

    deaths: int = 1

    def execute(self, allocation: Allocation, command: Command) -> Any:
        return self._execute(allocation, command)

    @asynccontextmanager
    async def _execute(self, allocation: Allocation, command: Command) -> AsyncIterator[Process]:
        if self.deaths:
            self.deaths -= 1
            self.remove(allocation.job)
            raise AllocationGone("it has just ended")
        async with super().execute(allocation, command) as process:
            yield process


@pytest.mark.parametrize(("deaths", "status"), [(1, 200), (3, 500)])
async def test_a_runner_that_ends_before_the_command_began_is_replaced(
    tmp_path: Path, deaths: int, status: int
) -> None:
    executor = FragileExecutor(root=tmp_path / "workspaces", deaths=deaths)
    async with open_service(tmp_path, executor=executor) as service:
        await service.put(2)
        body = {"executionEnvironmentId": 1, "command": "cat x", "files": [{"path": "x", "content": "eA=="}]}
        answer = await service.http.post("/runs", json=body)
        assert answer.status_code == status, answer.text
        told = answer.json()
        assert told["stdout"] == "x" if status == 200 else told["errorCode"] == "NOMAD_OVERLOAD"
        assert service.used() == 0


@dataclass
class MeasuringExecutor(PlainExecutor):
    """Each look costs a second."""

    looks: int = 0

    def usage(self, allocation: Allocation) -> Usage:
        self.looks += 1
        return Usage(10.0 + self.looks, 1234)


async def test_a_run_tells_what_it_used_itself(tmp_path: Path) -> None:
    async with open_service(tmp_path, executor=MeasuringExecutor(root=tmp_path / "workspaces")) as service:
        await service.put(1)
        assert (await run(service, "true"))["resources"] == {"cpuSeconds": 1.0, "memoryPeakBytes": 1234}


async def test_runs_wait_in_turn_with_claims(tmp_path: Path) -> None:
    async with open_service(tmp_path, claim_wait=80) as service:
        service.executor.held = True
        service.http.timeout = httpx.Timeout(80)
        await service.put(1)
        order: list[str] = []

        async def ask(name: str) -> None:
            order.append((await run(service, f"echo {name}"))["stdout"].strip())

        with trio.fail_after(80):
            async with trio.open_nursery() as nursery:
                for number, name in enumerate("abc"):
                    nursery.start_soon(ask, name)
                    await until(lambda number=number: _waiting(service) == number + 1)  # type: ignore[misc]
                for position in range(3):
                    await until(lambda: _pending(service) is not None)
                    service.executor.run(_pending(service) or JobId(""))
                    await until(lambda position=position: len(order) == position + 1)  # type: ignore[misc]
        assert order == ["a", "b", "c"]


def _pending(service: Service) -> JobId | None:
    """A job that has never run: one that has may still be on its way out."""
    jobs = (job for job in service.executor.jobs if service.executor.newest(job).started is None)
    return next(jobs, None)


def _waiting(service: Service) -> int:
    return service.shell.environments.statistics()[EnvironmentId(1)].waiting

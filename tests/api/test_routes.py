"""Statuses and bodies of every route, as the contract has them."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from websockets.exceptions import InvalidStatus

from poseidon.api.server import ServerLimits
from poseidon.core.model import Environment, EnvironmentId
from poseidon.errors import PlacementFailed, StoreError
from poseidon.executors.base import StreamFigures
from poseidon.runners.facts import Ailment, ExecutorFacts, PoolStatistics
from tests.api.service import VERSION, Service, connected, next_of, open_service, read, until
from tests.fakes.plain import PlainExecutor

ROUTES = [
    ("GET", "/statistics/execution-environments"),
    ("GET", "/execution-environments"),
    ("GET", "/execution-environments/1"),
    ("PUT", "/execution-environments/1"),
    ("DELETE", "/execution-environments/1"),
    ("POST", "/runners"),
    ("GET", "/runners"),
    ("GET", "/runners/x"),
    ("DELETE", "/runners/x"),
    ("PATCH", "/runners/x/files"),
    ("GET", "/runners/x/files"),
    ("GET", "/runners/x/files/raw"),
    ("POST", "/runners/x/execute"),
    ("GET", "/runners/x/websocket"),
    ("POST", "/runs"),
    ("GET", "/status"),
    ("GET", "/openapi.json"),
    ("GET", "/websocket-schema.json"),
    ("GET", "/docs"),
    ("GET", "/docs/start.js"),
    ("GET", "/docs/x"),
]
ENVIRONMENT = {
    "prewarmingPoolSize": 1,
    "cpuLimit": 20,
    "memoryLimit": 100,
    "image": "plain",
    "networkAccess": False,
    "exposedPorts": [42, 1337],
}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_service(tmp_path) as opened:
        yield opened


async def message_of(answer: httpx.Response, status: int) -> str:
    """The message of a client's error."""
    keys = set(answer.json()) - ({"runner"} if status == 410 else set())
    assert (answer.status_code, keys) == (status, {"message"}), answer.text
    return str(answer.json()["message"])


# The service as a whole


async def test_health_is_204_or_503_with_what_ails(service: Service) -> None:
    answer = await service.http.get("/health")
    assert (answer.status_code, answer.content, "Content-Type" in answer.headers) == (204, b"", False)
    service.overview.ails = Ailment("PREWARMING_POOL_DEPLETING", "too few runners")
    answer = await service.http.get("/health")
    assert answer.status_code == 503
    assert answer.json() == {"message": "too few runners", "errorCode": "PREWARMING_POOL_DEPLETING"}


async def test_the_version_is_a_json_string(service: Service) -> None:
    answer = await service.http.get("/version")
    assert (answer.status_code, answer.text) == (200, f'"{VERSION}"')
    assert answer.headers["Content-Type"] == "application/json"


async def test_statistics_are_keyed_by_environment(service: Service) -> None:
    assert (await service.http.get("/statistics/execution-environments")).json() == {}
    await service.put(2, identity=7)
    await until(lambda: next(iter(service.shell.environments.statistics().values())).idle == 2)
    answer = await service.http.get("/statistics/execution-environments")
    assert answer.json() == {"7": {"id": 7, "prewarmingPoolSize": 2, "idleRunners": 2, "usedRunners": 0}}


async def test_the_status_tells_everything(service: Service) -> None:
    await service.put(2)
    await service.claim()
    await until(lambda: next(iter(service.shell.environments.statistics().values())).idle == 2)
    status = (await service.http.get("/status")).json()
    assert status["version"] == VERSION
    assert status["started_at"] == "2027-01-15T08:00:00.500Z"
    assert status["draining"] is False
    pool = {"id": 1, "image": "plain", "wanted": 2, "idle": 2, "starting": 0, "used": 1, "waiting": 0}
    assert status["environments"] == [pool | {"status": "ok", "message": ""}]
    assert status["runners"] == {"idle": 2, "used": 1, "starting": 0}
    assert status["executors"] == [
        {"name": "local", "reachable": True, "trouble": None, "listed": True, "stream": None}
    ]
    assert status["abilities"] == [{"executor": "local", "name": "memory", "holds": True, "how": "by the test"}]
    assert {"name", "state", "since", "crashes", "error"} == set(status["services"][0])
    assert isinstance(status["store"], dict)


async def test_the_status_tells_how_fresh_the_news_of_a_cluster_are(service: Service) -> None:
    stream = StreamFigures(connected=True, age=1.23456, lag=None, index=77, lines=3, events=2, breaks=1)
    service.overview.runs_by = (ExecutorFacts("nomad", False, "nobody answers", True, stream=stream),)
    [told] = (await service.http.get("/status")).json()["executors"]
    assert (told["name"], told["reachable"], told["trouble"]) == ("nomad", False, "nobody answers")
    figures = {"connected": True, "age": 1.235, "lag": None, "index": 77, "lines": 3, "events": 2, "breaks": 1}
    assert told["stream"] == figures


# Environments


async def test_an_environment_is_put_listed_and_deleted(service: Service) -> None:
    answer = await service.http.put("/execution-environments/42", json=ENVIRONMENT | {"id": 3})
    assert (answer.status_code, answer.content, answer.headers["Content-Length"]) == (201, b"", "0")
    answer = await service.http.put("/execution-environments/42", json=ENVIRONMENT)
    assert (answer.status_code, answer.content, "Content-Type" in answer.headers) == (204, b"", False)
    told = (await service.http.get("/execution-environments/42")).json()
    assert {**told, **ENVIRONMENT, "id": 42} == told
    answer = await service.http.get("/execution-environments?fetch=true")
    [listed] = answer.json()["executionEnvironments"]
    assert {**listed, **ENVIRONMENT, "id": 42} == listed
    assert (await service.http.delete("/execution-environments/42")).status_code == 204
    await message_of(await service.http.delete("/execution-environments/42"), 404)
    await message_of(await service.http.get("/execution-environments/42"), 404)


async def test_no_environments_are_an_empty_list(service: Service) -> None:
    assert (await service.http.get("/execution-environments")).text == '{"executionEnvironments":[]}'


async def test_ports_are_never_null(service: Service) -> None:
    await service.http.put("/execution-environments/1", json={"image": "plain", "exposedPorts": None})
    assert (await service.http.get("/execution-environments/1")).json()["exposedPorts"] == []


async def test_whoever_names_no_image_gets_the_executors_own(service: Service) -> None:
    answer = await service.http.put("/execution-environments/1", json={"prewarmingPoolSize": 1})
    assert answer.status_code == 201
    assert (await service.http.get("/execution-environments/1")).json()["image"] == ""
    assert (await service.run(await service.claim(), "echo here")).text() == "here\n"


async def test_the_same_put_again_keeps_used_runners(service: Service) -> None:
    await service.put(1)
    runner = await service.claim()
    await service.put(1)
    await service.put(3)
    assert (await service.run(runner, "echo here")).text() == "here\n"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prewarmingPoolSize": -1}, "prewarmingPoolSize"),
        ({"prewarmingPoolSize": 1.5}, "prewarmingPoolSize"),
        ({"cpuLimit": "20"}, "cpuLimit"),
        ({"memoryLimit": True}, "memoryLimit"),
        ({"exposedPorts": [65536]}, "exposedPorts.0"),
        ({"exposedPorts": 80}, "exposedPorts"),
        ({"networkAccess": 1}, "networkAccess"),
        ({"networkAccess": True}, "network"),
        ({"image": 5}, "image"),
        ({"image": "two\nlines"}, "image"),
        ({"image": "a\0b"}, "image"),
        ({"image": " x"}, "image"),
        ({"image": "x" * 2000}, "image"),
        ({"prewarmingPoolSize": 2**31}, "prewarmingPoolSize"),
        ({"cpuLimit": -1}, "cpuLimit"),
        ({"memoryLimit": 2**63}, "memoryLimit"),
        ({"memoryLimit": 10**30}, "memoryLimit"),
        ({"exposedPorts": [0]}, "exposedPorts.0"),
        ({"exposedPorts": [80, -1]}, "exposedPorts.1"),
        ({"exposedPorts": ["80"]}, "exposedPorts.0"),
        ({"exposedPorts": [80, 81, 80]}, "exposedPorts"),
    ],
)
async def test_a_wrong_environment_is_400_and_names_the_field(
    service: Service, change: dict[str, Any], word: str
) -> None:
    answer = await service.http.put("/execution-environments/1", json=ENVIRONMENT | change)
    assert word in await message_of(answer, 400)
    assert (await service.http.get("/execution-environments/1")).status_code == 404


async def test_ids_are_digits(service: Service) -> None:
    for path in ("abc", "-1", "1.0", "٣", "1x", ""):
        answer = await service.http.put(f"/execution-environments/{path}", json=ENVIRONMENT)
        assert await message_of(answer, 404) == "there is no such path", path
    path = f"/execution-environments/{'0' * 40}7"
    assert (await service.http.put(path, json=ENVIRONMENT)).status_code == 201
    assert (await service.http.get("/execution-environments/7")).status_code == 200
    for digits in ("9223372036854775808", "9" * 5000):
        answer = await service.http.put(f"/execution-environments/{digits}", json=ENVIRONMENT)
        assert "exceed" in await message_of(answer, 400)
    assert (await service.http.put("/execution-environments/9223372036854775807", json=ENVIRONMENT)).status_code == 201


async def test_a_bad_flag_is_400_and_named(service: Service) -> None:
    for method, path, flag in (
        ("GET", "/execution-environments?fetch=yes", "fetch"),
        ("GET", "/execution-environments/1?fetch=bla", "fetch"),
        ("PUT", "/execution-environments/1?wait=5", "wait"),
        ("DELETE", "/runners/x?any=all", "any"),
    ):
        assert flag in await message_of(await service.http.request(method, path, json=ENVIRONMENT), 400)
    assert (await service.http.get("/execution-environments/1")).status_code == 404


async def test_a_put_answers_at_once_or_when_the_pool_is_filled(service: Service) -> None:
    service.executor.held = True
    assert (await service.http.put("/execution-environments/1", json=ENVIRONMENT)).status_code == 201
    answered: list[int] = []

    async def put() -> None:
        answered.append((await service.http.put("/execution-environments/1?wait=true", json=change)).status_code)

    change = ENVIRONMENT | {"prewarmingPoolSize": 2, "image": "another"}
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await until(lambda: len(service.executor.jobs) == 2 and len(service.executor.started) == 3)
            first, second = service.executor.jobs
            service.executor.run(first)
            await until(lambda: _pool(service).idle == 1)
            assert answered == []
            service.executor.run(second)
    assert answered == [204]


async def test_a_put_whose_pool_is_not_filled_in_time_says_why(tmp_path: Path) -> None:
    async with open_service(tmp_path, fill_wait=0.5) as service:
        service.executor.refusal = PlacementFailed("memory exhausted on 3 nodes")
        await service.http.put("/execution-environments/1", json=ENVIRONMENT)
        while (await service.http.get("/execution-environments/1")).json()["status"] != "failing":
            await trio.sleep(0.01)
        answer = await service.http.put("/execution-environments/1?wait=true", json=ENVIRONMENT)
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
        assert "memory exhausted on 3 nodes" in answer.json()["message"]
        assert int(answer.headers["Retry-After"]) > 0
        told = (await service.http.get("/execution-environments/1")).json()
        assert (told["status"], told["message"]) == ("failing", "memory exhausted on 3 nodes")


async def test_a_put_that_waits_learns_that_its_environment_was_removed(service: Service) -> None:
    service.executor.held = True
    answers: list[httpx.Response] = []

    async def put() -> None:
        answers.append(await service.http.put("/execution-environments/1?wait=true", json=ENVIRONMENT))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await until(lambda: len(service.executor.started) == 1)
            await service.http.delete("/execution-environments/1")
    assert answers[0].status_code == 404


async def test_concurrent_puts_take_turns_and_the_last_one_counts(tmp_path: Path) -> None:
    executor = SlowlyKeepingExecutor(root=tmp_path / "workspaces")
    async with open_service(tmp_path, executor=executor) as service:
        answers: list[int] = []

        async def put(number: int) -> None:
            body = ENVIRONMENT | {"prewarmingPoolSize": 0, "image": f"image-{number}"}
            answers.append((await service.http.put("/execution-environments/1", json=body)).status_code)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(put, number)
        assert sorted(answers) == [201] + [204] * 7
        assert executor.most == 1
        told = (await service.http.get("/execution-environments/1")).json()
        assert told["image"] == executor.templates[EnvironmentId(1)].image
    async with open_service(tmp_path, executor=executor) as service:
        assert (await service.http.get("/execution-environments/1")).json()["image"] == told["image"]


def _pool(service: Service) -> PoolStatistics:
    return service.shell.environments.statistics()[EnvironmentId(1)]


@dataclass
class KeepingExecutor(PlainExecutor):
    """One that keeps templates."""

    templates: dict[EnvironmentId, Environment] = field(default_factory=dict)

    async def put_template(self, environment: Environment) -> None:
        self.templates[environment.id] = environment

    async def remove_template(self, environment: EnvironmentId) -> None:
        self.templates.pop(environment, None)

    async def environments(self) -> Sequence[Environment]:
        await self._answer()
        return list(self.templates.values())


@dataclass
class SlowlyKeepingExecutor(KeepingExecutor):
    """One that takes its time, and counts how many talk to it at once."""

    busy: int = 0
    most: int = 0

    async def put_template(self, environment: Environment) -> None:
        self.busy += 1
        self.most = max(self.most, self.busy)
        await trio.sleep(0.01)
        await super().put_template(environment)
        self.busy -= 1


async def test_an_environment_that_others_put_into_the_executor_is_there_once_it_is_fetched(tmp_path: Path) -> None:
    executor = KeepingExecutor(root=tmp_path / "workspaces")
    async with open_service(tmp_path, executor=executor) as service:
        http = service.http
        assert (await http.get("/execution-environments?fetch=1")).json() == {"executionEnvironments": []}
        for number in (7, 8):
            executor.templates[EnvironmentId(number)] = Environment(EnvironmentId(number), "theirs", 0)
        assert (await http.get("/execution-environments/7")).status_code == 404
        assert (await http.get("/execution-environments/7?fetch=false")).status_code == 404
        assert (await http.get("/execution-environments/7?fetch=true")).json()["image"] == "theirs"
        assert (await http.get("/execution-environments/9?fetch=true")).status_code == 404
        listed = (await http.get("/execution-environments")).json()["executionEnvironments"]
        assert [each["id"] for each in listed] == [7, 8]
        executor.reachable = False
        answer = await http.get("/execution-environments?fetch=true")
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_UNREACHABLE")
        assert (await http.get("/execution-environments")).status_code == 200


# Runners


async def test_a_runner_is_claimed_listed_and_deleted(service: Service) -> None:
    await service.put(1)
    answer = await service.http.post("/runners", json={"executionEnvironmentId": 1, "inactivityTimeout": 60})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/json"
    runner = answer.json()["runnerId"]
    assert answer.json() == {"runnerId": runner, "mappedPorts": []}
    listed = {each["id"]: each for each in (await service.http.get("/runners")).json()["runners"]}
    shown = (await service.http.get(f"/runners/{runner}")).json()
    assert shown == listed[runner] | {"executions": {"count": 0, "lastOutcome": None}}
    times = ["readyAt", "claimedAt", "expiresAt"]
    assert list(listed[runner]) == ["id", "environmentId", "phase", "node", "allocation", "job", *times]
    assert (shown["phase"], shown["environmentId"], shown["node"]) == ("used", 1, "here")
    assert shown["expiresAt"] > shown["claimedAt"] >= shown["readyAt"]
    assert (await service.http.delete(f"/runners/{runner}")).status_code == 204
    shown = (await service.http.get(f"/runners/{runner}")).json()
    assert (shown["phase"], shown["reason"]) == ("gone", "released")
    assert shown["goneAt"].endswith("Z")


async def test_a_runner_that_is_not_in_use_is_410_on_every_route(service: Service) -> None:
    await service.put(2)
    gone = await service.claim()
    await service.http.delete(f"/runners/{gone}")
    await until(lambda: len(service.shell.claims.list()) == 2)
    idle = (await service.http.get("/runners")).json()["runners"][0]["id"]
    for runner in ("n0n-3x1st1ng-1d", idle, gone):
        for method, path in (("DELETE", ""), ("PATCH", "/files"), ("POST", "/execute"), ("GET", "/websocket")):
            answer = await service.http.request(method, f"/runners/{runner}{path}", content=b"not even JSON")
            assert "no runner found with this id" in await message_of(answer, 410), (method, path)
    assert (await service.http.get("/runners/n0n-3x1st1ng-1d")).status_code == 404
    assert (await service.http.get(f"/runners/{idle}")).json()["phase"] == "idle"


async def test_410_tells_the_reason_even_after_a_restart(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        await service.put(1)
        runner = await service.claim()
        await service.http.delete(f"/runners/{runner}")
    async with open_service(tmp_path, executor=service.executor) as service:
        answer = await service.http.post(f"/runners/{runner}/execute", json={})
        assert await message_of(answer, 410) == "no runner found with this id (released)"
        known = answer.json()["runner"]
        assert (known["id"], known["phase"], known["reason"], known["node"]) == (runner, "gone", "released", "here")
        assert known["goneAt"] >= known["claimedAt"] >= known["readyAt"]
        assert known["job"] and known["allocation"] and known["environmentId"] == 1
        unknown = await service.http.post("/runners/n0n-3x1st1ng-1d/execute", json={})
        assert unknown.json() == {"message": "no runner found with this id"}
        with pytest.raises(InvalidStatus) as refused:
            async with connected(f"{service.url}/runners/{runner}/websocket".replace("http:", "ws:")):
                pass
        assert json.loads(bytes(refused.value.response.body))["message"].endswith("(released)")


async def test_a_runner_tells_what_ran_in_it_also_when_it_is_gone(service: Service) -> None:
    await service.put(1)
    runner = await service.claim()
    for command in ("true", "exit 3"):
        await service.run(runner, command)
    await service.execute(runner, "true")
    expected = {"count": 3, "lastOutcome": "exit"}
    told: list[dict[str, Any]] = []
    with trio.fail_after(20):
        while told[-1:] != [expected]:  # their ends are written in the background
            told.append((await service.http.get(f"/runners/{runner}")).json()["executions"])
    await service.http.delete(f"/runners/{runner}")
    assert (await service.http.get(f"/runners/{runner}")).json()["executions"]["count"] == 3


async def test_a_large_body_for_a_gone_runner_is_410_and_the_connection_goes_on(service: Service) -> None:
    body = {"copy": [{"path": "x", "content": "A" * 800_000}]}
    for _ in range(3):
        assert (await service.http.patch("/runners/gone/files", json=body)).status_code == 410
        assert (await service.http.get("/health")).status_code == 204


async def test_a_runner_is_deleted_though_the_disk_is_full(service: Service) -> None:
    await service.put(1)
    runner = await service.claim()
    connection = service.store._writer._connection.connection
    await service.store.write(lambda taken: taken.exec_driver_sql("PRAGMA max_page_count = 1"))
    large = service.store.submit(
        lambda taken: taken.exec_driver_sql("INSERT INTO meta VALUES ('x', zeroblob(1000000))")
    )
    with pytest.raises(StoreError, match="full"):  # and all that follows has to wait for it
        await large.wait()
    assert (await service.http.delete(f"/runners/{runner}")).status_code == 204
    assert (await service.http.delete(f"/runners/{runner}")).status_code == 410
    connection.execute("PRAGMA max_page_count = 1000000")
    await service.store.flush()
    with trio.fail_after(20):
        while (await service.http.get(f"/runners/{runner}")).json()["phase"] != "gone":
            await trio.sleep(0.01)
    await until(lambda: runner not in service.executor.jobs)


async def test_an_operator_stops_idle_runners_too(service: Service) -> None:
    await service.put(1)
    await until(lambda: len(service.shell.claims.list()) == 1)
    idle = (await service.http.get("/runners")).json()["runners"][0]["id"]
    assert (await service.http.delete(f"/runners/{idle}?any=true")).status_code == 204
    assert (await service.http.get(f"/runners/{idle}")).json()["phase"] == "gone"
    assert (await service.http.delete(f"/runners/{idle}?any=true")).status_code == 410


async def test_an_unknown_environment_is_404_with_a_message(service: Service) -> None:
    for body in (b'{"executionEnvironmentId": 9999}', b"{}", b"null", b'{"executionEnvironmentId": -5}'):
        answer = await service.http.post("/runners", content=body)
        assert (await message_of(answer, 404)).endswith("execution environment not found")


async def test_an_empty_pool_is_an_overload_that_says_when_to_come_back(tmp_path: Path) -> None:
    async with open_service(tmp_path, claim_wait=0.1) as service:
        service.executor.refusal = PlacementFailed("no room")
        await service.put(1)
        answer = await service.http.post("/runners", json={"executionEnvironmentId": 1})
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
        assert int(answer.headers["Retry-After"]) > 0


async def test_a_claim_that_waits_while_the_service_drains_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with open_service(tmp_path, claim_wait=60) as service:
        service.executor.held = True
        await service.put(1)
        answers: list[httpx.Response] = []

        async def claim() -> None:
            answers.append(await service.http.post("/runners", json={"executionEnvironmentId": 1}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim)
            await until(lambda: service.shell.environments.statistics()[EnvironmentId(1)].waiting == 1)
            service.shell.claims.drain()
        await claim()
        for answer in answers:
            assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
            assert int(answer.headers["Retry-After"]) > 0


async def test_a_claim_that_its_client_gives_up_leaves_no_runner_behind(tmp_path: Path) -> None:
    async with open_service(tmp_path, claim_wait=20) as service:
        service.executor.held = True
        await service.put(1)
        with trio.move_on_after(0.2):
            await service.claim()
        await until(lambda: service.shell.environments.statistics()[1].waiting == 0)  # type: ignore[index]
        service.executor.held = False
        for job in list(service.executor.jobs):
            service.executor.run(job)
        await until(lambda: service.shell.environments.statistics()[1].idle == 1)  # type: ignore[index]
        assert service.used() == 0


async def test_a_negative_timeout_is_400(service: Service) -> None:
    answer = await service.http.post("/runners", json={"executionEnvironmentId": 1, "inactivityTimeout": -1})
    assert "inactivityTimeout" in await message_of(answer, 400)


# Bodies


@pytest.mark.parametrize(
    "raw",
    [
        b'{"EXECUTIONENVIRONMENTID": 1, "inactivitytimeout": null, "unknown": {"x": [1]}}',
        b' \n{"executionEnvironmentId": 1} and what follows',
        b'{"executionEnvironmentId": 5, "executionEnvironmentId": 1}',
        b'{"executionEnvironmentId": 1, "x": "\xff", "y": "\\ud800"}',
    ],
)
async def test_bodies_are_read_as_tolerantly_as_ever(service: Service, raw: bytes) -> None:
    await service.put(1)
    assert (await service.http.post("/runners", content=raw)).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [b"", b"nonsense", b"{", b'"x"', b"[]", b"7", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"NaN", b"{'a': 1}"]
    + [b'{"executionEnvironmentId": %s}' % value for value in (b"1.0", b"1e0", b'"1"', b"true", b"NaN", b"[]")],
)
async def test_a_wrong_body_is_400_with_a_message(service: Service, raw: bytes) -> None:
    for method, path in (("POST", "/runners"), ("PUT", "/execution-environments/1")):
        if path == "/runners" or b"execution" not in raw:
            assert len(await message_of(await service.http.request(method, path, content=raw), 400)) < 300


async def test_a_body_above_the_limit_is_413(tmp_path: Path) -> None:
    async with open_service(tmp_path, limits=ServerLimits(body=100_000)) as service:
        await service.put(1)
        runner = await service.claim()
        answer = await service.patch(runner, {"x": bytes(200_000)})
        assert await message_of(answer, 413) == "the body is larger than 100000 bytes, see server.max_body_mb"
        assert (await service.patch(runner, {"x": bytes(50_000)})).status_code == 204


# Routes and methods


async def test_unknown_paths_are_404_with_a_message(service: Service) -> None:
    for path in ("/nothing", "/runners/", "/runners/x/y", "/health/", "//health", "/../health", "/runners/a%2Fb/files"):
        answer = await service.http.get(service.url + path)
        assert await message_of(answer, 404) == "there is no such path", path


async def test_wrong_methods_are_405_with_a_message(service: Service) -> None:
    for method, path in (
        ("POST", "/health"),
        ("PUT", "/runners"),
        ("OPTIONS", "/runners"),
        ("DELETE", "/runners/x/execute"),
        ("POST", "/statistics/execution-environments"),
    ):
        answer = await service.http.request(method, path)
        assert await message_of(answer, 405)
        assert answer.headers["Allow"]


async def test_every_route_but_health_and_version_wants_the_token(tmp_path: Path) -> None:
    async with open_service(tmp_path, token="secret") as service:
        await service.put(1)
        runner = await service.claim()
        url = await service.execute(runner, "true")
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as stranger:
            for headers in ({}, {"Poseidon-Token": "wrong"}, {"Poseidon-Token": b"\xff"}, {"Poseidon-Token": ""}):
                for method, path in ROUTES:
                    answer = await stranger.request(method, path, headers=headers)  # type: ignore[arg-type]
                    assert (answer.status_code, answer.content) == (401, b""), path
                assert (await stranger.post("/health", headers=headers)).status_code == 401  # type: ignore[arg-type]
            assert (await stranger.get("/health")).status_code == 204
            assert (await stranger.get("/version")).status_code == 200
            assert (await stranger.get("/nothing")).status_code == 404
            assert (await stranger.put("/runners")).status_code == 401
        with pytest.raises(InvalidStatus) as refused:
            async with connected(url):
                pass
        assert refused.value.response.status_code == 401
        async with connected(url, token="secret") as socket:
            assert (await read(socket)).code == 1000


async def test_a_token_may_be_of_any_characters(tmp_path: Path) -> None:
    async with open_service(tmp_path, token="gehört→dazu") as service:
        for given, status in (("gehört→dazu", 200), ("gehört→daz", 401)):
            answer = await service.http.get("/runners", headers={b"Poseidon-Token": given.encode()})
            assert answer.status_code == status


async def test_the_routes_are_all_in_the_list(service: Service) -> None:
    """So that no new one escapes the test of the token."""
    from poseidon.api.app import create_app
    from poseidon.api.parts import ApiSettings, Parts
    from poseidon.runners.files import Files

    parts = Parts(
        service.shell.environments,
        service.shell.claims,
        service.executions,
        Files(service.shell.claims),
        service.overview,
    )
    app = create_app(parts, ApiSettings())
    known = {
        (
            method,
            rule.rule.removeprefix("/api/v1")
            .replace("<runner>", "x")
            .replace("<digits:identity>", "1")
            .replace("<asset>", "x"),
        )
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD"}
    }
    assert known == {*ROUTES, ("GET", "/health"), ("GET", "/version")}


async def test_a_fault_is_500_without_a_traceback(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.overview, "services", None)
    answer = await service.http.get("/status")
    assert answer.status_code == 500
    assert answer.json() == {"message": "internal error", "errorCode": "UNKNOWN"}


async def test_a_fault_behind_a_websocket_closes_it_with_1011(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poseidon.api.executions import _Client

    await service.put(1)
    url = await service.execute(await service.claim(), "echo x; sleep 60")
    monkeypatch.setattr(_Client, "output", None)
    async with connected(url) as socket:
        assert (await read(socket)).code == 1011
    await until(lambda: service.executions.running == 0)


async def test_an_answer_says_no_more_than_it_must(service: Service) -> None:
    answer = await service.http.get("/version")
    assert set(answer.headers) == {"content-length", "content-type"}


async def test_each_request_is_logged_once(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    await service.put(1)
    url = await service.execute(await service.claim(), "true")
    capsys.readouterr()
    await service.http.get("/runners/evil%0Apath", headers={"User-Agent": "me"})
    async with connected(url) as socket:
        await next_of(socket, "exit")
    await until(lambda: service.executions.running == 0)
    lines = capsys.readouterr().out.splitlines()
    assert sum("request answered" in line for line in lines) == 1
    assert sum("websocket ended" in line for line in lines) == 1
    assert any("code=404" in line and "user_agent=me" in line for line in lines)

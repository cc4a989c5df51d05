"""The acceptance list: claiming and giving back."""

from uuid import UUID

import pytest
import trio

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.codeocean_wire import EnvironmentNotFound

UNKNOWN = "n0n-3x1st1ng-1d"
NOWHERE = 9999


@pytest.mark.both
async def test_a_claim_is_200_with_an_id(client: CodeOcean) -> None:
    answer = await client.request("POST", "/runners", {"executionEnvironmentId": 1, "inactivityTimeout": 10})
    assert answer.status_code == 200
    assert answer.json()["runnerId"]
    assert answer.json()["mappedPorts"] == []
    await client.release(answer.json()["runnerId"])


@pytest.mark.both
async def test_two_claims_are_two_runners(client: CodeOcean) -> None:
    first, second = await client.claim(1), await client.claim(1)
    assert first != second
    await client.release(first)
    await client.release(second)


@pytest.mark.both
async def test_ids_are_random(client: CodeOcean, runner: str) -> None:
    number, _, random = runner.partition("-")
    assert number == "1"
    assert UUID(random).version == 4
    answer = await client.request("POST", f"/runners/{runner}/execute", {"command": "true"})
    assert UUID(answer.json()["websocketUrl"].partition("executionID=")[2]).version == 4


@pytest.mark.both
async def test_a_claim_without_a_body_is_400(client: CodeOcean) -> None:
    answer = await client.http.post("/runners")
    assert answer.status_code == 400
    assert answer.json()["message"]


@pytest.mark.both
async def test_a_claim_in_an_unknown_environment_is_404_with_a_message(client: CodeOcean) -> None:
    with pytest.raises(EnvironmentNotFound):
        await client.claim(NOWHERE)
    answer = await client.request("POST", "/runners", {"executionEnvironmentId": NOWHERE})
    assert answer.json()["message"].endswith("execution environment not found")


@pytest.mark.both
async def test_a_runner_is_deleted_once_and_then_410(client: CodeOcean) -> None:
    runner = await client.claim(1)
    assert (await client.request("DELETE", f"/runners/{runner}")).status_code == 204
    assert (await client.request("DELETE", f"/runners/{runner}")).status_code == 410


@pytest.mark.both
async def test_an_unknown_runner_is_410_on_every_route_after_its_whole_body(client: CodeOcean) -> None:
    large = {"copy": [{"path": "x", "content": "A" * 800_000}], "command": "true"}
    for method, path in [("DELETE", ""), ("PATCH", "/files"), ("POST", "/execute"), ("GET", "/websocket")]:
        answer = await client.request(
            method, f"/runners/{UNKNOWN}{path}", None if method in {"DELETE", "GET"} else large
        )
        assert answer.status_code == 410, path
        assert "no runner found with this id" in answer.json()["message"]


@pytest.mark.both
async def test_an_idle_runner_is_none_for_clients(client: CodeOcean) -> None:
    listed = (await client.request("GET", "/runners")).json()["runners"]
    idle = [each["id"] for each in listed if each["phase"] == "idle" and each["environmentId"] == 1]
    for runner in idle:
        answer = await client.request("POST", f"/runners/{runner}/execute", {"command": "true"})
        assert answer.status_code == 410


@pytest.mark.both
async def test_an_inactive_runner_ends_its_execution_with_timeout(client: CodeOcean) -> None:
    claimed = await client.request("POST", "/runners", {"executionEnvironmentId": 1, "inactivityTimeout": 1})
    runner = claimed.json()["runnerId"]
    with trio.fail_after(20):
        heard = await (await client.execute(runner, "sleep infinity", limit=0)).closed()
    assert heard.messages[0] == {"type": "start"}
    assert heard.messages[-1] == {"type": "timeout"}
    assert heard.code == 1000
    assert (await client.request("DELETE", f"/runners/{runner}")).status_code == 410

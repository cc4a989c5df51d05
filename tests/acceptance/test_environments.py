"""The acceptance list: environments, health and statistics."""

import json
from typing import Any

import pytest
import trio

from tests.acceptance.codeocean import CodeOcean
from tests.acceptance.sites import Site

FIELDS = {"id", "prewarmingPoolSize", "cpuLimit", "memoryLimit", "image", "networkAccess", "exposedPorts"}


@pytest.mark.both
async def test_an_environment_without_a_body_is_400(client: CodeOcean, number: int) -> None:
    answer = await client.http.put(f"/execution-environments/{number}")
    assert answer.status_code == 400
    assert answer.json()["message"]
    assert number not in [each["id"] for each in await client.environments()]


@pytest.mark.both
async def test_a_new_environment_is_201_without_a_body_and_a_changed_one_204(client: CodeOcean, number: int) -> None:
    environment = {"image": "an/image", "prewarmingPoolSize": 1, "cpuLimit": 20, "memoryLimit": 100}
    answer = await client.request("PUT", f"/execution-environments/{number}", environment)
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (201, b"", "0")
    answer = await client.request("PUT", f"/execution-environments/{number}", environment | {"memoryLimit": 142})
    assert (answer.status_code, answer.content) == (204, b"")
    answer = await client.request("GET", f"/execution-environments/{number}")
    assert answer.json()["memoryLimit"] == 142
    await client.remove(number)


@pytest.mark.both
async def test_environments_are_listed_with_integers_as_ids_and_all_that_they_are(
    client: CodeOcean, number: int
) -> None:
    before = {each["id"] for each in await client.environments()}
    await client.put(number, size=0)
    listed = await client.environments()
    assert {each["id"] for each in listed} == before | {number}
    assert all(set(each) >= FIELDS and type(each["id"]) is int for each in listed)
    answer = await client.request("GET", f"/execution-environments/{number}")
    assert answer.status_code == 200
    assert answer.json() in listed
    await client.remove(number)


@pytest.mark.both
async def test_a_deleted_environment_is_gone(client: CodeOcean, number: int) -> None:
    await client.put(number, size=1)
    await client.remove(number)
    assert (await client.request("DELETE", f"/execution-environments/{number}")).status_code == 404
    answer = await client.request("GET", f"/execution-environments/{number}")
    assert (answer.status_code, answer.content) == (404, b"") or answer.json()["message"]
    assert str(number) not in await client.statistics()


@pytest.mark.both
async def test_ids_are_digits_and_fit(client: CodeOcean) -> None:
    for identity, status in [("abc", 404), ("-1", 404), ("99999999999999999999", 400)]:
        answer = await client.request("PUT", f"/execution-environments/{identity}", {"image": "x"})
        assert answer.status_code == status, identity


@pytest.mark.both
async def test_a_fetch_that_is_neither_true_nor_false_is_400(client: CodeOcean) -> None:
    for path in ("/execution-environments", "/execution-environments/1"):
        assert (await client.request("GET", f"{path}?fetch=perhaps")).status_code == 400
        assert (await client.request("GET", f"{path}?fetch=true")).status_code == 200
        assert (await client.request("GET", f"{path}?fetch=0")).status_code == 200


@pytest.mark.both
async def test_the_service_is_healthy(client: CodeOcean) -> None:
    await client.health()


@pytest.mark.both
async def test_the_version_is_a_quoted_string(client: CodeOcean) -> None:
    answer = await client.request("GET", "/version")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert json.loads(answer.content) == await client.version() != ""


@pytest.mark.both
async def test_statistics_count_what_is_idle_and_used(client: CodeOcean, number: int) -> None:
    await client.put(number, size=2)
    runner = await client.claim(number)
    with trio.fail_after(30):
        while (await client.statistics())[str(number)]["idleRunners"] < 2:
            await trio.sleep(0.02)
    counted = (await client.statistics())[str(number)]
    assert counted == {"id": number, "prewarmingPoolSize": 2, "idleRunners": 2, "usedRunners": 1}
    await client.release(runner)
    assert (await client.statistics())[str(number)]["usedRunners"] == 0
    await client.remove(number)


@pytest.mark.both
async def test_statistics_and_health_survive_an_environment_deleted_under_its_runner(
    client: CodeOcean, number: int
) -> None:
    await client.put(number, size=1)
    runner = await client.claim(number)
    await client.remove(number)
    assert str(number) not in await client.statistics()
    await client.health()
    assert (await client.request("POST", f"/runners/{runner}/execute", {"command": "true"})).status_code == 410


# The cluster's side


async def template(site: Site, number: int) -> dict[str, Any]:
    job = await site.nomad(f"/job/template-{number}")
    assert job is not None
    return dict(job)


def task_of(job: dict[str, Any]) -> dict[str, Any]:
    [task] = job["TaskGroups"][0]["Tasks"]
    return dict(task)


@pytest.mark.fake_nomad
async def test_an_environment_is_a_template_job_in_the_cluster(site: Site, client: CodeOcean, number: int) -> None:
    await client.put(number, size=1, cpuLimit=20, memoryLimit=100)
    job = await template(site, number)
    assert (job["Namespace"], job["Type"], len(job["TaskGroups"])) == ("default", "batch", 2)
    assert job["TaskGroups"][0]["Count"] == 1
    task = task_of(job)
    assert (task["Resources"]["CPU"], task["Resources"]["MemoryMaxMB"]) == (20, 100)
    assert task["Config"]["image"] == "openhpi/co_execenv_python:3.8"
    assert task["Config"]["network_mode"] == "none"
    assert not job["TaskGroups"][0]["Networks"]
    await client.remove(number)


@pytest.mark.fake_nomad
async def test_changed_limits_reach_the_cluster(site: Site, client: CodeOcean, number: int) -> None:
    await client.put(number, size=1)
    await client.put(number, size=1, cpuLimit=150, memoryLimit=142)
    resources = task_of(await template(site, number))["Resources"]
    assert (resources["CPU"], resources["MemoryMaxMB"]) == (150, 142)
    await client.remove(number)


@pytest.mark.fake_nomad
async def test_network_access_comes_and_goes(site: Site, client: CodeOcean, number: int) -> None:
    await client.put(number, size=1, networkAccess=True, exposedPorts=[42, 1337])
    job = await template(site, number)
    assert not task_of(job)["Config"].get("network_mode")
    [network] = job["TaskGroups"][0]["Networks"]
    assert sorted(port["To"] for port in network["DynamicPorts"]) == [42, 1337]
    runner = await client.request("POST", "/runners", {"executionEnvironmentId": number, "inactivityTimeout": 10})
    assert sorted(port["exposedPort"] for port in runner.json()["mappedPorts"]) == [42, 1337]
    assert all(port["hostAddress"].rpartition(":")[0] for port in runner.json()["mappedPorts"])
    await client.put(number, size=1)
    job = await template(site, number)
    assert task_of(job)["Config"]["network_mode"] == "none"
    assert not job["TaskGroups"][0]["Networks"]
    await client.remove(number)


@pytest.mark.fake_nomad
async def test_a_deleted_environment_leaves_nothing_in_the_cluster(site: Site, client: CodeOcean, number: int) -> None:
    await client.put(number, size=1)
    runner = await client.claim(number)
    await client.remove(number)
    with trio.fail_after(20):
        while await site.nomad(f"/job/template-{number}") or await site.nomad(f"/jobs?prefix={number}-"):
            await trio.sleep(0.02)
    assert (await client.request("DELETE", f"/runners/{runner}")).status_code == 410


@pytest.mark.fake_nomad
async def test_an_environment_that_others_put_there_is_seen_with_fetch_only(
    site: Site, client: CodeOcean, number: int
) -> None:
    await client.ensure(1)
    job = await template(site, 1)
    other = json.loads(json.dumps(job).replace("template-1", f"template-{number}"))
    await site.put_job(other)
    assert number not in [each["id"] for each in await client.environments()]
    assert (await client.request("GET", f"/execution-environments/{number}")).status_code == 404
    assert (await client.request("GET", f"/execution-environments/{number}?fetch=true")).status_code == 200
    fetched = await client.request("GET", "/execution-environments?fetch=true")
    assert number in [each["id"] for each in fetched.json()["executionEnvironments"]]
    assert number in [each["id"] for each in await client.environments()]
    await client.remove(number)

"""The fake cluster misbehaves as it is told, and nothing else happens; its executions are real."""

import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx
import pytest
import trio
from websockets.exceptions import ConnectionClosed
from websockets.trio.client import connect

from tests.fakes.nomad import NomadFake, open_nomad_fake
from tests.fakes.nomad_chaos import ALL, trouble
from tests.nomad.test_fake_shapes import recorded

Json = dict[str, Any]
Client = httpx.AsyncClient
EVERYTHING = "/v1/event/stream?topic=Job&topic=Evaluation&topic=Allocation&topic=Node"
BROKEN = (httpx.TransportError, httpx.StreamError)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[NomadFake, Client]]:
    with trio.fail_after(30):
        async with open_nomad_fake(**options) as fake, Client(base_url=fake.url) as client:
            yield fake, client


def job(driver: str = "raw_exec", **group: Any) -> Json:
    made = json.loads(json.dumps(recorded("put_jobs_ok")["request"]["body"]["Job"]))
    made["ID"] = made["Name"] = f"10-{uuid4()}"
    made["TaskGroups"][0]["Tasks"][0]["Driver"] = driver
    made["TaskGroups"][0].update(group)
    return dict(made)


async def put(fake: NomadFake, client: Client, made: Json | None = None) -> Json:
    """Register a job; the answer is its running allocation."""
    made = made or job()
    answer = await client.put("/v1/jobs", json={"Job": made})
    assert answer.status_code == 200, answer.text
    return await fake.running(made["ID"])


class Follower:
    """Someone who reads the event stream, line by line, until it ends."""

    def __init__(self, client: Client, path: str = EVERYTHING) -> None:
        self.client, self.path = client, path
        self.received = b""
        self.begun = trio.Event()
        self.status = 0
        self.end = ""

    async def run(self) -> None:
        try:
            async with self.client.stream("GET", self.path, timeout=None) as answer:
                self.status = answer.status_code
                self.begun.set()
                async for data in answer.aiter_bytes():
                    self.received += data
                self.end = "clean"
        except BROKEN as error:
            self.end = type(error).__name__

    @property
    def raw(self) -> list[str]:
        """What came so far, the last line whole or not."""
        *lines, rest = self.received.decode().split("\n")
        return [*lines, rest] if rest else lines

    @property
    def lines(self) -> list[Json]:
        return [json.loads(line) for line in self.received.decode().split("\n")[:-1] if "Index" in line]

    @property
    def indexes(self) -> list[int]:
        return [line["Index"] for line in self.lines]

    async def sees(self, index: int) -> None:
        while not self.indexes or max(self.indexes) < index:
            await trio.sleep(0.002)


@asynccontextmanager
async def following(fake: NomadFake, client: Client, path: str = EVERYTHING) -> AsyncIterator[Follower]:
    async with trio.open_nursery() as nursery:
        follower = Follower(client, path)
        nursery.start_soon(follower.run)
        await fake.until(lambda: bool(fake.streams.open))
        yield follower
        nursery.cancel_scope.cancel()


async def ended(follower: Follower) -> str:
    while not follower.end:
        await trio.sleep(0.002)
    return follower.end


# -- the stream -------------------------------------------------------------------------------------------------------


async def test_the_head_of_a_quiet_stream_is_held_back_until_a_heartbeat() -> None:
    async with opened() as (fake, client), following(fake, client, "/v1/event/stream?topic=Deployment") as follower:
        asked = trio.current_time()
        await follower.begun.wait()
        assert trio.current_time() - asked >= 0.5
        while len(follower.raw) < 2:
            await trio.sleep(0.01)
        assert follower.raw[:2] == ["{}", "{}"]


async def test_a_stream_begins_at_its_index_inclusive() -> None:
    async with opened() as (fake, client):
        await put(fake, client)
        await fake.settled()
        last = fake.store.index
        for asked, first in [(0, 11), (1, 11), (last, last), (last - 2, last - 2), (last + 1, last), (999999, last)]:
            async with following(fake, client, f"{EVERYTHING}&index={asked}") as follower:
                await follower.sees(last)
                assert follower.indexes[0] == first


async def test_the_buffer_keeps_the_newest_lines_and_says_nothing_of_the_others() -> None:
    async with opened(buffer=20) as (fake, client):
        for _ in range(10):
            await put(fake, client)
        async with following(fake, client, f"{EVERYTHING}&index=1") as follower:
            await follower.sees(fake.store.index)
            assert len(follower.indexes) == 21


async def test_a_reader_that_is_too_slow_is_told_so() -> None:
    async with opened(buffer=3) as (fake, client), following(fake, client) as follower:
        fake.fall_silent()
        for _ in range(3):
            await put(fake, client)
        fake.speak()
        assert await ended(follower) == "clean"
        assert follower.raw[-1] == "event dropped from buffer"


async def test_a_stream_tells_only_what_was_asked_for() -> None:
    async with opened() as (fake, client):
        one, two = (await put(fake, client))["JobID"], (await put(fake, client))["JobID"]
        async with following(fake, client, f"/v1/event/stream?topic=Allocation:{one}&topic=Job:{two}") as follower:
            await trio.sleep(0.1)
            events = [event for line in follower.lines for event in line["Events"]]
            assert {(event["Topic"], event["Payload"].get("Allocation", {}).get("JobID")) for event in events} == {
                ("Allocation", one),
                ("Job", None),
            }
            assert {event["Key"] for event in events if event["Topic"] == "Job"} == {two}


async def test_a_topic_with_two_keys_has_no_wildcard() -> None:
    async with opened() as (fake, client):
        one, two = (await put(fake, client))["JobID"], (await put(fake, client))["JobID"]
        async with following(fake, client, f"/v1/event/stream?topic=Job&topic=Job:{two}") as follower:
            await trio.sleep(0.1)
            keys = {event["Key"] for line in follower.lines for event in line["Events"]}
            assert two in keys
            assert one not in keys


@pytest.mark.parametrize(("order", "counts"), [("drop", [0, 1]), ("double", [2, 1]), ("", [1, 1])])
async def test_a_line_is_dropped_or_doubled_on_order(order: str, counts: list[int]) -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        fake.stream.orders.extend([order] if order else [])
        for node in ("nomad-agent-1", "nomad-agent-2"):
            fake.end_drain(node)
        await follower.sees(fake.store.index)
        assert [follower.indexes.count(fake.store.index - back) for back in (1, 0)] == counts


async def test_lines_change_places_on_order() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        fake.stream.orders.append("reorder")
        for node in ("nomad-agent-1", "nomad-agent-2"):
            fake.end_drain(node)
        last = fake.store.index
        while follower.indexes[-2:] != [last, last - 1]:
            await trio.sleep(0.002)


async def test_a_delayed_line_arrives_late() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        fake.stream.orders.append("delay")
        fake.stream.delay_for = 5
        fake.end_drain("nomad-agent-1")
        asked = trio.current_time()
        await follower.sees(fake.store.index)
        assert trio.current_time() - asked >= 0.1


@pytest.mark.parametrize(("how", "end"), [("clean", "clean"), ("eof", "RemoteProtocolError"), ("reset", "ReadError")])
async def test_a_stream_is_cut_as_ordered(how: str, end: str) -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        fake.cut_streams(how)
        assert await ended(follower) == end


@pytest.mark.parametrize("at", [0, 1, 5, 700])
async def test_a_stream_is_cut_at_any_byte(at: int) -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        before = len(follower.raw)
        fake.cut_streams("eof", at=at)
        fake.end_drain("nomad-agent-1")
        assert await ended(follower) == "RemoteProtocolError"
        assert max(0, at - 8) <= len("".join(follower.raw[before:])) <= at


async def test_bytes_of_our_own_are_told_as_they_are() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        fake.say(b"nonsense\n" + b"x" * 3_000_000 + b"\nhalf")
        fake.cut_streams("clean")
        assert await ended(follower) == "clean"
        assert [len(line) for line in follower.raw[-3:]] == [8, 3_000_000, 4]


async def test_a_silent_stream_tells_nothing_until_it_speaks() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        told = len(follower.raw)
        fake.fall_silent()
        fake.end_drain("nomad-agent-1")
        await trio.sleep(0.7)
        assert len(follower.raw) == told
        fake.speak()
        await follower.sees(fake.store.index)


async def test_streams_of_a_refused_token_end_with_words() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        fake.refuse_tokens(str(uuid4()))
        assert await ended(follower) == "clean"
        assert follower.raw[-1] == "subscription closed by server, client should resubscribe"
        assert (await client.get(EVERYTHING)).status_code == 500


async def test_a_client_that_leaves_is_noticed() -> None:
    async with opened() as (fake, client):
        async with following(fake, client) as follower:
            await follower.sees(fake.store.index)
        while fake.streams.open:
            await trio.sleep(0.002)


@pytest.mark.parametrize(("purges", "told"), [("untold", []), ("told", [None]), ("marked", [True])])
async def test_newer_clusters_tell_purges(purges: Any, told: list[Any]) -> None:
    async with opened(purges=purges) as (fake, client), following(fake, client) as follower:
        row = await put(fake, client)
        await client.delete(f"/v1/job/{row['JobID']}?purge=true")
        await fake.settled()
        await follower.sees(fake.store.index)
        events = [event for line in follower.lines for event in line["Events"] if event["Type"] == "JobDeregistered"]
        assert [event["Payload"].get("Deleted") for event in events if event["Topic"] == "Job"] == told


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_an_answer_is_lost_after_the_deed_is_done() -> None:
    async with opened() as (fake, client):
        fake.fault("/v1/jobs", "PUT", lost="after")
        made = job()
        with pytest.raises(BROKEN):
            await client.put("/v1/jobs", json={"Job": made})
        await fake.running(made["ID"])


async def test_a_request_is_lost_before_anything_is_done() -> None:
    async with opened() as (fake, client):
        fake.fault("/v1/jobs", "PUT", lost="before")
        with pytest.raises(BROKEN):
            await client.put("/v1/jobs", json={"Job": job()})
        assert not fake.jobs


async def test_requests_fail_as_often_as_ordered() -> None:
    async with opened() as (fake, client):
        fake.fault("/v1/jobs", times=2, status=429, text="Too many requests")
        fake.fault("/v1/nodes", garbage=b"{")
        answers = [await client.get("/v1/jobs") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [429, 429, 200]
        assert (await client.get("/v1/nodes")).text == "{"
        assert (await client.get("/v1/status/leader")).status_code == 200


async def test_a_slow_answer_comes_late() -> None:
    async with opened() as (fake, client):
        fake.fault("/v1/jobs", wait=5)
        asked = trio.current_time()
        await client.get("/v1/jobs")
        assert trio.current_time() - asked >= 0.1


async def test_a_server_that_is_down_refuses_and_comes_back_on_its_port() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        await follower.sees(fake.store.index)
        url = fake.url
        fake.stop_server()
        assert await ended(follower) == "ReadError"
        with pytest.raises(httpx.ConnectError):
            await client.get("/v1/jobs")
        await fake.start_server()
        assert fake.url == url
        assert (await client.get("/v1/jobs")).status_code == 200


async def test_connections_above_the_limit_are_reset() -> None:
    async with opened(connections=1) as (fake, client), following(fake, client), Client(base_url=fake.url) as second:
        with pytest.raises(BROKEN):
            await second.get("/v1/jobs")


# -- the cluster ------------------------------------------------------------------------------------------------------


async def test_a_leader_is_needed_for_everything_that_moves() -> None:
    async with opened() as (fake, client):
        row = await put(fake, client)
        fake.lose_leader()
        index = fake.store.index
        fake.restart(row["ID"])
        await trio.sleep(0.05)
        assert fake.store.index == index
        fake.elect_leader()
        await fake.until(lambda: fake.allocations[row["ID"]]["TaskStates"]["default-task"]["Restarts"] == 1)


async def test_what_is_exhausted_waits_and_what_is_filtered_must_be_put_again() -> None:
    async with opened() as (fake, client):
        for how, comes in (({"dimension": "memory"}, True), ({"constraint": "${attr.kernel.name} = plan9"}, False)):
            fake.refuse_placement(**how)
            made = job()
            await client.put("/v1/jobs", json={"Job": made})
            await fake.until(lambda: any(row["Status"] == "blocked" for row in fake.evaluations.values()))
            fake.allow_placement()
            await trio.sleep(0.05)
            assert bool(fake.store.of_job(made["ID"])) == comes
            await put(fake, client, made)


async def test_a_cluster_goes_back_in_time() -> None:
    async with opened() as (fake, client):
        before = await put(fake, client)
        snapshot = fake.snapshot()
        after = await put(fake, client)
        await fake.settled()
        highest = fake.store.index
        fake.restore(snapshot)
        listed = await client.get("/v1/jobs")
        assert [known["ID"] for known in listed.json()] == [before["JobID"]]
        assert int(listed.headers["x-nomad-index"]) < highest
        assert after["ID"] not in [row["ID"] for row in (await client.get("/v1/allocations")).json()]
        await put(fake, client)


async def test_a_failed_allocation_is_replaced_once() -> None:
    async with opened() as (fake, client):
        made = job()
        row = await put(fake, client, made)
        fake.fail(row["ID"])
        await fake.until(lambda: "FollowupEvalID" in fake.allocations[row["ID"]])
        for _ in range(3):
            await client.put("/v1/jobs", json={"Job": made})
        await fake.until(lambda: len(fake.store.of_job(made["ID"])) > 1)
        await fake.running(made["ID"])
        await trio.sleep(0.2)
        assert len(fake.store.of_job(made["ID"])) == 2
        waited = [known for known in fake.evaluations.values() if known.get("WaitUntil")]
        assert [known["ID"] for known in waited] == [fake.allocations[row["ID"]]["FollowupEvalID"]]


async def test_a_batch_job_that_is_done_runs_again_only_when_it_changes() -> None:
    async with opened() as (fake, client):
        made = job()
        row = await put(fake, client, made)
        fake.end(row["ID"], exit_code=0, signal=0)
        await fake.until(lambda: fake.jobs[made["ID"]]["Status"] == "dead")
        await client.put("/v1/jobs", json={"Job": made})
        await trio.sleep(0.05)
        assert len(fake.store.of_job(made["ID"])) == 1
        await put(fake, client, {**made, "Meta": {"k": "other"}})
        assert len(fake.store.of_job(made["ID"])) == 2


async def test_garbage_is_collected_without_a_word() -> None:
    async with opened() as (fake, client), following(fake, client) as follower:
        row = await put(fake, client)
        await client.delete(f"/v1/job/{row['JobID']}?purge=true")
        await fake.settled()
        await trio.sleep(0.05)
        told = len(follower.raw)
        fake.collect_garbage()
        await trio.sleep(0.05)
        assert len(follower.raw) == told
        assert (await client.get(f"/v1/allocation/{row['ID']}")).status_code == 404
        listed = await client.get("/v1/allocations")
        assert (listed.json(), int(listed.headers["x-nomad-index"])) == ([], fake.store.index)


async def test_an_allocation_is_told_again_on_order() -> None:
    async with opened() as (fake, client):
        row = await put(fake, client)
        fake.repeat(row["ID"])
        await fake.until(lambda: fake.allocations[row["ID"]]["ModifyIndex"] > row["ModifyIndex"])
        again = fake.allocations[row["ID"]]
        assert {key for key in row if row[key] != again[key]} <= {"ModifyIndex", "ModifyTime"}


async def test_an_agent_that_returns_tells_again_of_what_has_ended() -> None:
    async with opened(nodes=1) as (fake, client):
        ended, lives = await put(fake, client), await put(fake, client)
        await client.delete(f"/v1/job/{ended['JobID']}?purge=true")
        await fake.settled()
        before = {row["ID"]: fake.allocations[row["ID"]]["ModifyIndex"] for row in (ended, lives)}
        fake.kill_agent(ended["NodeID"])
        await fake.revive_agent(ended["NodeID"])
        await fake.until(lambda: fake.allocations[ended["ID"]]["ModifyIndex"] > before[ended["ID"]])
        assert fake.allocations[lives["ID"]]["ModifyIndex"] == before[lives["ID"]]


async def test_each_restart_is_a_start_of_its_own() -> None:
    async with opened() as (fake, client):
        row = await put(fake, client)
        starts = [row["TaskStates"]["default-task"]["StartedAt"]]
        for number in range(1, 4):
            fake.restart(row["ID"], delay=number % 2)
            await fake.until(
                lambda: fake.allocations[row["ID"]]["TaskStates"]["default-task"]["StartedAt"] not in starts
            )
            starts.append(fake.allocations[row["ID"]]["TaskStates"]["default-task"]["StartedAt"])
        assert all(one < two for one, two in pairwise(starts))


# -- executions -------------------------------------------------------------------------------------------------------


async def execute(address: str, row: Json, command: list[str], *, stdin: bytes = b"") -> tuple[str, Any]:
    """stdout, and the exit code or how the connection ended."""
    words = httpx.QueryParams(task="default-task", tty="false", command=json.dumps(command))
    url = f"{address.replace('http', 'ws')}/v1/client/allocation/{row['ID']}/exec?{words}"
    output = b""
    async with connect(url, proxy=None, compression=None) as socket:
        try:
            if stdin:
                await socket.send(json.dumps({"stdin": {"data": b64encode(stdin).decode()}}))
            await socket.send(json.dumps({"stdin": {"close": True}}))
            while True:
                told = json.loads(await socket.recv())
                output += b64decode(told.get("stdout", {}).get("data") or "")
                if told.get("exited"):
                    return output.decode(), told["result"].get("exit_code", 0)
        except ConnectionClosed as closed:
            return output.decode(), f"{closed.rcvd.code} {closed.rcvd.reason}".strip() if closed.rcvd else "eof"


@pytest.mark.parametrize("driver", ["raw_exec", "docker"])
async def test_commands_run_where_their_allocation_is(driver: str) -> None:
    async with opened() as (fake, client):
        one, two = await put(fake, client, job(driver)), await put(fake, client, job(driver))
        assert await execute(fake.url, one, ["sh", "-c", "cat > name; exit 3"], stdin=b"first") == ("", 3)
        assert await execute(fake.url, one, ["cat", "name"]) == ("first", 0)
        assert (await execute(fake.url, two, ["cat", "name"]))[1] == 1


async def test_a_node_answers_executions_itself() -> None:
    async with opened() as (fake, client):
        row = await put(fake, client)
        address = (await client.get(f"/v1/node/{row['NodeID']}")).json()["HTTPAddr"]
        assert await execute(f"http://{address}", row, ["echo", "hi"]) == ("hi\n", 0)


@pytest.mark.parametrize(("driver", "kept"), [("raw_exec", "first"), ("docker", "")])
async def test_a_restart_kills_what_runs_and_empties_a_container(driver: str, kept: str) -> None:
    async with opened() as (fake, client), trio.open_nursery() as nursery:
        row = await put(fake, client, job(driver))
        results: list[tuple[str, Any]] = []

        async def sleep() -> None:
            results.append(await execute(fake.url, row, ["sh", "-c", "echo first > name; sleep 60"]))

        nursery.start_soon(sleep)
        while not list(fake.rooms.root.glob("*/name")):
            await trio.sleep(0.005)
        fake.restart(row["ID"])
        while not results:
            await trio.sleep(0.005)
        assert results == [("", 137)]
        assert (await execute(fake.url, row, ["sh", "-c", "cat name 2>/dev/null"]))[0].strip() == kept


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("unknown", 'Unknown allocation "00000000-0000-0000-0000-000000000001"'),
        ("pending", 'task "default-task" not started yet.'),
        ("stopped", 'task "default-task" is not running.'),
        ("agent", "No path to node"),
    ],
)
async def test_an_execution_is_refused_in_the_recorded_words(state: str, reason: str) -> None:
    async with opened() as (fake, client):
        row: Json = {"ID": "00000000-0000-0000-0000-000000000001"}
        if state == "pending":
            made = job()
            fake.slow_down_starts(500)
            await client.put("/v1/jobs", json={"Job": made})
            await fake.until(lambda: bool(fake.store.of_job(made["ID"])))
            row = fake.current(made["ID"])
        elif state != "unknown":
            row = await put(fake, client)
        if state == "stopped":
            await client.delete(f"/v1/job/{row['JobID']}?purge=true")
            await fake.settled()
        if state == "agent":
            fake.kill_agent(row["NodeID"])
            await fake.until(lambda: not fake.parts.agents[row["NodeID"]].alive)
        assert await execute(fake.url, row, ["true"]) == ("", f"1008 {reason}")


async def test_an_agent_that_dies_ends_its_executions_without_a_code() -> None:
    async with opened() as (fake, client), trio.open_nursery() as nursery:
        row = await put(fake, client)
        results: list[tuple[str, Any]] = []

        async def sleep() -> None:
            results.append(await execute(fake.url, row, ["sh", "-c", "echo hi; sleep 60"]))

        nursery.start_soon(sleep)
        await fake.until(lambda: row["ID"] in fake.rooms.boxes)
        await trio.sleep(0.05)
        fake.kill_agent(row["NodeID"])
        while not results:
            await trio.sleep(0.005)
        assert results == [("hi\n", "1000")]


# -- at random --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_a_cluster_in_trouble_heals(seed: int) -> None:
    """Whatever happens, the jobs that weren't ended run in the end, each in one place."""
    async with opened(nodes=3, seed=seed, speed=100) as (fake, client):
        forever: Json = {"ReschedulePolicy": {"Unlimited": True, "Attempts": 0, "Delay": 5_000_000_000, "Interval": 0}}
        jobs = [job(**forever) for _ in range(5)]
        for made in jobs:
            await put(fake, client, made)
        with trio.move_on_after(1.0):
            await trouble(fake, seed, pause=1)
        await fake.heal()
        async with Client(base_url=fake.url) as healthy:
            for made in jobs:
                await put(fake, healthy, made | {"Meta": {"again": str(seed)}})
            await fake.settled()
        for made in jobs:
            rows = [row for row in fake.store.of_job(made["ID"]) if row["DesiredStatus"] == "run"]
            assert [row["ClientStatus"] for row in rows].count("running") == 1


async def test_all_kinds_of_trouble_can_be_made() -> None:
    async with opened(nodes=3, speed=200) as (fake, client):
        for kind in ALL:
            await put(fake, client)
            with trio.move_on_after(1.0):
                await kind(fake, fake.parts.random)
            await fake.heal()

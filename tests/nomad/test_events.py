"""The event stream: whatever comes, or doesn't, is values or an honest end; and nothing is waited for too long."""

import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import trio

from poseidon.core.fleet import Fleet
from poseidon.core.model import EnvironmentId, JobGone, JobId, JobSeen, RunnerId, Value
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import Batch
from poseidon.executors.nomad import events, wire
from poseidon.executors.nomad.events import Lines
from poseidon.executors.nomad.executor import NomadExecutor, open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from tests.core.nomad_values import RECORDINGS
from tests.nomad.loopback import (
    Handler,
    Loopback,
    Reply,
    Request,
    cut,
    event,
    for_ever,
    line,
    open_loopback,
    recorded,
    sends,
)
from tests.nomad.recorded import stream_lines

JOB = "10-8d8eca30-cc4a-4385-94ad-b089bc8bcead"


def seen(index: int, **more: Any) -> bytes:
    return line(index, event("Job", ID=JOB, ModifyIndex=index, Status="running", **more))


@asynccontextmanager
async def opened(stream: Handler | Reply, **changes: Any) -> AsyncIterator[tuple[NomadExecutor, Loopback]]:
    async with open_loopback() as nomad:
        nomad.on("GET", "/v1/event/stream", stream)
        settings = {"address": nomad.url, "headers_within": 0.05, "stream_silence": 5.0, **changes}
        with trio.fail_after(20):
            async with open_nomad(NomadSettings(**settings)) as executor:
                yield executor, nomad


async def read(executor: NomadExecutor, position: int | None = None) -> tuple[list[Batch], str]:
    """All batches, and why they ended."""
    batches: list[Batch] = []
    why: list[str] = []
    try:
        async with executor.follow(position) as stream:
            async for batch in stream:
                batches.append(batch)
    except* ExecutorUnreachable as group:
        why += [error.message for error in leaves(group)]
    assert why, "a stream ended without a word"
    return batches, why[0]


def leaves(group: BaseExceptionGroup[ExecutorUnreachable]) -> list[ExecutorUnreachable]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


async def ends(stream: Handler | Reply, **changes: Any) -> tuple[list[Batch], str]:
    async with opened(stream, **changes) as (executor, _):
        return await read(executor)


def values(batches: list[Batch]) -> list[Value]:
    return [value for batch in batches for value in batch.values]


def versions(batches: list[Batch]) -> list[int]:
    return [value.version for value in values(batches) if isinstance(value, JobSeen)]


async def test_the_stream_is_asked_for_just_what_is_used_and_resumes_where_it_was() -> None:
    async with opened(sends(seen(7))) as (executor, nomad):
        await read(executor)
        await read(executor, 7)
        fresh, again = nomad.requests
        assert set(fresh.topics) == {"Job", "Allocation", "Evaluation"}
        assert "index" not in fresh.query
        assert again.query["index"] == "7"
        assert again.query["namespace"] == "default"


async def test_lines_of_one_index_are_all_told() -> None:
    evaluation = event("Evaluation", ID="e", JobID=JOB, CreateIndex=7, TriggeredBy="job-deregister")
    batches, _ = await ends(sends(seen(7), line(7, evaluation)))
    assert values(batches) == [JobSeen(JobId(JOB), 7, values(batches)[0].status, used=False), JobGone(JobId(JOB), 7)]  # type: ignore[union-attr]
    assert batches[-1].position == 7


async def test_a_heartbeat_is_an_empty_batch() -> None:
    batches, _ = await ends(sends(b"{}", b"\n", b"{}\n"))
    assert set(batches) == {Batch(0)}


async def test_a_line_is_what_newlines_cut_whatever_the_chunks_are() -> None:
    body = b"".join(seen(index, Name="\u2028\u0085") for index in range(1, 30)) + b"{}\n"
    random = Random(1)
    for most in (1, 7, 300, 5000):
        chunks, rest = [], body
        while rest:
            size = random.randint(1, most)
            chunks.append(rest[:size])
            rest = rest[size:]
        batches, _ = await ends(sends(*chunks))
        assert versions(batches) == list(range(1, 30))


async def test_all_that_comes_at_once_is_one_change() -> None:
    batches, _ = await ends(sends(seen(1) + seen(2) + seen(3)))
    [batch] = batches
    assert versions(batches) == [1, 2, 3]
    assert batch.position == 3
    batches, why = await ends(sends(seen(1) + seen(2) + b"good-bye\n" + seen(3)))
    assert versions(batches) == [1, 2]
    assert why.endswith("good-bye")


@pytest.mark.parametrize(
    "words", ["event dropped from buffer", "subscription closed by server, client should resubscribe"]
)
@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_a_plain_last_line_says_why_the_stream_ended(words: str, end: bytes) -> None:
    batches, why = await ends(sends(seen(1), words.encode() + end))
    assert versions(batches) == [1]
    assert words in why


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\n",
        b"[]\n",
        b"3\n",
        b'{"Index": "x"}\n',
        b'{"Error": "no"}\n',
        b'{"Index":1,"Events":[{"Payload":3}]}\n',
        b'{"Index":' + b"9" * 30 + b',"Events":[]}\n',
        b'{"Index":2,"Events":[{"Payload":{"Evaluation":{"ID":"e","JobID":"j","CreateIndex":1,"ModifyTime":'
        + b"9" * 400
        + b"}}}]}\n",
        b"{\n",
    ],
)
async def test_garbage_ends_the_stream_and_what_came_before_counts(garbage: bytes) -> None:
    batches, why = await ends(sends(seen(1), garbage, seen(2), then=for_ever))
    assert versions(batches) == [1]
    assert "ended the event stream" in why


async def test_what_others_events_hold_is_of_no_concern() -> None:
    strange = line(1, {"Topic": "Node", "Payload": {"Node": {"ID": 3}}}, {"Topic": "New", "Payload": None}, {})
    batches, _ = await ends(sends(strange, seen(2)))
    assert versions(batches) == [2]


async def test_a_connection_that_breaks_at_any_byte_is_an_end() -> None:
    body = seen(1) + seen(2)
    for place in range(0, len(body), 13):
        batches, why = await ends(sends(body[:place], then=cut) if place else cut)
        assert versions(batches) == [1, 2][: body[:place].count(b"\n")]
        assert "can't be reached" in why


async def test_a_clean_end_is_an_end_too() -> None:
    _, why = await ends(sends(seen(1)))
    assert why == "nomad ended the event stream"


async def test_silence_is_death() -> None:
    batches, why = await ends(sends(seen(1), then=for_ever), stream_silence=0.1)
    assert versions(batches) == [1]
    assert why == "nomad's event stream was silent for 0.1 seconds"


async def test_heartbeats_keep_the_stream_alive() -> None:
    async def beat(request: Request) -> None:
        for _ in range(6):
            await trio.sleep(0.1)
            await request.stream.send_all(b"3\r\n{}\n\r\n")

    batches, why = await ends(sends(seen(1), then=beat), stream_silence=0.3)
    assert versions(batches) == [1]
    assert why == "nomad ended the event stream"


async def test_headers_that_are_held_back_do_not_hold_up_who_follows() -> None:
    let_go = trio.Event()

    async def hold(request: Request) -> None:
        await let_go.wait()
        await sends(seen(3), then=for_ever)(request)

    async with opened(hold) as (executor, _), executor.follow(2) as stream:
        let_go.set()
        assert versions([await anext(stream)]) == [3]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (recorded("acl_event_stream_anonymous"), "refuses the token"),
        (recorded("noleader_get_jobs"), "no cluster leader"),
        (Reply("nope", 404), "doesn't know it"),
        (Reply("Invalid method", 405), "refuses it"),
        (Reply("slow down", 429), "too often"),
        (Reply("<html>", 200), "ended the event stream: <html>"),
    ],
)
async def test_answers_that_are_no_stream_say_why(reply: Reply, words: str) -> None:
    batches, why = await ends(reply)
    assert not batches
    assert words in why


async def test_a_refusal_that_comes_late_is_told_to_who_follows() -> None:
    async def refuse(_request: Request) -> Reply:
        await trio.sleep(0.1)
        return recorded("acl_event_stream_anonymous")

    _, why = await ends(refuse, headers_within=0.01)
    assert "refuses the token" in why


async def test_nobody_there_is_an_end() -> None:
    async with open_loopback() as nomad:
        url = nomad.url
    async with open_nomad(NomadSettings(address=url)) as executor:
        with trio.fail_after(30):
            _, why = await read(executor)
    assert "can't be reached" in why


async def test_an_unknown_namespace_is_not_an_empty_cluster() -> None:
    async with opened(sends(seen(1)), namespace="teaching") as (executor, nomad):
        _, why = await read(executor)
        assert "no namespace 'teaching'" in why
        nomad.on("GET", "/v1/namespace/teaching", Reply({"Name": "teaching"}))
        batches, _ = await read(executor)
        assert versions(batches) == [1]


async def test_a_line_of_twenty_megabytes_is_read() -> None:
    filler = {"Topic": "Node", "Payload": {"Node": "x" * 1000}}
    huge = line(1, *[filler] * 20_000, event("Job", ID=JOB, ModifyIndex=1, Status="running"))
    assert len(huge) > 20_000_000
    chunks = [huge[place : place + 65536] for place in range(0, len(huge), 65536)]
    batches, _ = await ends(sends(*chunks, seen(2)))
    assert versions(batches) == [1, 2]


def test_a_line_without_an_end_is_given_up_at_a_bound() -> None:
    lines = Lines(most=1000)
    assert lines.feed(b"x" * 999) == []
    with pytest.raises(ExecutorUnreachable, match="more than 1000 bytes"):
        lines.feed(b"xx")
    fresh = Lines(most=10)
    assert fresh.feed(b"x" * 10 + b"\n" + b"y" * 10) == [b"x" * 10]
    assert fresh.feed(b"\n\nz") == [b"y" * 10, b""]
    assert fresh.rest() == b"z"


async def test_who_stops_following_leaves_nothing_behind() -> None:
    async with opened(sends(*[seen(index) for index in range(1, 500)], then=for_ever)) as (executor, _):
        for _ in range(3):
            async with executor.follow(None) as stream:
                await anext(stream)
        assert not executor.stream_health.connected


async def test_the_stream_in_numbers() -> None:
    allocation = event("Allocation", ID="a", JobID=JOB, CreateIndex=1, ModifyIndex=2, ModifyTime=1)
    async with opened(sends(seen(4), line(5, allocation), b"{}\n", then=for_ever)) as (executor, _):
        health = executor.stream_health
        assert health.age() is None
        async with executor.follow(None) as stream:
            while health.lines < 3:
                await anext(stream)
            assert health.connected
            assert (health.index, health.lines, health.events) == (5, 3, 2)
            assert (health.age() or 9) < 5
            assert (health.lag or 0) > 1e9
        assert health.breaks == 1


class Spy:
    """A decoder that knows where it works."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def decode(self, raw: bytes) -> wire.Line:
        self.threads.add(threading.get_ident())
        return msgspec.json.decode(raw, type=wire.Line)


@pytest.mark.parametrize(("bound", "aside"), [(10, True), (100_000, False)])
async def test_large_lines_are_parsed_aside(monkeypatch: pytest.MonkeyPatch, bound: int, aside: bool) -> None:
    spy = Spy()
    monkeypatch.setattr(events, "OFF_LOOP", bound)
    monkeypatch.setattr(events, "_line", spy)
    batches, _ = await ends(sends(seen(1), seen(2)))
    assert versions(batches) == [1, 2]
    assert (threading.get_ident() not in spy.threads) is aside


async def test_a_burst_of_all_recorded_events_becomes_core_state(
    record_property: Callable[[str, object], None],
) -> None:
    """How many a second of this thread's own time is a property of the report; 20,000 are aimed at, without tracing."""
    lines = [line for file in sorted(RECORDINGS.glob("*.ndjson")) for line in stream_lines(file)]
    wanted = [{**each, "Events": [e for e in each["Events"] if e["Topic"] != "Node"]} for each in lines] * 4
    raw = [msgspec.json.encode(each) for each in wanted if each["Events"]]
    body = b"".join(b"%x\r\n%s\r\n1\r\n\n\r\n" % (len(each), each) for each in raw)
    served: list[trio.SocketStream] = []

    async def serve(request: Request) -> None:
        served.append(request.stream)
        await trio.sleep_forever()

    async with opened(serve, headers_within=0.0) as (executor, _):
        fleet = Fleet(settle=3.0, mint=lambda environment: RunnerId(f"{environment}-{uuid4()}"))
        fleet.know(EnvironmentId(10), 1)
        async with executor.follow(None) as batches:
            while not served:
                await trio.sleep(0.001)
            [connection] = served
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            sender = threading.Thread(target=_send, args=(connection.socket.fileno(), head + body), daemon=True)
            sender.start()
            began = time.thread_time()
            while executor.stream_health.lines < len(raw):
                for value in (await anext(batches)).values:
                    fleet.handle(value, 1000.0)
                fleet.take_changes()
            took = time.thread_time() - began
            await trio.to_thread.run_sync(sender.join)
    events = sum(len(each["Events"]) for each in wanted)
    record_property("events_per_second", round(events / took))
    assert fleet.environments() == {EnvironmentId(10)}


def _send(descriptor: int, body: bytes) -> None:
    """From another thread, whose time doesn't count."""
    view = memoryview(body)
    while view:
        try:
            view = view[os.write(descriptor, view[:1_000_000]) :]
        except BlockingIOError:
            time.sleep(0.001)

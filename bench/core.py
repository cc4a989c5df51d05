"""The core by itself: how many events it takes in a second, and what a runner costs in its memory."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from uuid import uuid4

import trio

from bench.context import Bench, Measurement
from bench.processes import KIB
from poseidon.core.events import Event, LookedUp, LookUp, Start, Started
from poseidon.core.fleet import Fleet
from poseidon.core.model import (
    Allocation,
    AllocationId,
    ClientStatus,
    EnvironmentId,
    JobId,
    JobSeen,
    JobStatus,
    RunnerId,
)
from tests.core.nomad_values import RECORDINGS, read_recording, truth_of

ENVIRONMENT = EnvironmentId(10)
STEP = 0.01
"""Seconds between two events."""


async def measure_events(bench: Bench) -> None:
    """All recordings, one fleet each, what changes taken away after each event as the dispatcher does."""
    names = sorted(path.stem for path in RECORDINGS.glob("*.ndjson"))[: bench.pick(1000, 5)]
    histories = [list(events_of(name)) for name in names]
    lines = [line for name in names for line in (RECORDINGS / f"{name}.ndjson").read_text().splitlines()]
    events = sum(map(len, histories))
    rates: list[float] = []
    beside: list[float] = []
    for _ in range(bench.pick(21, 2)):
        await trio.lowlevel.checkpoint()
        rates.append(events / _seconds(lambda: play(histories)))
        beside.append(events / _seconds(lambda: [json.loads(line) for line in lines]))
    bench.report.note("core.events", rates, beside)


def events_of(name: str) -> Iterator[Event]:
    """What the fleet is given of a recording, the answers to its look-ups included."""
    lines = read_recording(name)
    truth = truth_of(lines)
    fleet = new_fleet()
    for number, step in enumerate(step for line in lines for step in line.steps):
        now = number * STEP
        yield step
        for decision in fleet.handle(step, now):
            if isinstance(decision, LookUp):
                answer = LookedUp(decision.job, truth.listing(decision.job), fleet.ask(now))
                yield answer
                fleet.handle(answer, now)


def play(histories: list[list[Event]]) -> None:
    for history in histories:
        fleet = new_fleet()
        for number, event in enumerate(history):
            fleet.handle(event, number * STEP)
            fleet.take_changes()


def new_fleet() -> Fleet:
    numbers = count(1)
    fleet = Fleet(settle=3.0, mint=lambda environment: RunnerId(f"{environment}-minted-{next(numbers)}"))
    fleet.know(ENVIRONMENT, 1)
    return fleet


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def measure_memory(bench: Bench) -> None:
    """All that the fleet keeps of a job with its allocation and its idle runner."""
    await trio.lowlevel.checkpoint()
    size = bench.pick(2000, 200)
    fleet = new_fleet()
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(size):
            start_one(fleet, number)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if sum(1 for _ in fleet.runners()) != size:
        raise RuntimeError("not all jobs have become runners")
    bench.report.note("runner.memory", [kept / size / KIB])


def start_one(fleet: Fleet, number: int) -> None:
    """As the local executor tells it. Every text is new, as it is when it has come from outside."""
    job, version, now = JobId(f"{ENVIRONMENT}-{uuid4()}"), 3 * number + 1, number * STEP
    fleet.handle(Start(job, ENVIRONMENT, 1), now)
    fleet.handle(JobSeen(job, version, JobStatus.PENDING), now)
    fleet.handle(Started(job, version), now)
    fleet.handle(JobSeen(job, version + 1, JobStatus.RUNNING), now)
    fleet.handle(
        Allocation(
            id=AllocationId(str(uuid4())),
            job=job,
            version=version + 1,
            created=version,
            client=ClientStatus.RUNNING,
            started=f"{uuid4()}:{number}",
            node_name="here",
            follow_up=None,
            previous=None,
            next=None,
        ),
        now,
    )
    fleet.take_changes()


MEASUREMENTS = (
    Measurement(("core.events",), measure_events),
    Measurement(("runner.memory",), measure_memory),
)

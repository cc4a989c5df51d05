"""Every recording, over a real socket, through the real client, consumer and dispatcher, against what it means."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
import trio

from poseidon.core.events import Claim, Decision, LookedUp, LookUp, Mark, Marked, StopJob
from poseidon.core.fleet import Fleet
from poseidon.core.model import EnvironmentId, JobId, JobState, Phase, Runner, RunnerId
from poseidon.executors.base import Batch
from poseidon.executors.nomad.executor import NomadExecutor, open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.runners.consumer import follow
from poseidon.runners.dispatcher import Dispatcher, NothingQueued, Ticket
from tests.core.nomad_values import RECORDINGS, read_recording, truth_of
from tests.nomad.loopback import Loopback, Reply, Request, open_loopback
from tests.nomad.recorded import Lists, Played, script

EXPECTED: dict[str, Any] = json.loads((RECORDINGS / "expected.json").read_text())["recordings"]
ENVIRONMENT = EnvironmentId(10)
Life = tuple[str, str]

recordings = pytest.mark.parametrize("name", EXPECTED)
claims = pytest.mark.parametrize("claim", ["unclaimed", "first_life_claimed"])


class Rows:
    """No store: what is durable is another test's matter."""

    def submit(self, _work: object) -> Ticket:
        return NothingQueued()


@dataclass
class Clock:
    at: float = 1000.0

    def now(self) -> float:
        return self.at


class Stage(Dispatcher):
    """The dispatcher, and who looks at it: notes what it decides, answers look-ups by what was true at last."""

    def __init__(self, executor: NomadExecutor, name: str, claim: str) -> None:
        numbers = count(1)
        fleet = Fleet(settle=3.0, mint=lambda environment: RunnerId(f"{environment}-minted-{next(numbers)}"))
        self.time = Clock()
        super().__init__(executor, fleet, Rows(), self.time)  # type: ignore[arg-type]
        fleet.know(ENVIRONMENT, 1)
        self.truth = truth_of(read_recording(name))
        """What the executor has, as far as the recording tells."""
        lives = {JobId(job): what["lives"] for job, what in EXPECTED[name]["jobs"].items()}
        self.claim: dict[JobId, Life] = (
            {job: (each[0]["allocation"], each[0]["started"]) for job, each in lives.items() if each}
            if claim == "first_life_claimed"
            else {}
        )
        self.lives: dict[JobId, dict[Life, Runner]] = {}
        self.noted: Counter[tuple[str, JobId]] = Counter()
        self.batches = 0
        self.carry = self._note
        self.on_runner.append(self._see)

    def apply(self, batch: Batch) -> Ticket:
        self.time.at += 0.01
        ticket = super().apply(batch)
        for runner in list(self.fleet.runners()):
            if runner.phase is Phase.IDLE and self.claim.get(runner.job) == (runner.allocation, runner.started):
                self.handle(Claim(runner.id))
        self.batches += 1
        return ticket

    def _see(self, runner: Runner) -> None:
        self.lives.setdefault(runner.job, {})[runner.allocation, runner.started] = runner
        if runner.phase is Phase.GONE and runner.claimed_at is not None:
            self.noted["EndExecutions", runner.job] += 1

    def _note(self, decision: Decision, _ticket: Ticket) -> None:
        match decision:
            case StopJob(job):
                self.noted["StopJob", job] += 1
            case Mark(job, used):
                self.noted["MarkUnused", job] += not used
                self.handle(Marked(job, used))
            case LookUp(job):
                known = self.fleet.job(job)
                if known is not None and not known.adopted:
                    self.handle(LookedUp(job, self.truth.listing(job), self.fleet.ask(self.time.now())))


@dataclass
class Cluster:
    """Plays lines to whoever follows, each when the one before is applied. *in_order*: look-ups know no more yet."""

    stage: Stage
    in_order: bool
    lists: Lists = field(default_factory=Lists)
    played: trio.Event = field(default_factory=trio.Event)

    async def play(self, lines: list[Played], request: Request) -> None:
        await request.stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for each in lines:
            if self.in_order:
                self.stage.truth.take(each.meaning)
            if not each.bytes:
                self.stage.handle(each.meaning.steps[0])
                continue
            before = self.stage.batches
            await request.stream.send_all(b"%x\r\n%s\r\n" % (len(each.bytes), each.bytes))
            while self.stage.batches == before:
                await trio.sleep(0)
        self.played.set()
        await trio.sleep_forever()

    async def jobs(self, _request: Request) -> Reply:
        return Reply(self.lists.job_list(), index=self.lists.index)

    async def allocations(self, _request: Request) -> Reply:
        return Reply(self.lists.allocation_list(), index=self.lists.index)


@asynccontextmanager
async def followed(
    name: str, claim: str, lines: list[Played], *, in_order: bool = False
) -> AsyncIterator[tuple[Stage, Cluster]]:
    """All *lines* have been played, and the stream goes on."""
    async with open_loopback() as nomad, open_nomad(settings(nomad)) as executor, trio.open_nursery() as nursery:
        stage = Stage(executor, name, claim)
        if in_order:
            stage.truth = truth_of([])
        cluster = Cluster(stage, in_order)
        cluster.lists.index = min(json.loads(each.bytes)["Index"] for each in lines if each.bytes) - 1 or 1
        _serve(nomad, cluster, lines)
        await nursery.start(partial(follow, stage))
        with trio.fail_after(20):
            await cluster.played.wait()
        yield stage, cluster
        nursery.cancel_scope.cancel()


def _serve(nomad: Loopback, cluster: Cluster, lines: list[Played]) -> None:
    async def stream(request: Request) -> None:
        while not cluster.stage.listed:  # as it should be: subscribe, list, and only then what is new
            await trio.sleep(0.001)
        await cluster.play(lines, request)

    nomad.on("GET", "/v1/event/stream", stream)
    nomad.on("GET", "/v1/jobs", cluster.jobs)
    nomad.on("GET", "/v1/allocations", cluster.allocations)


def settings(nomad: Loopback) -> NomadSettings:
    return NomadSettings(address=nomad.url, headers_within=0.02, mark_used=False)


async def list_at_last(stage: Stage, cluster: Cluster, lines: list[Played]) -> None:
    """So late that every doubt has lasted long enough."""
    cluster.lists.take(lines)
    stage.time.at += 30
    await stage.list_all()


def check_lives(stage: Stage, name: str, claim: str) -> None:
    stopped = {d["job"] for d in EXPECTED[name][claim]["decisions"] if d["decision"] == "StopJob" and d["at"].isdigit()}
    for job, what in EXPECTED[name]["jobs"].items():
        expected = [(life["allocation"], life["started"], life["ended"]) for life in what["lives"]]
        told = [(r.allocation, r.started, r.reason) for r in stage.lives.get(JobId(job), {}).values()]
        assert told == (expected[:1] if job in stopped else expected), job


def check_decisions(stage: Stage, name: str, claim: str) -> None:
    expected = Counter((d["decision"], d["job"]) for d in EXPECTED[name][claim]["decisions"])
    assert +stage.noted == expected


def check_final(stage: Stage, name: str, claim: str) -> None:
    """Where each job stands at last, whatever the way there."""
    for job, what in EXPECTED[name]["jobs"].items():
        final, state = what["final"], what["state_if_unclaimed"]
        found = {known.id: (state, runner) for known, state, runner in stage.fleet.jobs(ENVIRONMENT)}
        where, runner = found.get(JobId(job), (JobState.ENDED, None))
        seen = str(runner.phase) if runner is not None else "ended" if where is JobState.ENDED else "starting"
        claimed = [each for each in stage.lives.get(JobId(job), {}).values() if each.claimed_at is not None]
        if not claimed:
            assert seen == state, job
        elif final and (final["allocation"], final["started"]) == stage.claim[JobId(job)]:
            assert seen == "used", job
        else:
            assert seen in (state, "ended"), job
        if runner is not None:
            assert (runner.allocation, runner.started) == (final["allocation"], final["started"])
            assert runner.node_name == final["node"]


@recordings
@claims
async def test_a_recording_in_order(name: str, claim: str) -> None:
    lines = script(name)
    async with followed(name, claim, lines, in_order=True) as (stage, cluster):
        await list_at_last(stage, cluster, lines)
        check_lives(stage, name, claim)
        check_decisions(stage, name, claim)
        check_final(stage, name, claim)
        before = stage.noted.copy()
        await stage.list_all()
        assert stage.noted == before


@recordings
async def test_a_recording_with_every_line_doubled(name: str) -> None:
    lines = [each for line in script(name) for each in (line, line)]
    async with followed(name, "unclaimed", lines, in_order=True) as (stage, cluster):
        await list_at_last(stage, cluster, lines)
        check_lives(stage, name, "unclaimed")
        check_decisions(stage, name, "unclaimed")
        check_final(stage, name, "unclaimed")


@recordings
@claims
async def test_a_recording_shuffled_and_listed(name: str, claim: str) -> None:
    lines = script(name)
    acts, others = [each for each in lines if not each.bytes], [each for each in lines if each.bytes]
    Random(name).shuffle(others)
    async with followed(name, claim, [*acts, *others]) as (stage, cluster):
        await list_at_last(stage, cluster, lines)
        check_final(stage, name, claim)


@recordings
@claims
async def test_a_recording_with_losses_and_listed(name: str, claim: str) -> None:
    random = Random(name)
    lines = script(name)
    kept = [each for number, each in enumerate(lines) if not each.bytes or number < 2 or random.random() > 0.3]
    async with followed(name, claim, kept) as (stage, cluster):
        await list_at_last(stage, cluster, lines)
        await list_at_last(stage, cluster, lines)  # a doubt that the first one raises needs a second one
        check_final(stage, name, claim)

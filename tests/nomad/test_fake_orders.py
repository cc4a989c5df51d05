"""The fake cluster's events come in the orders recorded from the real one: each recording is played again on it.

Compared are the lines about the recording's job (and what happens to nodes), with ids replaced by names. Left out are
states that Nomad tells only by chance (what its agents' batches catch) and repeats of what was told before.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.fakes.nomad import NomadFake, open_nomad_fake
from tests.nomad.test_fake_shapes import differences

RECORDINGS = Path(__file__).parent.parent / "recordings"
TOPICS = "topic=Job&topic=Evaluation&topic=Allocation&topic=Node"
Json = dict[str, Any]
Lines = list[list[str]]


# -- what a stream told -----------------------------------------------------------------------------------------------


def recorded_lines(name: str) -> list[Json]:
    with (RECORDINGS / f"{name}.ndjson").open() as file:
        entries = [json.loads(raw).get("line") for raw in file]
    return [line for line in entries if isinstance(line, dict) and "Events" in line]


def recorded_job(name: str, number: int = 0) -> Json:
    """The job of a recording, as it was registered for the *number*th time."""
    events = [event for line in recorded_lines(name) for event in line["Events"]]
    seen = [event["Payload"]["Job"] for event in events if event["Type"] == "JobRegistered" and event["Topic"] == "Job"]
    job: Json = seen[number]
    return job


@dataclass
class Digest:
    """Lines of a stream in words, for one job."""

    job: str
    names: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)

    def lines(self, lines: Iterable[Json]) -> Lines:
        found = [self._line(line["Events"]) for line in lines]
        return [line for line in found if line]

    def _line(self, events: list[Json]) -> list[str]:
        """The order within a line means nothing."""
        oldest_first = sorted(events, key=lambda event: event["Payload"].get("Allocation", {}).get("CreateIndex", 0))
        return sorted(word for event in oldest_first for word in self._words(event))

    def _words(self, event: Json) -> Iterator[str]:
        ((topic, row),) = event["Payload"].items()
        owner = row["ID"] if topic == "Job" else row.get("JobID", self.job)
        if owner != self.job:
            return
        word = getattr(self, f"_{topic.lower()}")(row)
        if word and self.told.get(row["ID"]) != word:
            self.told[row["ID"]] = word
            yield word if topic == "Node" else f"{event['Type']} {word}"

    def _job(self, row: Json) -> str:
        return f"job {row['Status']}{' stop' if row['Stop'] else ''}"

    def _evaluation(self, row: Json) -> str:
        failed = " failed" if row.get("FailedTGAllocs") else ""
        waits = " waits" if row.get("WaitUntil") and row["Status"] == "pending" else ""
        word = f"evaluation {row['TriggeredBy']} {row['Status']}{failed}{waits}"
        return word + f" ({row.get('StatusDescription', '')[:11]})"

    def _allocation(self, row: Json) -> str:
        name = self._name(row["ID"])
        state: Json = next(iter((row.get("TaskStates") or {}).values()), {"Restarts": 0, "Events": []})
        where = f"{row['DesiredStatus']}/{row['ClientStatus']}"
        caught = where == "run/pending" and state["Events"] and state["Restarts"] == 0
        if caught or (where == "stop/running" and state["Events"] and state["Events"][-1]["Type"] == "Killing"):
            return ""
        links = [
            f"{key.lower()} {self._name(row[full]) if full != 'FollowupEvalID' else ''}"
            for key, full in (
                ("Previous", "PreviousAllocation"),
                ("Next", "NextAllocation"),
                ("After", "FollowupEvalID"),
            )
            if row.get(full)
        ]
        migrate = " migrate" if (row.get("DesiredTransition") or {}).get("Migrate") else ""
        out_of_memory = " oom" if _out_of_memory(state) else ""
        return " ".join([f"allocation {name} {where} r{state['Restarts']}", *links]) + migrate + out_of_memory

    def _node(self, row: Json) -> str:
        unhealthy = [name for name, driver in row["Drivers"].items() if driver["Detected"] and not driver["Healthy"]]
        drained = " draining" if row["Drain"] else ""
        word = f"node {row['Status']} {row['SchedulingEligibility']}{drained} {unhealthy or ''}"
        first = row["ID"] not in self.told and word == "node ready eligible "
        return "" if first else word

    def _name(self, id: str) -> str:
        return self.names.setdefault(id, "ABCDEFGHIJ"[len(self.names)])


def _out_of_memory(state: Json) -> bool:
    ends = [event for event in state["Events"] if event["Type"] == "Terminated"]
    return bool(ends) and ends[-1]["Details"].get("oom_killed") == "true"


# -- playing ----------------------------------------------------------------------------------------------------------


@dataclass
class Stage:
    """The fake, with what a recording needs to be played again."""

    fake: NomadFake
    client: httpx.AsyncClient
    name: str
    job: Json = field(default_factory=dict)
    begin: int = 0
    """Index as of which the recording begins."""

    @property
    def id(self) -> str:
        return str(self.job["ID"])

    async def put(self, number: int = 0) -> None:
        self.job = recorded_job(self.name, number)
        await self.client.put("/v1/jobs", json={"Job": self.job})
        await self.calm()

    async def put_again(self) -> None:
        await self.client.put("/v1/jobs", json={"Job": self.job})
        await self.calm()

    async def put_other(self, name: str, number: int = 0) -> None:
        """A job of another recording, from before this one begins."""
        self.job = recorded_job(name, number)
        await self.client.put("/v1/jobs", json={"Job": self.job})
        await self.running()

    def start(self) -> None:
        """The recording begins here."""
        self.begin = self.fake.store.index + 1

    async def delete(self, tail: str = "") -> None:
        await self.client.delete(f"/v1/job/{self.id}{tail}")
        await self.calm()

    async def running(self) -> Json:
        row = await self.fake.running(self.id)
        await self.calm()
        return row

    async def calm(self) -> None:
        """Wait until nothing moves, and all batches have been told."""
        await trio.sleep(0.01)
        await self.fake.settled()
        await trio.sleep(0.02)

    async def end(self, **how: Any) -> None:
        self.fake.end(self.fake.current(self.id)["ID"], **how)
        await self.calm()

    async def until(self, index: int) -> None:
        """Wait for the *index*th allocation of the job to run."""
        await self.fake.until(lambda: len(self.fake.store.of_job(self.id)) > index)
        await self.running()


async def start(stage: Stage) -> None:
    await stage.put()


async def purge(stage: Stage) -> None:
    await stage.put_other("a_start_batch")
    stage.start()
    await stage.delete("?purge=true")


async def stop(stage: Stage) -> None:
    await stage.put_other("a_start_batch")
    stage.start()
    await stage.delete()


async def start_after_stop(stage: Stage) -> None:
    await stage.put_other("a_start_batch")
    await stage.delete()
    stage.start()
    await stage.put_again()


async def purge_at_once(stage: Stage) -> None:
    stage.job = recorded_job(stage.name)
    stage.fake.slow_down_starts(100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial_put, stage)
        await stage.fake.until(lambda: bool(stage.fake.store.of_job(stage.id)))
        await stage.delete("?purge=true")


async def partial_put(stage: Stage) -> None:
    await stage.client.put("/v1/jobs", json={"Job": stage.job})


async def exit_0(stage: Stage) -> None:
    await stage.put()
    await stage.end(exit_code=0, signal=0)


async def kill_once(stage: Stage) -> None:
    await stage.put()
    await stage.end()


async def kill_once_slowly(stage: Stage) -> None:
    await stage.put()
    await stage.end()
    await stage.fake.running(stage.id)
    await stage.calm()


async def kill_four_times(stage: Stage) -> None:
    await stage.put()
    for _ in range(4):
        await stage.end()
    await stage.until(1)


async def fail_twice(stage: Stage) -> None:
    await stage.put()
    for index in (1, 2):
        await stage.end()
        await stage.until(index)


async def restart(stage: Stage) -> None:
    await stage.put()
    await stage.end(asked=True)


async def stop_allocation(stage: Stage) -> None:
    await stage.put()
    await stage.client.put(f"/v1/allocation/{stage.fake.current(stage.id)['ID']}/stop")
    await stage.until(1)


async def drain_by_force(stage: Stage) -> None:
    await stage.put()
    node = stage.fake.node_of(stage.id)
    stage.fake.make_stubborn(stage.fake.current(stage.id)["ID"])
    await stage.client.put(f"/v1/node/{node}/drain", json={"DrainSpec": {"Deadline": -1}})
    await stage.until(1)
    await stage.client.put(f"/v1/node/{node}/drain", json={"DrainSpec": None, "MarkEligible": True})
    await stage.calm()


async def lose_and_return(stage: Stage) -> None:
    await stage.put()
    node = stage.fake.node_of(stage.id)
    stage.fake.kill_agent(node)
    await stage.until(1)
    await stage.fake.revive_agent(node)
    await stage.fake.until(lambda: stage.fake.store.of_job(stage.id)[0]["ClientStatus"] == "complete")
    await trio.sleep(0.1)


async def bounce(stage: Stage) -> None:
    await stage.put()
    node = stage.fake.node_of(stage.id)
    stage.fake.kill_agent(node)
    await stage.fake.revive_agent(node)
    await trio.sleep(0.15)
    await stage.calm()


async def impossible(stage: Stage) -> None:
    await stage.put()
    await stage.delete("?purge=true")


async def constraint(stage: Stage) -> None:
    await stage.put()
    await stage.put(1)


async def unhealthy(stage: Stage) -> None:
    stage.fake.set_driver("docker", healthy=False, node="nomad-agent-2")
    stage.fake.set_driver("docker", healthy=False, node="nomad-agent-1")
    await stage.put()
    stage.fake.set_driver("docker", healthy=True, node="nomad-agent-1")
    stage.fake.set_driver("docker", healthy=True, node="nomad-agent-2")
    await stage.calm()
    assert not stage.fake.store.of_job(stage.id)
    await stage.put_again()


async def change(stage: Stage) -> None:
    await stage.put()
    await stage.put(1)
    await stage.until(1)


async def change_meta(stage: Stage) -> None:
    for number in (0, 1):
        await stage.put_other("i_update_destructive_batch", number)
    stage.start()
    await stage.put()
    await stage.until(2)


async def change_config(stage: Stage) -> None:
    for number in (0, 1):
        await stage.put_other("i_update_destructive_batch", number)
    await stage.put_other("i_update_job_meta_is_destructive_batch")
    await stage.until(2)
    stage.start()
    await stage.put()


async def unchanged(stage: Stage) -> None:
    await stage.put_other("a_start_batch")
    stage.start()
    await stage.put_again()


async def out_of_memory(stage: Stage) -> None:
    await stage.put()
    await stage.end(oom=True, signal=0)


async def out_of_memory_for_ever(stage: Stage) -> None:
    await stage.put()
    for _ in range(4):
        await stage.end(oom=True, signal=0, delay=0.3)
    await stage.until(1)


SCENES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "a_start_batch": start,
    "a_batch_exits_0": exit_0,
    "b_stop_purge_batch": purge,
    "b_stop_nopurge_batch": stop,
    "b_restart_after_stop_batch": start_after_stop,
    "b_purge_right_after_register": purge_at_once,
    "c_kill9_restart_delay2s_batch": kill_once_slowly,
    "c_kill9_restart_fail_batch": kill_four_times,
    "c_kill9_attempts0_no_reschedule_batch": kill_once,
    "c_kill9_attempts0_reschedule_twice_batch": fail_twice,
    "d_alloc_restart_batch": restart,
    "d_alloc_stop_batch": stop_allocation,
    "e_drain_batch_force": drain_by_force,
    "f_client_killed_lost_and_back_batch": lose_and_return,
    "f_client_killed_quick_bounce_batch": bounce,
    "h_impossible_cpu_batch": impossible,
    "h_impossible_constraint_batch": constraint,
    "i_update_destructive_batch": change,
    "i_update_job_meta_is_destructive_batch": change_meta,
    "i_update_only_config_group_meta_batch": change_config,
    "i_register_unchanged_batch": unchanged,
    "docker/d_alloc_stop_docker": stop_allocation,
    "docker/g_oom_docker_main_attempts0_no_reschedule": out_of_memory,
    "docker/g_oom_docker_main_restarts": out_of_memory_for_ever,
    "docker/o_job_registered_while_docker_unhealthy": unhealthy,
}


@asynccontextmanager
async def staged(name: str) -> AsyncIterator[tuple[Stage, list[Json]]]:
    """A fake whose whole stream is kept."""
    lines: list[Json] = []
    nodes = 2 if name.startswith("docker/") else 3
    with trio.fail_after(20):
        async with (
            open_nomad_fake(nodes=nodes, cpu=10_000, memory=6_000, buffer=10_000) as fake,
            httpx.AsyncClient(base_url=fake.url) as client,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_follow, client, lines)
            yield Stage(fake, client, name, begin=fake.store.index + 1), lines
            await trio.sleep(0.02)
            nursery.cancel_scope.cancel()


async def _follow(client: httpx.AsyncClient, lines: list[Json]) -> None:
    async with client.stream("GET", f"/v1/event/stream?{TOPICS}", timeout=None) as answer:
        async for line in answer.aiter_lines():
            lines.append(json.loads(line))


async def play(name: str) -> tuple[Stage, list[Json]]:
    async with staged(name) as (stage, lines):
        await SCENES[name](stage)
    return stage, [line for line in lines if line.get("Index", 0) >= stage.begin]


@pytest.mark.parametrize("name", SCENES)
async def test_events_come_in_the_recorded_order(name: str) -> None:
    stage, lines = await play(name)
    told = Digest(stage.id).lines(lines)
    wanted = Digest(recorded_id(name, stage.id)).lines(recorded_lines(name))
    if name == "b_purge_right_after_register":  # two evaluations at once
        told, wanted = sorted(told), sorted(wanted)
    assert told == wanted


def recorded_id(name: str, job: str) -> str:
    """The job that the recording is about: ours, if it is told there at all."""
    rows = [row for line in recorded_lines(name) for event in line["Events"] for row in event["Payload"].values()]
    owners = [row["JobID"] for row in rows if "JobID" in row]
    return job if job in owners else str(owners[0])


@pytest.mark.parametrize("name", SCENES)
async def test_events_have_the_recorded_shapes(name: str) -> None:
    stage, lines = await play(name)
    models = shapes(recorded_lines(name), recorded_id(name, stage.id))
    told = shapes(lines, stage.id)
    wrong = [f"{key}: {what}" for key in models.keys() & told.keys() for what in differences(models[key], told[key])]
    assert not wrong, "\n".join(wrong)
    assert models.keys() & told.keys()


def shapes(lines: list[Json], job: str) -> dict[tuple[str, ...], Json]:
    """One event for each kind of event and state."""
    found: dict[tuple[str, ...], Json] = {}
    for event in (event for line in lines for event in line["Events"]):
        ((topic, row),) = event["Payload"].items()
        if topic != "Node" and job not in (row["ID"], row.get("JobID")):
            continue
        state = [str(row.get(key, "")) for key in ("Status", "DesiredStatus", "ClientStatus", "TriggeredBy")]
        extras = sorted(key for key in row if key in ("PreviousAllocation", "NextAllocation", "DesiredTransition"))
        task: Json = next(iter((row.get("TaskStates") or {}).values()), {})
        times = [key for key in ("LastRestart", "StartedAt", "FinishedAt") if task.get(key)]
        found.setdefault((topic, event["Type"], *state, *extras, str(bool(task)), *times), event)
    return found

"""A small Nomad cluster for tests: real HTTP and WebSockets on 127.0.0.1, jobs and allocations in memory.

    async with open_nomad_fake(nodes=2, seed=0, speed=50) as fake:
        ...                                   # fake.url is what a client of Nomad wants
        await fake.running("10-…")            # until that job has a running allocation
        fake.drain(fake.node_of("10-…"))      # and so on: every method below is something that happens to a cluster

It does what Nomad 1.1 was recorded doing (tests/nomad/test_fake_*.py compare both): one index over all changes, orders
of events, shapes, statuses, plain texts of errors. All of Nomad's durations are divided by *speed* (its heartbeat of
30 s comes each 0.6 s at 50). Choices are made by *seed*.

What to look at: `jobs`, `allocations`, `evaluations`, `nodes` (rows by id, as the API tells them), `current(job)`,
`requests` (every request so far), `rooms.sessions` (executions so far).

What to order: the methods, and
- `stream`: drop, double, reorder, delay by chance; its `orders` for the next lines;
- `fault(...)`: a request that fails, hangs, is refused, or whose answer is lost;
- `rooms.behaviour`: executions that end badly. Their commands really run, in a folder and (Docker) a process namespace
  of their allocation, which end with the life of its task.
`heal` ends all troubles. `nomad_chaos.trouble` makes such things happen at random.

By hand: `python -m tests.fakes.nomad --port 4646`.
"""

import argparse
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import trio

from tests.fakes.nomad_agents import Agent, End
from tests.fakes.nomad_api import Api, Fault, migrate
from tests.fakes.nomad_exec import Behaviour
from tests.fakes.nomad_http import Server
from tests.fakes.nomad_nodes import Nodes
from tests.fakes.nomad_placement import Placement, Refusal
from tests.fakes.nomad_rooms import Rooms
from tests.fakes.nomad_scheduler import Scheduler
from tests.fakes.nomad_shapes import SECOND, TERMINAL, Clock, Ids, Json
from tests.fakes.nomad_store import Purges, Store
from tests.fakes.nomad_stream import Disturbance, Streams

DRIVERS: Final = ("docker", "raw_exec", "exec")


@dataclass
class NomadFake:
    store: Store
    scheduler: Scheduler
    parts: Nodes
    streams: Streams
    api: Api
    server: Server
    nursery: trio.Nursery
    rooms: Rooms

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def jobs(self) -> dict[str, Json]:
        return self.store.jobs

    @property
    def allocations(self) -> dict[str, Json]:
        return self.store.allocations

    @property
    def evaluations(self) -> dict[str, Json]:
        return self.store.evaluations

    @property
    def nodes(self) -> dict[str, Json]:
        return self.store.nodes

    @property
    def requests(self) -> list[tuple[str, str]]:
        return self.api.requests

    @property
    def stream(self) -> Disturbance:
        return self.streams.disturbance

    # -- looking ------------------------------------------------------------------------------------------------------

    def current(self, job: str) -> Json:
        """The newest allocation of *job* that is meant to run (or the newest at all)."""
        rows = self.store.of_job(job)
        wanted = [row for row in rows if row["DesiredStatus"] == "run"]
        return (wanted or rows)[-1]

    def node_of(self, job: str) -> str:
        node: str = self.current(job)["NodeID"]
        return node

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of this cluster."""
        await self.store.until(holds)

    async def running(self, job: str) -> Json:
        """Wait until *job* has a running allocation, and give it."""

        def runs() -> bool:
            return bool(self.store.of_job(job)) and self.current(job)["ClientStatus"] == "running"

        await self.until(runs)
        return self.current(job)

    async def settled(self) -> None:
        """Wait until nothing is under way: all allocations run or are over, all evaluations but blocked ones ended."""

        def calm() -> bool:
            rows = self.allocations.values()
            moving = [row for row in rows if row["ClientStatus"] == "pending" or _leaving(row)]
            waiting = [row for row in self.evaluations.values() if row["Status"] == "pending"]
            return not (moving or waiting or self.store.queue)

        while not calm():  # not `until`: it would look through everything at each change
            await trio.sleep(0.002)

    # -- jobs and tasks -----------------------------------------------------------------------------------------------

    def end(self, allocation: str, **how: object) -> None:
        """The task of an allocation ends as `End` tells (killed by signal 9 if nothing is told)."""
        self._agent(allocation).end(allocation, End(**how))  # type: ignore[arg-type]

    def restart(self, allocation: str, *, delay: float = 0.0) -> None:
        """Its task is killed and starts again in place; without a delay it is never seen pending."""
        self.end(allocation, delay=delay)

    def fail(self, allocation: str) -> None:
        """Its task ends, and its agent gives it up; it comes back elsewhere if its job's policy says so."""
        self.end(allocation, fails=True)

    def out_of_memory(self, allocation: str, *, delay: float | None = None) -> None:
        self.end(allocation, oom=True, signal=0, delay=delay)

    def stop_allocation(self, allocation: str) -> None:
        """`nomad alloc stop`: it is moved."""
        migrate(self.store, [allocation], "alloc-stop")

    def make_stubborn(self, allocation: str) -> None:
        """Its task ignores signals: it takes the whole kill timeout to stop."""
        self._agent(allocation).runs[allocation].stubborn = True

    def slow_down_starts(self, seconds: float | None) -> None:
        """Tasks need so long to start (Nomad's time); None: as usual."""
        for agent in self.parts.agents.values():
            agent.setup = seconds

    def repeat(self, allocation: str) -> None:
        """Its agent tells of it once more, though nothing is new."""
        self._agent(allocation).repeat(allocation)

    def collect_garbage(self) -> None:
        """`nomad system gc`."""
        self.store.collect_garbage()

    def _agent(self, allocation: str) -> Agent:
        return self.parts.agents[self.allocations[allocation]["NodeID"]]

    # -- nodes --------------------------------------------------------------------------------------------------------

    def drain(self, node: str, *, deadline: float | None = None) -> None:
        """Move all away from *node*: at *deadline* (seconds), or by force, a second from now."""
        spec = {"Deadline": -1 if deadline is None else int(deadline * SECOND)}
        self.parts.drain(self.parts.find(node), spec, False)

    def end_drain(self, node: str) -> None:
        self.parts.end_drain(self.parts.find(node))

    def kill_agent(self, node: str) -> None:
        """kill -9: six seconds later its node is down and its allocations are lost."""
        self.parts.kill(self.parts.find(node))

    async def revive_agent(self, node: str) -> None:
        """Start it again. What was lost runs again for a moment, and is stopped."""
        await self.parts.revive(self.parts.find(node))

    def set_driver(self, driver: str, *, healthy: bool, node: str | None = None) -> None:
        """A driver's health, on one node or on all. What is registered while all are unhealthy is blocked for ever."""
        self.parts.set_driver(driver, healthy=healthy, id=None if node is None else self.parts.find(node))

    # -- placement ----------------------------------------------------------------------------------------------------

    def refuse_placement(self, *, dimension: str = "", constraint: str = "", jobs: str = "*") -> None:
        """No node takes *jobs* (a pattern): a *dimension* is exhausted ("memory"), or a *constraint* filters all."""
        self.scheduler.placement.refusals.append(Refusal(jobs, dimension, constraint))

    def allow_placement(self) -> None:
        """End all refusals. What was exhausted is placed now, what was filtered only when its job is put again."""
        self.scheduler.placement.refusals.clear()
        self.scheduler.capacity()

    # -- servers ------------------------------------------------------------------------------------------------------

    def lose_leader(self, seconds: float | None = None) -> None:
        """Nothing can be written or read (but stale); for *seconds* of Nomad's time, or until `elect_leader`."""
        self.store.leader = False
        if seconds is not None:
            self._later(seconds, self.elect_leader)

    def elect_leader(self) -> None:
        self.store.leader = True
        self.store.moved.unpark_all()

    def stop_server(self, seconds: float | None = None, *, abruptly: bool = True) -> None:
        """The server is down: connections break off, new ones are refused; for *seconds*, or until `start_server`."""
        self.server.stop(abruptly=abruptly)
        if seconds is not None:
            self.nursery.start_soon(self._start_later, seconds)

    async def start_server(self) -> None:
        """It listens on its port again, and still knows everything, its buffer of events included."""
        await self.nursery.start(self.server.listen)

    async def _start_later(self, seconds: float) -> None:
        await trio.sleep(self.store.clock.scaled(seconds))
        await self.start_server()

    def snapshot(self) -> Store:
        return self.store.snapshot()

    def restore(self, snapshot: Store) -> None:
        """The cluster goes back to *snapshot*: `nomad operator snapshot restore`. Streams end."""
        self.store.restore(snapshot)
        self.streams.cut("clean")

    def refuse_tokens(self, token: str) -> None:
        """From now on only *token* is valid; open streams are ended as Nomad ends them then."""
        self.api.tokens.clear()
        self.api.tokens.add(token)
        self.streams.close()

    def accept_all(self) -> None:
        """No token is needed any more."""
        self.api.tokens.clear()

    # -- requests and the stream --------------------------------------------------------------------------------------

    def fault(self, path: str = "/", method: str = "", **what: object) -> Fault:
        """What is to happen to requests: see `Fault`. `fault("/v1/jobs", "PUT", lost="after")`."""
        made = Fault(path, method, **what)  # type: ignore[arg-type]
        self.api.faults.append(made)
        return made

    def cut_streams(self, how: str = "eof", *, at: int | None = None) -> None:
        """End open event streams ("clean", "eof" or "reset"): now, or *at* bytes into their next line."""
        self.streams.cut(how, at)

    def say(self, data: bytes) -> None:
        """Send bytes of our own on open event streams, as they are."""
        self.streams.say(data)

    def fall_silent(self, seconds: float | None = None) -> None:
        """Open streams tell nothing, not even heartbeats."""
        self.stream.silent = True
        if seconds is not None:
            self._later(seconds, self.speak)

    def speak(self) -> None:
        self.stream.silent = False
        self.streams.wake()

    async def heal(self) -> None:
        """End all troubles: leader, tokens, placement, drivers, nodes, stream and requests are as they should be."""
        self.elect_leader()
        self.accept_all()
        self.api.faults.clear()
        self.rooms.behaviour = Behaviour()
        self.slow_down_starts(None)
        self.stream.calm()
        self.speak()
        if not self.server.listening:
            await self.start_server()
        for id, node in list(self.nodes.items()):
            if not self.parts.agents[id].alive:
                await self.parts.revive(id)
            if node["Drain"] or node["SchedulingEligibility"] != "eligible":
                self.parts.end_drain(id)
            for driver, health in node["Drivers"].items():
                if not health["Healthy"]:
                    self.parts.set_driver(driver, healthy=True, id=id)
        self.allow_placement()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        async def wait() -> None:
            await trio.sleep(self.store.clock.scaled(seconds))
            call()

        self.nursery.start_soon(wait)


def _leaving(row: Json) -> bool:
    return row["DesiredStatus"] != "run" and row["ClientStatus"] not in TERMINAL


@asynccontextmanager
async def open_nomad_fake(
    *,
    nodes: int = 2,
    seed: int = 0,
    speed: float = 50.0,
    port: int = 0,
    drivers: Sequence[str] = DRIVERS,
    cpu: int = 100_000,
    memory: int = 100_000,
    tokens: Sequence[str] = (),
    buffer: int = 100,
    purges: Purges = "untold",
    connections: int | None = None,
) -> AsyncIterator[NomadFake]:
    """A cluster that has just come up.

    *buffer*: lines that its stream keeps. *purges*: whether they are told as Job events, as newer versions do.
    *connections*: how many a client may open (http_max_conns_per_client).
    """
    random = Random(seed)
    store = Store(Clock(speed), Ids(random), purges=purges)
    store.buffer.size = buffer
    scheduler = Scheduler(store, random, Placement(store, random))
    streams = Streams(store, Disturbance(random))
    with tempfile.TemporaryDirectory(prefix="nomad-fake-") as root:
        async with trio.open_nursery() as nursery:
            agents: dict[str, Agent] = {}
            rooms = Rooms(store, agents, nursery, Path(root), lambda: api.tokens)
            parts = Nodes(store, scheduler, nursery, random, rooms.end, agents)
            api = Api(store, scheduler, streams, agents, rooms.serve, lambda: server.address, parts.drain)
            api.tokens.update(tokens)
            server = Server(api, port, connections)
            await nursery.start(server.listen)
            for number in range(1, nodes + 1):
                await parts.add(number, api, drivers, cpu, memory)
            nursery.start_soon(scheduler.run)
            try:
                yield NomadFake(store, scheduler, parts, streams, api, server, nursery, rooms)
            finally:
                rooms.close()
            nursery.cancel_scope.cancel()


async def _serve(port: int, nodes: int, seed: int, speed: float) -> None:
    async with open_nomad_fake(nodes=nodes, seed=seed, speed=speed, port=port) as fake:
        print(f"{nodes} nodes at {fake.url} (Ctrl-C ends)")
        await trio.sleep_forever()


def main() -> None:
    options = argparse.ArgumentParser(description="A fake Nomad cluster, for trying by hand.")
    options.add_argument("--port", type=int, default=4646)
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--speed", type=float, default=1.0)
    given = options.parse_args()
    with suppress(KeyboardInterrupt):
        trio.run(partial(_serve, given.port, given.nodes, given.seed, given.speed))


if __name__ == "__main__":
    main()

"""A daemon's shell, its clients and what they were given, on a cluster in which everything goes wrong.

What the clients remember is the measure: nothing of it is read back from the daemon.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import EnvironmentId, Phase, Reason, Runner, RunnerId
from poseidon.core.pool import BackOff
from poseidon.errors import Overloaded, RunnerGone
from poseidon.executors.base import Stream
from poseidon.executors.nomad import wrap
from poseidon.executors.nomad.executor import open_nomad
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.runners import carrier, refresher
from poseidon.runners.delays import Delays
from poseidon.runners.execution_outcomes import Input, Outcome
from poseidon.runners.executions import Executions, open_executions
from poseidon.store.queries import load_statistics
from tests.fakes import nomad_chaos
from tests.fakes.nomad import NomadFake
from tests.runners.shell import Rig, environment, open_rig

POOLS = {EnvironmentId(1): 4, EnvironmentId(10): 3}
"""One id begins like the other."""
SPEED = 50.0
FOREIGN = 77
"""The exit code of a command that finds the traces of another client."""
PROMPT = 1.0
"""Seconds from the news of a runner's end to the end of its executions; real ones, for the machine may be busy."""
UNHEARD = 5
"""Seconds after which a command's script gives up that was told nothing; real ones."""
FATE = frozenset(
    {
        Reason.RESTARTED,
        Reason.MIGRATED,
        Reason.STOPPED,
        Reason.COMPLETE,
        Reason.FAILED,
        Reason.LOST,
        Reason.DISCONNECTED,
        Reason.OUT_OF_MEMORY,
        Reason.DEAD,
        Reason.UNSTOPPABLE,
    }
)
"""Why a client's runner may be gone, if the client didn't release it: none of these is the daemon's own whim."""


def settings(fake: NomadFake) -> NomadSettings:
    """Nomad's durations at its speed; those of sockets only as short as a busy machine allows."""
    return NomadSettings(
        address=fake.url,
        set_user="",
        settle=3 / SPEED,
        list_interval=30 / SPEED,
        start_timeout=250 / SPEED,
        connect_timeout=5.0,
        request_timeout=5.0,
        list_timeout=10.0,
        evaluation_timeout=10 / SPEED,
        evaluation_look_ups=0.2 / SPEED,
        driver_retry=1 / SPEED,
        headers_within=0.1,
        stream_silence=75 / SPEED,
        exec_heartbeat=10 / SPEED,
        node_address_ttl=600 / SPEED,
    )


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's own waits are no settings: they are shortened likewise."""
    usual = Delays.next
    monkeypatch.setattr(Delays, "next", lambda delays: usual(delays) / SPEED)
    monkeypatch.setattr(BackOff, "FIRST", 1 / SPEED)
    monkeypatch.setattr(BackOff, "MOST", 60 / SPEED)
    monkeypatch.setattr(refresher, "TOO_SHORT", 30 / SPEED)
    monkeypatch.setattr(refresher, "INTERVAL", 30 / SPEED)
    monkeypatch.setattr(refresher, "SOON", 0.1)
    monkeypatch.setattr(carrier, "CHECK_INTERVAL", 0.1)
    for script in ("RUN", "STDERR"):  # what is cut off before it has heard anything gives up by itself
        text = getattr(wrap, script).replace(f"-t {wrap.NONCE_WITHIN}", f"-t {UNHEARD}")
        monkeypatch.setattr(wrap, script, text)


@dataclass
class Daemon:
    """One life of the service."""

    rig: Rig
    executions: Executions
    gone: dict[RunnerId, float] = field(default_factory=dict)
    """When each runner's end became known; not by what tells executions of it."""

    def note(self, runner: Runner) -> None:
        if runner.phase is Phase.GONE:
            self.gone[runner.id] = trio.current_time()

    def crashes(self) -> list[str]:
        """Services that have crashed: trouble in the cluster is none in the daemon."""
        return [f"{each.name} crashed: {each.error}" for each in self.rig.supervisor.status() if each.crashes]


@asynccontextmanager
async def open_daemon(fake: NomadFake, folder: Path) -> AsyncIterator[Daemon]:
    """Opened again on the same folder it is one that was restarted."""
    async with (
        open_nomad(settings(fake)) as executor,
        open_rig(folder, executor, claim_wait=1.0) as rig,  # type: ignore[arg-type]
        open_executions(rig.shell.claims, rig.store, rig.shell.clock.now, expiry=60) as executions,
    ):
        daemon = Daemon(rig, executions)
        rig.shell.dispatchers[executor.name].on_runner.append(daemon.note)
        yield daemon


async def put_environments(daemon: Daemon) -> None:
    for id, size in POOLS.items():
        wanted = environment(size, id=id, executor="nomad", cpu_limit=20, memory_limit=100)
        await daemon.rig.shell.environments.put(wanted)


@dataclass
class Ear:
    """A client of one execution, who only listens."""

    outcome: Outcome | None = None
    ended_at: float = 0.0

    async def start(self) -> None: ...

    async def receive(self) -> Input:
        await trio.sleep_forever()
        raise AssertionError

    async def output(self, stream: Stream, data: bytes) -> None: ...

    async def end(self, outcome: Outcome) -> None:
        self.outcome, self.ended_at = outcome, trio.current_time()


@dataclass(frozen=True, slots=True)
class Given:
    """A runner that a client was given, as it was then."""

    client: int
    runner: Runner


@dataclass
class Ledger:
    """What all clients were given, and what went wrong."""

    given: list[Given] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def twice(self) -> list[str]:
        """Runners and allocations that were given more than once."""
        runners = Counter(each.runner.id for each in self.given)
        places = Counter(each.runner.allocation for each in self.given)
        return [f"{what} was given {times} times" for what, times in (runners + places).items() if times > 1]


@dataclass
class Client:
    """Claims, executes, releases; it outlives the daemon, and keeps its runner meanwhile."""

    number: int
    random: Random
    ledger: Ledger
    held: Runner | None = None
    lost: list[Runner] = field(default_factory=list)
    """Runners that have gone under it."""

    async def live(self, daemon: Daemon) -> None:
        while True:
            await self._claim(daemon)
            try:
                await self._use(daemon)
            except RunnerGone:
                await self._mourn(daemon)
            await trio.sleep(self.random.uniform(0, 0.1))

    async def _claim(self, daemon: Daemon) -> None:
        while self.held is None:
            wanted = self.random.choice(list(POOLS))
            try:
                self.held = await daemon.rig.shell.claims.claim(wanted, timeout=0)
            except Overloaded:
                continue
            self.ledger.given.append(Given(self.number, self.held))
            if self.held.environment != wanted:
                self.ledger.wrongs.append(f"{self.held.id} was given for environment {wanted}")

    async def _use(self, daemon: Daemon) -> None:
        assert self.held is not None
        for _ in range(self.random.randint(0, 3)):
            await trio.sleep(self.random.uniform(0, 0.3))
            daemon.rig.shell.claims.used(self.held.id)
            if self.random.random() < 0.3:
                await self._execute(daemon, self.held)
        held, self.held = self.held, None  # whatever becomes of the request, it is done with it
        try:
            await daemon.rig.shell.claims.release(held.id)
        except RunnerGone:
            self.held = held
            raise

    async def _execute(self, daemon: Daemon, runner: Runner) -> None:
        """Look for the traces of others, leave our own, and perhaps stay for too long."""
        mark = f"{self.number}-{runner.id}"
        line = f'if test -e taken && test "$(cat taken)" != {mark}; then exit {FOREIGN}; fi; echo {mark} > taken'
        stays = self.random.random() < 0.6
        ear = Ear()
        command = Command(f"{line}; sleep 300" if stays else line, tty=self.random.random() < 0.3)
        id = await daemon.executions.create(runner.id, command)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._lose_patience, daemon, runner, nursery.cancel_scope)
            with suppress(RunnerGone):  # the next that it wants of its runner tells it
                await daemon.executions.run(runner.id, id, ear)
            nursery.cancel_scope.cancel(reason="it has ended")
        self._judge(runner, ear, daemon.gone.get(runner.id))

    async def _lose_patience(self, daemon: Daemon, runner: Runner, listening: trio.CancelScope) -> None:
        """Hang up after a while; not before an execution should have ended whose runner is gone."""
        await trio.sleep(self.random.uniform(0.1, 1))
        while (gone := daemon.gone.get(runner.id)) is not None and trio.current_time() < gone + 1.1 * PROMPT:
            await trio.sleep(0.02)
        listening.cancel(reason="it takes too long")

    def _judge(self, runner: Runner, ear: Ear, gone: float | None) -> None:
        ended = trio.current_time() if ear.outcome is None else ear.ended_at
        if gone is not None and ended - gone > PROMPT:
            self.ledger.wrongs.append(f"an execution in {runner.id} outlived it by {ended - gone:.2f} s")
        if ear.outcome is not None:
            self.ledger.outcomes[ear.outcome.ending] += 1
            if ear.outcome.code == FOREIGN:
                self.ledger.wrongs.append(f"client {self.number} found another one's traces in {runner.id}")

    async def _mourn(self, daemon: Daemon) -> None:
        """Its runner is gone: the answer must say why, and the runner must be out of reach."""
        assert self.held is not None
        runner, self.held = self.held, None
        self.lost.append(runner)
        self.ledger.wrongs += [wrong async for wrong in _wrongs_of_gone(daemon, runner)]
        if (facts := await daemon.rig.shell.claims.tell(runner.id)) is not None:
            self.ledger.fates[str(facts.reason)] += 1

    async def look_back(self, daemon: Daemon) -> None:
        """When all is quiet: what was lost is still answered for, in whichever life of the daemon it was lost."""
        if self.held is not None and daemon.rig.fleet.runner(self.held.id) is None:
            await self._mourn(daemon)
        for runner in self.lost:
            self.ledger.wrongs += [wrong async for wrong in _wrongs_of_gone(daemon, runner)]


async def _wrongs_of_gone(daemon: Daemon, runner: Runner) -> AsyncIterator[str]:
    facts = await daemon.rig.shell.claims.tell(runner.id)
    if facts is None or facts.phase is not Phase.GONE or facts.reason not in FATE:
        yield f"{runner.id} went under its client, and is told as {facts}"
    try:
        await daemon.executions.create(runner.id, Command("true"))
    except RunnerGone as gone:
        if gone.status != 410:
            yield f"{runner.id} is gone, and answers {gone.status}"
    else:
        yield f"{runner.id} is gone, and may still be executed in"


class Storm:
    """Everything goes wrong from `begin` on, a drain and an agent's death among it, until `end`."""

    def __init__(self, fake: NomadFake, seed: int) -> None:
        self._fake = fake
        self._seed = seed
        self._scopes: list[trio.CancelScope] = []
        self._abating = False
        self._raging = 0

    def begin(self) -> None:
        random = Random(self._seed)
        for number in range(2):
            seed, pause = 2 * self._seed + number, random.uniform(2, 10)
            self._fake.nursery.start_soon(self._rage, seed, pause, tuple(map(self._whole, nomad_chaos.ALL)))
        for kind in (nomad_chaos.drain, nomad_chaos.lose_agent):
            self._fake.nursery.start_soon(self._once, kind, random)

    async def end(self) -> None:
        """Carry through what has begun, for a half revived agent is none of Nomad's states; then heal everything."""
        self._abating = True
        while self._raging:
            await trio.sleep(0.005)
        for scope in self._scopes:
            scope.cancel(reason="enough")
        await self._fake.heal()

    async def _rage(self, seed: int, pause: float, kinds: tuple[nomad_chaos.Trouble, ...]) -> None:
        with trio.CancelScope() as scope:
            self._scopes.append(scope)
            await nomad_chaos.trouble(self._fake, seed, pause=pause, kinds=kinds)

    async def _once(self, kind: nomad_chaos.Trouble, random: Random) -> None:
        await trio.sleep(random.uniform(0, 0.5))
        await self._whole(kind)(self._fake, random)

    def _whole(self, kind: nomad_chaos.Trouble) -> nomad_chaos.Trouble:
        async def counted(fake: NomadFake, random: Random) -> None:
            if self._abating:
                return
            self._raging += 1
            try:
                await kind(fake, random)
            finally:
                self._raging -= 1

        return counted


class Quiet:
    """What must hold once nothing more happens."""

    def __init__(self, fake: NomadFake, daemon: Daemon, clients: list[Client]) -> None:
        self._fake = fake
        self._daemon = daemon
        self._clients = clients

    async def reached(self, *, within: float) -> None:
        """Wait until all agree; the failure says who doesn't."""
        wrongs = ["the cluster is still moving"]
        with trio.move_on_after(within):
            await self._fake.settled()
            await self._daemon.rig.shell.environments.fetch()  # a template whose task had ended is collected as garbage
            while wrongs := await self._wrongs():
                await trio.sleep(0.05)
        assert not wrongs, "\n".join(wrongs)

    async def _wrongs(self) -> list[str]:
        by_store = await self._daemon.rig.store.write(partial(load_statistics, since=0.0))
        told = self._daemon.rig.shell.environments.statistics()
        held = Counter(
            client.held.environment
            for client in self._clients
            if client.held is not None and self._daemon.rig.fleet.runner(client.held.id) is not None
        )
        wrongs: list[str] = []
        for id, size in POOLS.items():
            counts = by_store.runners.get(id, {})
            stored = counts.get(Phase.IDLE, 0), counts.get(Phase.USED, 0)
            if stored != (size, held[id]) or (told[id].idle, told[id].used) != stored:
                wrongs.append(f"environment {id}: {size=}, held {held[id]}, told {told[id]}, stored {stored}")
        return [*wrongs, *self._unequal(), *self._left(), *self._unheld()]

    def _unequal(self) -> Iterator[str]:
        """Nomad and the fleet have the same jobs, each with a running task, that of its runner."""
        fleet = self._daemon.rig.fleet
        lives = {runner.job: (runner.allocation, runner.phase is Phase.USED) for runner in fleet.runners()}
        templates = {f"template-{id}" for id in POOLS}
        known = {job.id for id in fleet.environments() for job, _, _ in fleet.jobs(id)}
        if set(self._fake.jobs) - templates != set(lives) or known != set(lives):
            yield f"jobs: nomad {sorted(self._fake.jobs)}, fleet {sorted(known)}, living {sorted(lives)}"
        for job, (allocation, used) in lives.items():
            row = self._fake.allocations.get(allocation)
            if row is None or (row["ClientStatus"], row["DesiredStatus"]) != ("running", "run"):
                yield f"{job} doesn't run in {allocation}"
            elif _is_marked(self._fake.jobs.get(job, {"TaskGroups": []})) is not used:
                yield f"{job} is marked wrongly"
        if templates - set(self._fake.jobs):
            yield f"templates are missing: {templates - set(self._fake.jobs)}"

    def _left(self) -> Iterator[str]:
        """No task that isn't a known runner's, none twice, and no process of an execution."""
        wanted = {runner.allocation for runner in self._daemon.rig.fleet.runners()}
        agents = self._fake.parts.agents.values()
        running = Counter(
            id for agent in agents for id, run in agent.runs.items() if run.state["State"] == "running" and not run.over
        )
        tasks = {id for id in running if not self._fake.allocations[id]["JobID"].startswith("template-")}
        if tasks != wanted:
            yield f"tasks that nobody wants: {tasks - wanted}; that are missing: {wanted - tasks}"
        for id, box in self._fake.rooms.boxes.items():
            if left := [_told(pid) for pid in box.processes()]:
                yield f"processes are left in {id}: {left}"

    def _unheld(self) -> Iterator[str]:
        held = {client.held.id for client in self._clients if client.held is not None}
        for runner in self._daemon.rig.fleet.runners():
            if runner.phase is Phase.USED and runner.id not in held:
                yield f"{runner.id} is used by nobody"


def _told(pid: int) -> str:
    """What a process is, for whoever has to find out why it is still there."""
    try:
        process = psutil.Process(pid)
        words = " ".join(word if len(word) < 80 else f"{word[:60]!r}…" for word in process.cmdline())
        age = time.time() - process.create_time()
        return f"{pid} of {process.ppid()}, {process.status()}, {age:.1f} s old: {words}"
    except psutil.NoSuchProcess:
        return f"{pid}, which has just ended"


def _is_marked(job: dict[str, Any]) -> bool:
    return any(group["Meta"].get("used") == "true" for group in job["TaskGroups"] if group["Name"] == "config")

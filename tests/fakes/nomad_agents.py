"""The fake cluster's agents: they run tasks on paper, and tell of them in batches, as Nomad's clients do.

A task isn't a process here (only commands that are executed in one are); what happens to it is ordered by tests.
"""

import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from tests.fakes.nomad_jobs import duration, group_of
from tests.fakes.nomad_scheduler import Scheduler, is_reschedulable
from tests.fakes.nomad_shapes import (
    SECOND,
    TERMINAL,
    Json,
    changed,
    evaluation,
    network_status,
    rfc3339,
    task_event,
    task_state,
)
from tests.fakes.nomad_store import Store

BATCH: Final = 0.2
SETUP: Final = {"docker": 0.3}
SETUP_ELSE: Final = 0.06
KILL: Final = 0.03
KILL_AFTER_RETURN: Final = 1.8
REPEAT: Final = 2.0
"""An agent that has come back tells of what it stopped a second time."""
EVENTS_KEPT: Final = 10
LOCAL_DRIVERS: Final = ("raw_exec", "exec")


@dataclass(frozen=True, slots=True)
class End:
    """The task ends by itself or by force. *delay*: seconds until it starts again, None as its policy says."""

    exit_code: int = 137
    signal: int = 9
    oom: bool = False
    asked: bool = False
    """A restart that a user asked for: it doesn't use up attempts."""
    delay: float | None = None
    fails: bool = False
    """Whatever the policy allows, it doesn't start again."""


@dataclass
class Run:
    """An allocation as its agent sees it."""

    id: str
    group: Json
    kind: str
    client: str = "pending"
    description: str = "No tasks have started"
    state: Json = field(default_factory=task_state)
    network: Json = field(default_factory=dict)
    restarts_at: list[int] = field(default_factory=list)
    ends: deque[End] = field(default_factory=deque)
    stopping: bool = False
    stubborn: bool = False
    """The task ignores signals until it is killed for good."""
    returned: bool = False
    """Its agent has died and come back meanwhile."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def task(self) -> Json:
        return dict(self.group["Tasks"][0])

    @property
    def over(self) -> bool:
        return self.client in TERMINAL

    def tell(self, event: Json, **state: object) -> None:
        events = [*self.state["Events"], event][-EVENTS_KEPT:]
        self.state = {**self.state, **state, "Events": events}

    def states(self) -> Json:
        return {task["Name"]: self.state for task in self.group["Tasks"]}


@dataclass
class Agent:
    """One node's client. `work` runs until it is cancelled, which is its death; what runs is kept, as tasks are."""

    node: str
    store: Store
    scheduler: Scheduler
    random: Random
    ended: Callable[[str], None]
    """Told of each allocation whose task has ended."""
    runs: dict[str, Run] = field(default_factory=dict)
    dirty: dict[str, None] = field(default_factory=dict)
    setup: float | None = None
    """Seconds that a task needs to start, if not the usual ones of its driver."""
    scope: trio.CancelScope | None = None
    moved: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    @property
    def alive(self) -> bool:
        return self.scope is not None and not self.scope.cancel_called

    @property
    def down(self) -> bool:
        """It has ended altogether, and may be started again."""
        return self.scope is None

    async def work(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with trio.CancelScope() as self.scope:
                task_status.started()
                async with trio.open_nursery() as nursery:
                    for run in self.runs.values():
                        run.returned = True
                        self._resume(nursery, run)
                    nursery.start_soon(self._tell)
                    await self._follow(nursery)
        finally:
            self.scope = None
            self.store.moved.unpark_all()

    def die(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    def end(self, id: str, end: End) -> None:
        """Let the task of an allocation end."""
        self.runs[id].ends.append(end)
        self.moved.unpark_all()

    def repeat(self, id: str) -> None:
        """Tell once more of an allocation of which nothing is new."""
        self.dirty[id] = None

    # -- what to run --------------------------------------------------------------------------------------------------

    async def _follow(self, nursery: trio.Nursery) -> None:
        while True:
            await self.store.until(lambda: bool(self.store.changes.get(self.node)))
            for id in self.store.changes.pop(self.node):
                self._look_at(nursery, id)

    def _look_at(self, nursery: trio.Nursery, id: str) -> None:
        row = self.store.allocations.get(id)
        run = self.runs.get(id)
        if row is None:
            if run is not None:
                self.runs.pop(id).scope.cancel()
                self.ended(id)
                self.dirty.pop(id, None)
        elif run is None:
            if row["ClientStatus"] in TERMINAL:
                return
            job = self.store.placed_jobs[id]
            run = Run(id, group_of(job, row["TaskGroup"]), job["Type"])
            run.network = network_status(run.group, self.random.randrange(60000))
            run.stopping = row["DesiredStatus"] != "run"
            self.runs[id] = run
            self._resume(nursery, run)
        elif row["DesiredStatus"] != "run":
            run.stopping = True
            self.moved.unpark_all()

    def _resume(self, nursery: trio.Nursery, run: Run) -> None:
        run.scope = trio.CancelScope()
        row = self.store.allocations.get(run.id)
        run.stopping = run.stopping or (row is not None and row["DesiredStatus"] != "run")
        if not run.over:
            nursery.start_soon(self._live, run)

    # -- one allocation -----------------------------------------------------------------------------------------------

    async def _live(self, run: Run) -> None:
        with run.scope:
            if run.client == "pending" and not run.state["Events"]:
                await self._await_previous(run)
                self._set_up(run)
            while not run.over:
                await self._turn(run)

    async def _await_previous(self, run: Run) -> None:
        """The new task is held back until the previous allocation is over, on another node as well."""
        previous = self.store.allocations.get(run.id, {}).get("PreviousAllocation", "")  # it may be collected already

        def over() -> bool:
            row = self.store.allocations.get(previous)
            return run.stopping or row is None or row["ClientStatus"] in TERMINAL

        await self.store.until(over)

    def _set_up(self, run: Run) -> None:
        run.tell(task_event("Received", self._now(), DisplayMessage="Task received by client"))
        words = "Building Task Directory"
        run.tell(task_event("Task Setup", self._now(), Message=words, DisplayMessage=words, Details={"message": words}))
        self._changed(run)

    async def _turn(self, run: Run) -> None:
        """One step of its life: start if it isn't running, or wait for what ends it."""
        if run.stopping:
            await self._kill(run)
        elif run.client == "pending":
            usual = SETUP.get(run.task["Driver"], SETUP_ELSE)
            await self._wait(run, usual if self.setup is None else self.setup)
            if not run.stopping:
                self._start(run)
        elif run.ends:
            await self._ended(run, run.ends.popleft())
        else:
            await self.moved.park()

    async def _wait(self, run: Run, seconds: float) -> None:
        with trio.move_on_after(self.store.clock.scaled(seconds)):
            while not run.stopping:
                await self.moved.park()

    def _start(self, run: Run) -> None:
        if problem := self._driver_problem(run):
            run.tell(task_event("Driver Failure", self._now(), DisplayMessage=problem, DriverError=problem))
            self._fail(run, "Error was unrecoverable")
            return
        now = self._now()
        run.tell(
            task_event("Started", now, DisplayMessage="Task started by client"),
            State="running",
            StartedAt=rfc3339(self._now()),
        )
        run.client, run.description = "running", "Tasks are running"
        self._changed(run)

    def _driver_problem(self, run: Run) -> str:
        command = (run.task["Config"] or {}).get("command", "")
        if run.task["Driver"] not in LOCAL_DRIVERS or shutil.which(command):
            return ""
        return f'failed to launch command with executor: rpc error: code = Unknown desc = binary "{command}" not found'

    async def _kill(self, run: Run) -> None:
        patience = int(run.task["KillTimeout"])
        words = f"Sent interrupt. Waiting {duration(patience)} before force killing"
        told = {"DisplayMessage": words, "KillTimeout": patience, "Details": {"kill_timeout": duration(patience)}}
        run.tell(task_event("Killing", self._now(), **told))
        self._changed(run)
        if run.client == "running":
            usual = KILL_AFTER_RETURN if run.returned else KILL
            await trio.sleep(self.store.clock.scaled(patience / SECOND if run.stubborn else usual))
            code, signal = (137, 9) if run.stubborn else (130, 2)
            run.tell(self._terminated(End(code, signal)))
            run.tell(task_event("Killed", self._now(), DisplayMessage="Task successfully killed"))
        self.ended(run.id)
        run.client, run.description = "complete", "All tasks have completed"
        run.state = {**run.state, "State": "dead", "FinishedAt": rfc3339(self._now())}
        self._changed(run)
        if run.returned:
            await trio.sleep(self.store.clock.scaled(REPEAT))
            self._changed(run)

    async def _ended(self, run: Run, end: End) -> None:
        if end.asked:
            words = "User requested restart"
            details = {"restart_reason": words}
            event = task_event(
                "Restart Signaled", self._now(), DisplayMessage=words, RestartReason=words, Details=details
            )
            run.tell(event)
        self.ended(run.id)
        run.tell(self._terminated(end))
        run.state = {**run.state, "FinishedAt": rfc3339(self._now())}
        if end.exit_code == 0 and run.kind == "batch" and not end.asked:
            run.client, run.description = "complete", "All tasks have completed"
            run.state = {**run.state, "State": "dead"}
            self._changed(run)
        elif refusal := self._refusal(run, end):
            self._fail(run, refusal)
        else:
            await self._restart(run, end)

    def _terminated(self, end: End) -> Json:
        details = {"exit_code": str(end.exit_code), "signal": str(end.signal), "oom_killed": "false"}
        words = f"Exit Code: {end.exit_code}" + (f", Signal: {end.signal}" if end.signal else "")
        more: Json = {"ExitCode": end.exit_code, "Signal": end.signal}
        if end.oom:
            details |= {"signal": "0", "oom_killed": "true", "exit_message": "OOM Killed"}
            words = f'Exit Code: {end.exit_code}, Exit Message: "OOM Killed"'
            more |= {"Signal": 0, "Message": "OOM Killed"}
        return task_event("Terminated", self._now(), DisplayMessage=words, Details=details, **more)

    def _refusal(self, run: Run, end: End) -> str:
        """Why the restart policy doesn't let the task start again; "" if it does."""
        policy = run.task["RestartPolicy"]
        if end.asked:
            return ""
        if policy["Attempts"] == 0:
            return "Policy allows no restarts"
        start = self._now() - int(self.store.clock.scaled(policy["Interval"]))
        run.restarts_at = [at for at in run.restarts_at if at > start]
        if not end.fails and (len(run.restarts_at) < policy["Attempts"] or policy["Mode"] == "delay"):
            return ""
        interval = duration(policy["Interval"])
        return f'Exceeded allowed attempts {policy["Attempts"]} in interval {interval} and mode is "fail"'

    def _fail(self, run: Run, why: str) -> None:
        details = {"restart_reason": why, "fails_task": "true"}
        told = {"DisplayMessage": why, "RestartReason": why, "FailsTask": True, "Details": details}
        run.tell(
            task_event("Not Restarting", self._now(), **told),
            State="dead",
            Failed=True,
            FinishedAt=rfc3339(self._now()),
        )
        run.client, run.description = "failed", "Failed tasks"
        self._changed(run)

    async def _restart(self, run: Run, end: End) -> None:
        """In place: at once, without ever being seen pending, if there is no delay."""
        delay, why = self._restart_delay(run, end)
        words = f"{'' if why == 'Restart within policy' else why + ' - '}Task restarting in {duration(delay)}"
        details = {"restart_reason": why, "start_delay": str(delay)}
        told = {"DisplayMessage": words, "RestartReason": why, "StartDelay": delay, "Details": details}
        now = self._now()
        run.restarts_at.append(now)
        restarts = run.state["Restarts"] + 1
        run.tell(
            task_event("Restarting", now, **told),
            State="pending",
            Restarts=restarts,
            LastRestart=rfc3339(now),
        )
        run.client, run.description = "pending", "No tasks have started"
        self._changed(run)
        if delay > 1:
            await self._wait(run, delay / SECOND)
        elif not run.stopping:
            self._start(run)

    def _restart_delay(self, run: Run, end: End) -> tuple[int, str]:
        policy = run.task["RestartPolicy"]
        if end.delay is not None:
            return int(end.delay * SECOND) or 1, "Restart within policy"
        if len(run.restarts_at) >= policy["Attempts"] and not end.asked:
            return int(policy["Interval"]), "Exceeded allowed attempts, applying a delay"
        if end.asked or not policy["Delay"]:
            return 1, "Restart within policy"
        return int(policy["Delay"] * (1 + self.random.random() / 4)), "Restart within policy"

    # -- telling ------------------------------------------------------------------------------------------------------

    def _changed(self, run: Run) -> None:
        self.dirty[run.id] = None

    def _now(self) -> int:
        return self.store.clock.ns()

    async def _tell(self) -> None:
        """Tell what has changed, some five times a second: states that pass quickly are never told."""
        while True:
            await trio.sleep(self.store.clock.scaled(BATCH))
            await self.store.led()
            told, self.dirty = list(self.dirty), {}
            if known := [id for id in told if id in self.store.allocations and id in self.runs]:
                self._report(known)

    def _report(self, ids: list[str]) -> None:
        with self.store.entry("AllocationUpdated") as entry:
            for id in ids:
                entry.report(self._row(self.runs[id]))
            entry.flush()
            failed = {
                self.store.allocations[id]["JobID"]: None
                for id in ids
                if self.runs[id].client == "failed"
                and self.store.allocations[id]["DesiredStatus"] == "run"
                and is_reschedulable(self.scheduler, self.store.allocations[id])
            }
            made = [self._failure(job) for job in failed]
            for row in made:
                entry.evaluation(row)
        for row in made:
            self.store.enqueue(row["ID"])
        if any(self.runs[id].over for id in ids):
            self.scheduler.capacity()

    def _row(self, run: Run) -> Json:
        return changed(
            self.store.allocations[run.id],
            ClientStatus=run.client,
            ClientDescription=run.description,
            TaskStates=run.states(),
            NetworkStatus=run.network,
        )

    def _failure(self, job: str) -> Json:
        return evaluation(self.store.ids.new(), self.store.jobs.get(job), job, "alloc-failure", self._now())

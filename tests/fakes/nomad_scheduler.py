"""The fake cluster's scheduler: evaluations in, placements and stops out, in the order that Nomad 1.1 shows.

It knows jobs, groups and slots, restarts of failed allocations elsewhere, migrations, changes of a job, lost nodes,
and evaluations that are blocked because no node has room. It doesn't know deployments, preemption and system jobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from tests.fakes.nomad_jobs import destructive, group_of
from tests.fakes.nomad_placement import Placement
from tests.fakes.nomad_shapes import SECOND, TERMINAL, Json, allocation, changed, evaluation, rfc3339, slot_of
from tests.fakes.nomad_store import Entry, Store

PLAN_DELAY: Final = 0.003
NOT_NEEDED: Final = "alloc not needed due to job update"
UPDATED: Final = "alloc is being updated due to job update"
LOST: Final = "alloc is lost since its node is down"


@dataclass(frozen=True, slots=True)
class Stop:
    row: Json
    why: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    group: Json
    slot: int
    previous: Json | None = None
    failed: bool = False
    """It replaces an allocation that failed."""

    @property
    def avoid(self) -> str:
        """A node that is only taken if there is no other."""
        return str(self.previous["NodeID"]) if self.failed and self.previous is not None else ""


@dataclass(frozen=True, slots=True)
class Update:
    """The allocation stays as it is, under a new version of its job."""

    row: Json


@dataclass(frozen=True, slots=True)
class Later:
    """A failed allocation is to be replaced at *at* (ns)."""

    row: Json
    at: int


Step = Stop | Place | Update | Later


@dataclass
class Scheduler:
    store: Store
    random: Random
    placement: Placement
    unwatched: set[str] = field(default_factory=set)
    """Blocked evaluations that nothing unblocks: the nodes that could have had them were filtered."""
    nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Take evaluations one after the other, for ever."""
        async with trio.open_nursery() as self.nursery:
            while True:
                await self.store.until(lambda: bool(self.store.queue))
                await self.store.led()
                row = self.store.evaluations.get(self.store.queue.popleft() if self.store.queue else "")
                if row is not None and row["Status"] in ("pending", "blocked"):
                    await self._process(row)

    def capacity(self) -> None:
        """Something became free: try again what waits for room."""
        for row in list(self.store.evaluations.values()):
            if row["Status"] == "blocked" and row["ID"] not in self.unwatched and row["ID"] not in self.store.queue:
                self.store.enqueue(row["ID"])

    def node_evaluations(self, entry: Entry, node: Json) -> list[Json]:
        """One evaluation for each job that ever had an allocation on *node*."""
        jobs = {row["JobID"] for row in self.store.allocations.values() if row["NodeID"] == node["ID"]}
        now = self.store.clock.ns()
        made = []
        for id in sorted(jobs):
            job = self.store.jobs.get(id)
            told = {"NodeID": node["ID"], "NodeModifyIndex": node["ModifyIndex"]}
            made.append(entry.evaluation(evaluation(self.store.ids.new(), job, id, "node-update", now, **told)))
        return made

    async def _process(self, row: Json) -> None:
        await self._pause()
        job = self.store.jobs.get(row["JobID"])
        steps = list(self._reconcile(row, job))
        snapshot = self.store.index
        for later in [step for step in steps if isinstance(step, Later)]:
            steps.append(Update(self._follow_up(row, later)))
        failures: dict[str, Json] = {}
        if [step for step in steps if not isinstance(step, Later)]:
            failures = self._apply(row, job, steps)
            await self._pause()
        self._complete(row["ID"], job, failures, snapshot)

    async def _pause(self) -> None:
        await trio.sleep(self.store.clock.scaled(PLAN_DELAY))
        await self.store.led()

    # -- what to do ---------------------------------------------------------------------------------------------------

    def _reconcile(self, row: Json, job: Json | None) -> Iterator[Step]:
        wanted = [] if job is None or job["Stop"] else job["TaskGroups"]
        slots = {(group["Name"], slot): group for group in wanted for slot in range(group["Count"])}
        held: dict[tuple[str, int], list[Json]] = {}
        for known in self.store.of_job(row["JobID"]):
            held.setdefault((known["TaskGroup"], slot_of(known)), []).append(known)
        for key, rows in held.items():
            if key not in slots:
                yield from (step for known in rows for step in self._unneeded(known))
        if job is not None:
            for key, group in slots.items():
                yield from self._slot(row, job, group, key[1], held.get(key, []))

    def _unneeded(self, known: Json) -> Iterator[Stop]:
        if known["ClientStatus"] in TERMINAL:
            return
        if self._down(known):
            yield Stop(known, known.get("DesiredDescription") or LOST, lost=True)
        elif known["DesiredStatus"] == "run":
            yield Stop(known, NOT_NEEDED)

    def _slot(self, row: Json, job: Json, group: Json, slot: int, rows: list[Json]) -> Iterator[Step]:
        stopping = [
            known for known in rows if known["DesiredStatus"] != "run" and known["ClientStatus"] not in TERMINAL
        ]
        yield from (Stop(known, known["DesiredDescription"], lost=True) for known in stopping if self._down(known))
        wanted = [known for known in rows if known["DesiredStatus"] == "run" and self._same_job(known, job)]
        strangers = [known for known in rows if known not in wanted and known["DesiredStatus"] == "run"]
        yield from (step for known in strangers for step in self._unneeded(known))
        if not wanted:
            yield Place(group, slot)
        elif wanted[-1]["ClientStatus"] in TERMINAL:
            yield from self._ended(row, job, group, wanted[-1])
        else:
            yield from self._alive(job, group, wanted[-1])

    def _alive(self, job: Json, group: Json, known: Json) -> Iterator[Step]:
        placed = self.store.placed_jobs[known["ID"]]
        slot = slot_of(known)
        if self._down(known):
            yield from (Stop(known, LOST, lost=True), Place(group, slot, known))
        elif known.get("DesiredTransition", {}).get("Migrate"):
            yield from (Stop(known, "alloc is being migrated"), Place(group, slot, known))
        elif placed["Version"] == job["Version"]:
            return
        elif destructive(placed, job, group["Name"]):
            yield from (Stop(known, UPDATED), Place(group, slot, known))
        else:
            yield Update(known)

    def _ended(self, row: Json, job: Json, group: Json, known: Json) -> Iterator[Step]:
        older = self.store.placed_jobs[known["ID"]]["Version"] != job["Version"]
        slot = slot_of(known)
        if known["ClientStatus"] == "complete":
            if older or job["Type"] != "batch":
                yield Place(group, slot)
        elif known.get("FollowupEvalID") == row["ID"]:
            why = "alloc was rescheduled because it failed"
            yield from (Stop(known, why), Place(group, slot, known, failed=True))
        elif older:
            yield Place(group, slot)
        elif "FollowupEvalID" not in known and (at := self.reschedule_at(known, group)) is not None:
            yield Later(known, at)

    def reschedule_at(self, known: Json, group: Json) -> int | None:
        """When a failed allocation is to be replaced (ns); None: never."""
        policy = group.get("ReschedulePolicy")
        if not policy or not (policy["Unlimited"] or policy["Attempts"]):
            return None
        done = known.get("RescheduleTracker", {}).get("Events", [])
        now = self.store.clock.ns()
        recent = [event for event in done if event["RescheduleTime"] > now - self._ns(policy["Interval"])]
        if not policy["Unlimited"] and len(recent) >= policy["Attempts"]:
            return None
        return now + self._ns(self._delay(policy, len(done)))

    def _delay(self, policy: Json, done: int) -> int:
        delay: int = max(policy["Delay"], 5 * SECOND)
        if policy["DelayFunction"] == "constant":
            return delay
        most = policy["MaxDelay"] or 3600 * SECOND
        return int(min(delay * 2 ** min(done, 20), most))

    def _ns(self, ns: int) -> int:
        return int(self.store.clock.scaled(ns))

    def _same_job(self, known: Json, job: Json) -> bool:
        """Not an allocation of an earlier job of this id that was purged."""
        return bool(self.store.placed_jobs[known["ID"]]["CreateIndex"] == job["CreateIndex"])

    def _down(self, known: Json) -> bool:
        return bool(self.store.nodes[known["NodeID"]]["Status"] == "down")

    # -- doing it -----------------------------------------------------------------------------------------------------

    def _follow_up(self, row: Json, later: Later) -> Json:
        """Make the evaluation that will replace a failed allocation; the answer is the allocation that names it."""
        job = self.store.jobs[row["JobID"]]
        now = self.store.clock.ns()
        told = {
            "JobModifyIndex": job["ModifyIndex"],
            "StatusDescription": "created for delayed rescheduling",
            "WaitUntil": rfc3339(later.at),
            "PreviousEval": row["ID"],
            "SnapshotIndex": self.store.index,
        }
        with self.store.entry("EvaluationUpdated") as entry:
            made = entry.evaluation(evaluation(self.store.ids.new(), job, job["ID"], "alloc-failure", now, **told))
        assert self.nursery is not None
        self.nursery.start_soon(self._wait, made["ID"], (later.at - now) / SECOND)
        return changed(later.row, FollowupEvalID=made["ID"])

    async def _wait(self, evaluation: str, seconds: float) -> None:
        await trio.sleep(seconds)
        self.store.enqueue(evaluation)

    def _apply(self, row: Json, job: Json | None, steps: list[Step]) -> dict[str, Json]:
        """Write the plan as one entry; the answer is what couldn't be placed, by group."""
        failures: dict[str, Json] = {}
        chosen: list[tuple[Place, Json | None, Json]] = []
        for place in [step for step in steps if isinstance(step, Place)]:
            node, told = self.placement.choose(row["JobID"], place.group, place.avoid)
            chosen.append((place, node, told))
            if node is None:
                failures[place.group["Name"]] = told
        placed = [place for place, node, _ in chosen if node is not None]
        kept = [
            place.previous for place, node, _ in chosen if node is None
        ]  # no room for the new one: the old one stays
        stops = [step for step in steps if isinstance(step, Stop) and not (step.why == UPDATED and step.row in kept)]
        updates = [step for step in steps if isinstance(step, Update)]
        if not (placed or stops or updates):
            return failures
        with self.store.entry("PlanResult") as entry:
            entry.evaluation(self.store.evaluations[row["ID"]])
            replaced = {
                place.previous["ID"]: self._place(entry, row, job or {}, place, node, told)
                for place, node, told in chosen
                if node is not None and place.previous is not None
            }
            for place, node, told in chosen:
                if node is not None and place.previous is None:
                    self._place(entry, row, job or {}, place, node, told)
            for stop in stops:
                self._stop(entry, stop, replaced.get(stop.row["ID"]))
            for update in updates:
                entry.place(update.row, job or {})
        return failures

    def _stop(self, entry: Entry, stop: Stop, replacement: str | None) -> None:
        known = self.store.allocations[stop.row["ID"]]
        row = changed(known, DesiredStatus="stop", DesiredDescription=stop.why)
        if stop.lost:
            row = changed(row, ClientStatus="lost")
        if replacement is not None:
            row = changed(row, NextAllocation=replacement)
        entry.desire(row)

    def _place(self, entry: Entry, row: Json, job: Json, place: Place, node: Json, told: Json) -> str:
        ports = [
            {
                "Label": port["Label"],
                "Value": self.random.randint(20000, 32000),
                "To": port["To"],
                "HostIP": "127.0.0.1",
            }
            for network in place.group["Networks"] or []
            for port in network["DynamicPorts"] or []
        ]
        now = self.store.clock.ns()
        id = self.store.ids.new()
        made = allocation(id, row["ID"], job, place.group, place.slot, node, ports, told, now)
        if place.previous is not None:
            made["PreviousAllocation"] = place.previous["ID"]
            tracked = list(place.previous.get("RescheduleTracker", {}).get("Events", []))
            if place.failed:
                delay = self._delay(place.group["ReschedulePolicy"], len(tracked))
                tracked.append(
                    {
                        "RescheduleTime": now,
                        "PrevAllocID": place.previous["ID"],
                        "PrevNodeID": place.previous["NodeID"],
                        "Delay": delay,
                    }
                )
            if tracked:
                made["RescheduleTracker"] = {"Events": tracked}
        entry.place(made, job)
        return id

    def _complete(self, id: str, job: Json | None, failures: dict[str, Json], snapshot: int) -> None:
        """End the evaluation. What couldn't be placed is kept as a blocked one, told before the end of this one."""
        row = self.store.evaluations.get(id)
        if row is None:
            return
        if failures and row["Status"] == "blocked":
            with self.store.entry("EvaluationUpdated") as entry:
                entry.evaluation(changed(row, FailedTGAllocs=failures))
            return
        blocked = self._block(row, job, failures) if failures else None
        groups = [group["Name"] for group in (job or {}).get("TaskGroups", []) if group["Count"]]
        done = changed(
            row,
            Status="complete",
            StatusDescription=row.get("StatusDescription") if row["Status"] == "blocked" else None,
            SnapshotIndex=snapshot,
            ModifyTime=self.store.clock.ns(),
            QueuedAllocations={name: int(name in failures) for name in groups} if job is not None else None,
            FailedTGAllocs=failures or None,
            BlockedEval=blocked,
        )
        with self.store.entry("EvaluationUpdated") as entry:
            if not failures:
                self._cancel_blocked(entry, row["JobID"], id)
            entry.evaluation(done)

    def _block(self, row: Json, job: Json | None, failures: dict[str, Json]) -> str:
        told = {
            "JobModifyIndex": job["JobModifyIndex"] if job else 0,
            "Status": "blocked",
            "StatusDescription": "created to place remaining allocations",
            "PreviousEval": row["ID"],
            "FailedTGAllocs": failures,
            "SnapshotIndex": self.store.index,
        }
        filters = {name for failure in failures.values() for name in failure["ConstraintFiltered"] or {}}
        escaped = any("unique." in name for name in filters)
        if escaped:
            told["EscapedComputedClass"] = True
        else:
            told["ClassEligibility"] = {node["ComputedClass"]: not filters for node in self.store.nodes.values()}
        id = self.store.ids.new()
        with self.store.entry("EvaluationUpdated") as entry:
            self._cancel_blocked(entry, row["JobID"], id)
            entry.evaluation(evaluation(id, job, row["JobID"], "queued-allocs", self.store.clock.ns(), **told))
        if filters and not escaped:
            self.unwatched.add(id)
        return id

    def _cancel_blocked(self, entry: Entry, job: str, by: str) -> None:
        for row in self.store.evaluations_of(job):
            if row["Status"] == "blocked" and row["ID"] != by:
                why = f'evaluation "{row["ID"]}" successful'
                entry.evaluation(changed(row, Status="canceled", StatusDescription=why))
                self.unwatched.discard(row["ID"])


def is_reschedulable(scheduler: Scheduler, row: Json) -> bool:
    """Nomad makes an evaluation for a failed allocation only if its policy lets it come back."""
    group = group_of(scheduler.store.placed_jobs[row["ID"]], row["TaskGroup"])
    return "FollowupEvalID" not in row and scheduler.reschedule_at(row, group) is not None

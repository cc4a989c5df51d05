"""The rules of the fleet, against a cluster and a network that do everything that they may do."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from poseidon.core.events import LookUp, Overdue
from poseidon.core.model import (
    Allocation,
    ClientStatus,
    DesiredStatus,
    JobId,
    JobState,
    JobStatus,
    Phase,
    Reason,
    environment_of,
)
from tests.core.cluster import TERMINAL, Cluster
from tests.core.shell import KNOWN, SETTLE, UNKNOWN, Shell

T = TypeVar("T")
picks = st.integers(min_value=0, max_value=1000)

NIGHTLY = settings.get_current_profile_name() == "nightly"


def one_of(things: Iterable[T], pick: int) -> T | None:
    chosen = list(things)
    return chosen[pick % len(chosen)] if chosen else None


class FleetMachine(RuleBasedStateMachine):
    """Rules are what may happen; the shell and the cluster know what should come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.shell = Shell(self.cluster)
        self.heard = 0
        """How much of the log has been delivered in order, or was dropped."""
        self.earlier: Cluster | None = None
        self.marks_may_be_lost = False
        """A cluster that went back by nothing but a mark can't be told from one that didn't."""

    def new_job(self, environment: int = KNOWN) -> JobId:
        return JobId(f"{environment}-{UUID(int=self.cluster.number())}")

    def hear(self, some: int) -> None:
        """The stream goes on by *some* values."""
        for value in self.cluster.log[self.heard : self.heard + some]:
            self.heard += 1
            self.shell.hand_in(value)

    # The daemon

    @initialize(several=st.integers(0, 3))
    def begins(self, several: int) -> None:
        for _ in range(several):
            self.starts_well()

    @rule()
    def starts_well(self) -> None:
        """A job that starts as they mostly do, so that the rest has something to spoil."""
        if self.shell.lost:
            return
        job = self.new_job()
        self.shell.start(job)
        self.shell.send_start(job, carried_out=True, answered=True)
        self.cluster.begin(self.cluster.place(job))
        self.hear(len(self.cluster.log))
        self.shell.deliver_answer(self.shell.answers.pop())

    @rule()
    def starts(self) -> None:
        self.shell.start(self.new_job())

    @precondition(lambda self: not self.shell.lost)
    @rule(pick=picks, carried_out=st.booleans(), answered=st.booleans())
    def start_is_sent(self, pick: int, carried_out: bool, answered: bool) -> None:
        job = one_of(sorted(self.shell.starting - set(self.shell.stopping)), pick)
        if job is not None:
            self.shell.send_start(job, carried_out=carried_out, answered=answered)

    @precondition(lambda self: not self.shell.lost)
    @rule(pick=picks)
    def start_is_carried_out_late(self, pick: int) -> None:
        job = one_of(sorted(self.shell.sent - set(self.cluster.jobs)), pick)
        if job is not None:
            self.cluster.register(job)

    @precondition(lambda self: not self.shell.lost)
    @rule(pick=picks, carried_out=st.booleans(), answered=st.booleans())
    def stop_is_sent(self, pick: int, carried_out: bool, answered: bool) -> None:
        job = one_of((job for job, answer in self.shell.stopping.items() if answer is None), pick)
        if job is not None:
            self.shell.send_stop(job, carried_out=carried_out, answered=answered)

    @precondition(lambda self: not self.shell.lost)
    @rule(pick=picks, answered=st.booleans())
    def mark_is_written(self, pick: int, answered: bool) -> None:
        job = one_of(sorted(self.shell.marks), pick)
        if job is not None:
            self.shell.write_mark(job, answered=answered)

    @rule(pick=picks, again=st.booleans())
    def answer_arrives(self, pick: int, again: bool) -> None:
        answer = one_of(self.shell.answers, pick)
        if answer is not None:
            if not again:
                self.shell.answers.remove(answer)
            self.shell.deliver_answer(answer)

    @rule()
    def claims(self) -> None:
        self.shell.claim()

    @rule(pick=picks)
    def releases(self, pick: int) -> None:
        job = one_of(sorted(self.shell.holding), pick)
        if job is not None:
            self.shell.stop(job, Reason.RELEASED)

    @rule(pick=picks)
    def stops_some(self, pick: int) -> None:
        job = one_of((job.id for job, _, _ in self.shell.fleet.jobs(KNOWN)), pick)
        if job is not None:
            self.shell.stop(job, Reason.SURPLUS)

    @rule()
    def overdue(self) -> None:
        for job in self.shell.fleet.overdue(self.shell.now, 60):
            self.shell.hand_in(Overdue(job))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.9, 30.0]))
    def time_passes(self, seconds: float) -> None:
        """No job stays in limbo for as long as `settle`."""
        waiting = sorted(self.cluster.limbo)
        self.shell.now += min(seconds, 2.9) if waiting else seconds
        for job in waiting:
            self.cluster.reschedule(job)

    @rule()
    def another_environment_is_known(self) -> None:
        self.shell.known.add(UNKNOWN)
        self.shell.fleet.know(UNKNOWN, 1)

    @rule()
    def changes_are_taken(self) -> None:
        """Otherwise several steps' changes are taken at once."""
        self.shell.note_changes()

    @rule(some=st.integers(0, 5))
    def changes_are_saved(self, some: int) -> None:
        self.shell.save(some)

    @rule(saved=st.integers(0, 50), in_a_claim=st.booleans())
    def daemon_crashes(self, saved: int, in_a_claim: bool) -> None:
        if in_a_claim:
            self.shell.note_changes()
            self.shell.claim(answered=False)
        self.shell.note_changes()
        self.shell.crash(saved)

    # The stream, listings and look-ups

    @rule(some=st.integers(1, 12))
    def stream_tells(self, some: int) -> None:
        self.hear(some)

    @rule(some=st.integers(1, 4))
    def stream_loses(self, some: int) -> None:
        self.heard = min(self.heard + some, len(self.cluster.log))

    @rule(pick=picks)
    def stream_tells_out_of_order(self, pick: int) -> None:
        """Anything of late, or again."""
        value = one_of(self.cluster.log[-25:], pick)
        if value is not None:
            self.shell.hand_in(value)

    @rule()
    def listing_is_asked_for(self) -> None:
        self.shell.ask()

    @rule(pick=picks)
    def look_up_is_asked_for(self, pick: int) -> None:
        due = [job for job, at in self.shell.look_ups.items() if at <= self.shell.now]
        job = one_of(due, pick)
        if job is not None and self.shell.fleet.needs_look_up(job):
            self.shell.ask(job)

    @rule(pick=picks, lands=st.sampled_from(["once", "twice", "allocations later", "never"]))
    def listing_arrives(self, pick: int, lands: str) -> None:
        flight = one_of(self.shell.flights, pick)
        if flight is None:
            return
        if lands == "allocations later":
            flight.allocations = self.cluster.list_allocations(flight.only)
            flight.doomed |= self.shell.doomed()
        if lands != "twice":
            self.shell.flights.remove(flight)
        if lands != "never":
            self.shell.land(flight)

    # The cluster

    @precondition(lambda self: not self.shell.lost)
    @rule(what=st.sampled_from(["place", "begin", "begin", "move", "finish", "reschedule", "repeat"]), pick=picks)
    def cluster_goes_on(self, what: str, pick: int) -> None:
        self.happens(what, pick)

    @precondition(lambda self: not self.shell.lost)
    @rule(
        what=st.sampled_from(
            [
                "restart",
                "restart_later",
                "fail",
                "fail_for_good",
                "complete",
                "ask_to_migrate",
                "move",
                "lose",
                "come_back",
                "disconnect",
                "reconnect",
                "forget_allocation",
                "forget_job",
                "scale",
            ]
        ),
        pick=picks,
    )
    def cluster_has_trouble(self, what: str, pick: int) -> None:
        self.happens(what, pick)

    def happens(self, what: str, pick: int) -> None:
        job = one_of(self.jobs_that_may(what), pick)
        allocation = one_of(self.allocations_that_may(what), pick)
        if job is not None:
            getattr(self.cluster, what)(job)
        elif allocation is not None:
            self.to_an_allocation(what)(allocation)

    def to_an_allocation(self, what: str) -> Callable[[Allocation], object]:
        match what:
            case "restart":
                return lambda known: self.cluster.restart(known, at_once=True)
            case "restart_later":
                return lambda known: self.cluster.restart(known, at_once=False)
            case "fail":
                return lambda known: self.cluster.fail(known, for_good=False)
            case "fail_for_good":
                return lambda known: self.cluster.fail(known, for_good=True)
        action: Callable[[Allocation], object] = getattr(self.cluster, what)
        return action

    def jobs_that_may(self, what: str) -> list[JobId]:
        cluster = self.cluster
        match what:
            case "place":
                pending = (job for job, seen in cluster.jobs.items() if seen.status is JobStatus.PENDING)
                return [job for job in pending if cluster.meant(job) is None]
            case "reschedule":
                return sorted(cluster.limbo)
            case "forget_job":
                return [job for job in cluster.jobs if not cluster.has_future(job)]
            case "scale":
                return [job for job in cluster.jobs if cluster.meant(job)]
        return []

    def allocations_that_may(self, what: str) -> list[Allocation]:
        every = list(self.cluster.allocations.values())
        meant = [known for known in every if self.cluster.meant(known.job) is known]
        match what:
            case "begin":
                return [known for known in meant if known.client is ClientStatus.PENDING]
            case "restart" | "restart_later" | "complete" | "disconnect":
                return [known for known in meant if known.client is ClientStatus.RUNNING]
            case "fail" | "fail_for_good" | "ask_to_migrate" | "lose":
                return meant
            case "move":
                return meant + [known for known in every if known.migrate and self.runs_on(known)]
            case "finish":
                return [
                    known for known in every if known.desired is DesiredStatus.STOP and known.client not in TERMINAL
                ]
            case "come_back":
                return [known for known in every if known.client is ClientStatus.LOST]
            case "reconnect":
                return [known for known in every if known.client is ClientStatus.UNKNOWN]
            case "forget_allocation":
                over = (known for known in every if known.client in TERMINAL)
                return [k for k in over if k.desired is DesiredStatus.STOP or not self.cluster.has_future(k.job)]
            case "repeat":
                return every
        return []

    def runs_on(self, known: Allocation) -> bool:
        """Whether an allocation that is asked to migrate is still the job's only one."""
        return known.desired is DesiredStatus.RUN and known.client not in TERMINAL and known.job in self.cluster.jobs

    @precondition(lambda self: not self.shell.lost)
    @rule(
        name=st.sampled_from(["10-{}", "10-{}", "1-{}", "100-{}", "template-10-{}", "10-x{}"]),
        used=st.booleans(),
        runs=st.booleans(),
    )
    def stranger_registers(self, name: str, used: bool, runs: bool) -> None:
        job = JobId(name.format(UUID(int=self.cluster.number())))
        self.cluster.register(job, used=used)
        if runs:
            self.cluster.begin(self.cluster.place(job))

    @precondition(lambda self: not self.shell.lost)
    @rule(pick=picks, purge=st.booleans())
    def stranger_removes(self, pick: int, purge: bool) -> None:
        job = one_of(list(self.cluster.jobs), pick)
        if job is not None:
            self.cluster.remove(job, purge=purge)

    @precondition(lambda self: not self.shell.lost)
    @rule(pick=picks, used=st.booleans())
    def stranger_registers_again(self, pick: int, used: bool) -> None:
        names = {known.job for known in self.cluster.allocations.values()} | self.shell.ours
        job = one_of(sorted(name for name in names if not self.cluster.has_future(name)), pick)
        if job is not None:  # nobody marks a job as used that is ours
            self.cluster.register(job, used=used and self.shell.fleet.job(job) is None)

    @precondition(lambda self: not self.shell.lost)
    @rule()
    def cluster_is_saved(self) -> None:
        self.earlier = self.cluster.snapshot()

    @precondition(lambda self: self.earlier is not None and not self.cluster.limbo and not self.earlier.limbo)
    @rule()
    def cluster_goes_back(self) -> None:
        assert self.earlier is not None
        if self.earlier.index == self.cluster.index:
            return
        self.cluster = self.shell.cluster = self.earlier.snapshot()
        self.heard = len(self.cluster.log)
        self.shell.lost = True
        self.shell.loses_connections()
        self.marks_may_be_lost = True

    # What must come of it

    @rule()
    def everything_converges(self) -> None:
        shell = self.shell
        for job in sorted(self.cluster.limbo):
            self.cluster.reschedule(job)
        for _ in range(12):
            if not self.round_of_work():
                break
        else:
            pytest.fail("it doesn't come to rest")
        self.check_truth()
        shell.save_all()
        if shell.lost:
            shell.lost = False
            shell.told.allocations = dict(self.cluster.allocations)
            shell.told.gone = dict(self.cluster.gone)
            shell.save_all()
            shell.saved_told = replace(shell.told, allocations=dict(self.cluster.allocations))

    def round_of_work(self) -> bool:
        """Carry out all that was decided, then list; whether there was anything to do."""
        shell = self.shell
        shell.now += SETTLE + 1
        if shell.lost:
            for _ in range(2):
                shell.flights.remove(flight := shell.ask())
                shell.land(flight)
        before = self.cluster.index
        for job in sorted(shell.starting - set(shell.stopping)):
            shell.send_start(job, carried_out=True, answered=True)
        for job in [job for job, answer in shell.stopping.items() if answer is None]:
            shell.send_stop(job, carried_out=True, answered=True)
        for job in sorted(shell.marks):
            shell.write_mark(job, answered=True)
        busy = self.cluster.index != before or bool(shell.answers)
        while shell.answers:
            shell.deliver_answer(shell.answers.pop(0))
        for job in [job for job, at in shell.look_ups.items() if at <= shell.now]:
            shell.look_ups.pop(job)
            if shell.fleet.needs_look_up(job):
                shell.flights.remove(flight := shell.ask(job))
                shell.land(flight)
                busy = True
        self.cluster.register(JobId(f"other-{self.cluster.number()}"))  # tables' indexes move on in a real cluster
        shell.flights.remove(flight := shell.ask())
        decisions = shell.land(flight)
        again = [decision for decision in shell.land(flight) if not isinstance(decision, LookUp)]
        assert not again, "the same input again decides nothing"
        shell.note_interruptions()
        in_doubt = any(shell.fleet.needs_look_up(job) for job in shell.look_ups)
        return busy or in_doubt or bool(decisions) or bool(shell.stopping) or bool(shell.marks)

    def check_truth(self) -> None:
        shell, cluster = self.shell, self.cluster
        fleet = {job.id: (job, state, runner) for env in shell.known for job, state, runner in shell.fleet.jobs(env)}
        assert set(fleet) <= set(cluster.jobs), "what is gone is forgotten"
        assert shell.fleet.environments() <= shell.known
        for name, seen in cluster.jobs.items():
            if environment_of(name) not in shell.known:
                continue
            if not cluster.has_future(name):
                assert name not in fleet, "nothing is left of a job without a future"
                continue
            assert name in fleet, "no job leaks"
            job, state, runner = fleet[name]
            assert job.adopted
            life, meant = cluster.life(name), cluster.meant(name)
            assert (None if runner is None else (runner.allocation, runner.started)) == life
            assert state is (JobState.STARTING if life is None else JobState.LIVE)
            held = [id for id, (_, held) in shell.handed.items() if meant is not None and held[0] == meant.id]
            if held:
                assert runner is not None
                assert runner.phase is Phase.USED
                assert runner.id in held
            elif runner is not None:
                assert runner.phase is Phase.IDLE
            if runner is not None and not self.marks_may_be_lost:
                assert seen.used == (runner.phase is Phase.USED), "the executor's record is right"

    @invariant()
    def clients_keep_what_lives(self) -> None:
        shell = self.shell
        shell.note_interruptions()
        for id, (job, life) in shell.handed.items():
            runner = shell.fleet.runner(id)
            if not shell.lost and job not in shell.stopping and life not in shell.interrupted:
                assert runner is not None, "a claimed life stays used while it lives"
            assert runner is None or runner.phase is Phase.USED
            assert (runner is None) == (shell.ended[id] == 1), "executions end once, with their runner"

    @invariant()
    def idle_runners_may_be_handed_out(self) -> None:
        shell = self.shell
        taken = {life[0] for _, life in shell.handed.values()}
        for runner in shell.fleet.runners():
            if runner.phase is Phase.IDLE:
                shell.check_idle(runner)
                assert runner.allocation not in taken, "a spent allocation isn't handed out"
                assert runner.id not in shell.handed

    def teardown(self) -> None:
        self.everything_converges()


@pytest.mark.timeout(0 if NIGHTLY else 300)
def test_the_rules_hold_whatever_happens() -> None:
    brief = settings(max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(FleetMachine, settings=settings() if NIGHTLY else brief)

"""Makes one environment's pool what it should be, again and again: woken by changes, and by the clock."""

import random
import uuid
from collections.abc import Callable
from dataclasses import replace

import structlog
import trio

from poseidon.core.events import Stop
from poseidon.core.model import Environment, EnvironmentId, JobId, Phase, Reason, Runner
from poseidon.core.pool import BackOff, plan, survey
from poseidon.errors import PoseidonError
from poseidon.runners.carrier import Carrier
from poseidon.runners.dispatcher import Dispatcher

log = structlog.get_logger(__name__)

INTERVAL = 30.0
"""Seconds between two looks at a pool that nothing has changed."""
REST = 0.01
"""Seconds between two looks while nobody waits: a burst of claims is one change, not hundreds."""
SOON = 1.0
"""Seconds until the next look if starts had to be put off."""
GIVE_WAY = 5.0
"""Seconds in which a pool that gave up a runner starts none, so that others get its room."""
ROOM_IS_MADE = 0.5
"""Seconds until a start is tried again for which another pool gives up a runner."""
TOO_SHORT = 30.0
"""Seconds of idle life below which an unclaimed end counts as a failed start."""
OUR_DOING = frozenset({Reason.SURPLUS, Reason.REPLACED, Reason.REMOVED, Reason.RELEASED, Reason.SHUTDOWN})
THE_NODES_DOING = frozenset({Reason.MIGRATED, Reason.LOST, Reason.DISCONNECTED})
"""A drain or a crash takes all of a node's runners at once, however well they started."""
NO_FAILED_START = OUR_DOING | THE_NODES_DOING


class Refresher:
    """*find* gives the environment as it is now, None once it is removed; *waiting* how many clients wait."""

    def __init__(
        self,
        environment: EnvironmentId,
        dispatcher: Dispatcher,
        carrier: Carrier,
        find: Callable[[EnvironmentId], Environment | None],
        waiting: Callable[[EnvironmentId], int],
    ) -> None:
        self._environment = environment
        self._dispatcher = dispatcher
        self._carrier = carrier
        self._find = find
        self._waiting = waiting
        self._woken = trio.Event()
        self._crowded = False
        self._gives_way_until = 0.0
        self.back_off = BackOff()
        self.trouble = ""
        """Why starts fail at present."""

    def wake(self) -> None:
        """Something has changed: look again."""
        self._woken.set()

    def start_failed(self, error: PoseidonError) -> bool:
        """A start found no room, or nothing became of it. False: it is one of several that failed at once."""
        self._crowded = True
        return self._fail(error.message)

    def give_way(self) -> bool:
        """Stop one idle runner, the youngest, for those who have none, and start none for a while. False: none is."""
        environment = self._find(self._environment)
        pool = None if environment is None else survey(environment, self._dispatcher.fleet.jobs(self._environment))
        idle = () if pool is None else (*pool.idle, *pool.old_idle)
        if not idle:
            return False
        log.info("idle runner stopped to make room for another environment", job_id=idle[-1])
        self._gives_way_until = self._dispatcher.clock.now() + GIVE_WAY
        self._dispatcher.handle(Stop(idle[-1], Reason.SURPLUS))
        return True

    def retry_soon(self) -> None:
        """Room is being made."""
        self.back_off = replace(self.back_off, until=self._dispatcher.clock.now() + ROOM_IS_MADE)
        self.wake()

    def stillborn(self, trouble: str) -> None:
        """A job has ended before it became a runner; *trouble* is what the executor tells of it: its image, perhaps."""
        self._fail(f"a runner ended before it was ready{f': {trouble}' if trouble else ''}")

    def begin_anew(self) -> None:
        """The environment has changed: what failed before may work now."""
        self._succeed()
        self._crowded = False

    def runner_changed(self, runner: Runner) -> None:
        """One of this environment's runners has changed its phase."""
        if runner.phase is Phase.USED:
            self._succeed()
        elif runner.phase is Phase.IDLE:
            self._crowded = False
        elif runner.claimed_at is None and runner.reason not in NO_FAILED_START and _lived(runner) < TOO_SHORT:
            self._fail(f"an idle runner ended by itself ({runner.reason})")

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The service; it ends when the environment is removed."""
        task_status.started()
        while (environment := self._find(self._environment)) is not None:
            self._woken = trio.Event()
            starved = self._refresh(environment)
            backing_off = self._pauses_until - self._dispatcher.clock.now()
            wait = SOON if starved else INTERVAL * random.uniform(0.8, 1.2)  # noqa: S311
            with trio.move_on_after(backing_off if backing_off > 0 else wait):
                await self._woken.wait()
                if not self._waiting(self._environment):
                    await trio.sleep(REST)
        self._carrier.hungers(self._environment, False)

    def _refresh(self, environment: Environment) -> bool:
        """Start and stop what is due; tells whether more starts are due than may be begun now."""
        pool = survey(environment, self._dispatcher.fleet.jobs(environment.id))
        wanted = plan(environment, pool, self._waiting(environment.id), crowded=self._crowded)
        for job, reason in wanted.stop:
            self._dispatcher.handle(Stop(job, reason))
        now = self._dispatcher.clock.now()
        if self.trouble and self.back_off.until + TOO_SHORT < now and not wanted.start:
            self._succeed()
        if now < self._pauses_until:
            self._carrier.hungers(environment.id, False)
            return False
        free = self._carrier.room(environment.id)
        room = min(1, free) if self.back_off.failures else free
        for _ in range(min(wanted.start, room)):
            self._carrier.begin_start(JobId(f"{environment.id}-{uuid.uuid4()}"), environment)
        self._carrier.hungers(environment.id, wanted.start > room)
        return wanted.start > room

    @property
    def _pauses_until(self) -> float:
        """When starts may begin again."""
        return max(self.back_off.until, self._gives_way_until)

    def _fail(self, message: str) -> bool:
        now = self._dispatcher.clock.now()
        counts = now >= self.back_off.until  # several that fail at once count once
        if counts:
            self.back_off = self.back_off.failed(now, random.random())  # noqa: S311
            log.warning(
                "pool backs off",
                environment_id=self._environment,
                error=message,
                seconds=round(self.back_off.until - now, 1),
            )
        self.trouble = message
        self.wake()
        return counts

    def _succeed(self) -> None:
        self.back_off = self.back_off.succeeded()
        self.trouble = ""


def _lived(runner: Runner) -> float:
    return (runner.gone_at or runner.ready_at) - runner.ready_at

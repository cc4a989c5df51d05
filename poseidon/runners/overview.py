"""How the whole daemon is doing, for health, status and the watchdog. It reads, and changes nothing."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from poseidon.core.model import EnvironmentId
from poseidon.executors.base import FollowsStream
from poseidon.runners.assembly import Shell
from poseidon.runners.dispatcher import Dispatcher
from poseidon.runners.facts import Ailment, ExecutorFacts, PoolStatistics
from poseidon.supervisor import ServiceState, ServiceStatus

UNKNOWN = "UNKNOWN"


@dataclass(slots=True)
class Overview:
    """*threshold*: share of a pool (0 to 1) below which it counts as depleting; 0: never."""

    shell: Shell
    started_at: float
    """Seconds since the epoch."""
    threshold: float
    draining: bool = False

    def ailment(self) -> Ailment | None:
        """What keeps the daemon from serving well, the worst first; None if nothing does."""
        if problem := self.shell.store.status().problem:
            return Ailment(UNKNOWN, f"the database can't be written: {problem}")
        for service in self.services():
            if service.state is ServiceState.BACKING_OFF:
                return Ailment(UNKNOWN, f"service {service.name} has crashed and starts again: {service.error}")
        for name, dispatcher in self.shell.dispatchers.items():
            if dispatcher.trouble is not None:
                return Ailment("NOMAD_UNREACHABLE", f"executor {name}: {dispatcher.trouble}")
            if not dispatcher.listed:
                return Ailment(UNKNOWN, f"starting: executor {name} hasn't been listed yet")
        if self.threshold > 0 and (depleting := self._depleting()):
            message = f"the prewarming pool is depleting: environments {', '.join(depleting)}"
            return Ailment("PREWARMING_POOL_DEPLETING", message)
        return None

    def services(self) -> tuple[ServiceStatus, ...]:
        """The daemon's services."""
        return self.shell.supervisor.status()

    def pools(self) -> dict[EnvironmentId, PoolStatistics]:
        """Each environment's pool, by its id."""
        return self.shell.environments.statistics()

    def executors(self) -> tuple[ExecutorFacts, ...]:
        """What runs the runners, each with what it promises."""
        return tuple(_facts(dispatcher) for dispatcher in self.shell.dispatchers.values())

    def store(self) -> Mapping[str, object]:
        """The database in numbers."""
        return asdict(self.shell.store.status())

    def line(self) -> str:
        """All in one line, for systemd."""
        pools = list(self.pools().values())
        idle, used = sum(pool.idle for pool in pools), sum(pool.used for pool in pools)
        return f"{len(pools)} environments, {idle} idle and {used} used runners"

    def _depleting(self) -> list[str]:
        return [_told(environment, pool) for environment, pool in self.pools().items() if self._is_depleting(pool)]

    def _is_depleting(self, pool: PoolStatistics) -> bool:
        return pool.size > 0 and pool.idle / pool.size < self.threshold


def _told(environment: EnvironmentId, pool: PoolStatistics) -> str:
    """With the reason, if there is one: a cluster without room, for instance."""
    return f"{environment} ({pool.message})" if pool.message else str(environment)


def _facts(dispatcher: Dispatcher) -> ExecutorFacts:
    executor = dispatcher.executor
    figures = executor.stream_figures() if isinstance(executor, FollowsStream) else None
    return ExecutorFacts(
        executor.name,
        dispatcher.reachable,
        dispatcher.trouble,
        dispatcher.listed,
        tuple(executor.abilities()),
        figures,
    )

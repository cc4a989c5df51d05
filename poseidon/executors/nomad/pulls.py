"""When the image of a runner is pulled anew: for as many as a pool has, after its environment was put, as the original
does. Those that replace claimed ones then start faster, and don't need the registry."""

from poseidon.core.model import Environment, EnvironmentId, JobId


class Pulls:
    """Counts the starts of each environment's newest generation."""

    def __init__(self) -> None:
        self._started: dict[EnvironmentId, tuple[int, int]] = {}
        self._decided: dict[JobId, bool] = {}

    def wanted(self, job: JobId, environment: Environment) -> bool:
        """Whether *job* is to pull its image: the same answer however often a start is repeated."""
        if job not in self._decided:
            generation, started = self._started.get(environment.id, (0, 0))
            started = started + 1 if generation == environment.generation else 1
            self._started[environment.id] = (environment.generation, started)
            self._decided[job] = started <= environment.pool_size
        return self._decided[job]

    def forget(self, job: JobId) -> None:
        """*job* won't be started any more."""
        self._decided.pop(job, None)

"""Which promises hold on a cluster, as far as its template tells: what a task driver really does, Nomad alone knows."""

from collections.abc import Iterable

from poseidon.executors.base import Ability
from poseidon.executors.nomad.job import IMAGES, Json
from poseidon.executors.nomad.settings import NomadSettings

CONFINES = {"docker": "a container each", "podman": "a container each", "exec": "a chroot with namespaces each"}
NOT_PARSED = "the template is not read yet"
NO_OVERSUBSCRIPTION = "oversubscription is not enabled"
"""Words of the warning that Nomad answers registrations with."""


def abilities_of(settings: NomadSettings, task: Json | None, warnings: Iterable[str]) -> tuple[Ability, ...]:
    """*task*: the template's; None: not known yet. *warnings*: what Nomad has said about our jobs."""
    return (
        *(_by_driver(settings, task, warnings) if task is not None else _unknown()),
        Ability("users", bool(settings.set_user), _users(settings)),
        Ability("marks", settings.mark_used, "in each job's meta" if settings.mark_used else "nomad.mark_used is off"),
    )


def _unknown() -> tuple[Ability, ...]:
    return tuple(Ability(name, False, NOT_PARSED) for name in ("memory", "processes", "cpu", "network", "isolation"))


def _by_driver(settings: NomadSettings, task: Json, warnings: Iterable[str]) -> tuple[Ability, ...]:
    driver = str(task.get("Driver"))
    confined = CONFINES.get(driver)
    unconfined = f"the driver {driver} isn't known to confine its tasks"
    ignored = any(NO_OVERSUBSCRIPTION in warning for warning in warnings)
    memory = "memory oversubscription is off in this cluster: memoryLimit is ignored" if ignored else "memory_max"
    most = (task.get("Config") or {}).get("pids_limit")
    private = driver in IMAGES
    return (
        Ability("memory", confined is not None and not ignored, memory if confined else unconfined),
        Ability("processes", bool(most), f"pids_limit {most}" if most else "no pids_limit in the template"),
        Ability("cpu", confined is not None, "shares" if confined else unconfined),
        Ability(
            "network",
            private,
            f"{settings.network_mode}, or none" if private else f"{driver} tasks share their node's network",
        ),
        Ability("isolation", confined is not None, confined or unconfined),
    )


def _users(settings: NomadSettings) -> str:
    if settings.set_user:
        return f"by {settings.set_user}, which images must have"
    return "nomad.set_user is empty: all commands run as the image's user"

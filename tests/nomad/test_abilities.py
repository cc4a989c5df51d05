"""What a cluster promises is told by its template, our settings, and what Nomad warns of."""

from typing import Any

import pytest

from poseidon.executors.nomad.abilities import abilities_of
from poseidon.executors.nomad.executor import open_nomad
from poseidon.executors.nomad.settings import NomadSettings

DOCKER = {"Driver": "docker", "Config": {"pids_limit": 100}}
OFF = 'Memory oversubscription is not enabled; Task "x" memory_max value will be ignored.'


def held(task: dict[str, Any] | None, *warnings: str, **settings: Any) -> set[str]:
    abilities = abilities_of(NomadSettings(**settings), task, warnings)
    assert [each.name for each in abilities] == [
        "memory",
        "processes",
        "cpu",
        "network",
        "isolation",
        "users",
        "marks",
    ]
    assert all(each.how for each in abilities)
    return {each.name for each in abilities if each.holds}


@pytest.mark.parametrize(
    ("task", "holds"),
    [
        (DOCKER, {"memory", "processes", "cpu", "network", "isolation"}),
        ({"Driver": "podman"}, {"memory", "cpu", "network", "isolation"}),
        ({"Driver": "exec", "Config": None}, {"memory", "cpu", "isolation"}),
        ({"Driver": "raw_exec"}, set()),
        ({}, set()),
        (None, set()),
    ],
)
def test_what_holds_depends_on_the_driver(task: dict[str, Any] | None, holds: set[str]) -> None:
    assert held(task) == {*holds, "users", "marks"}


def test_without_oversubscription_memory_limits_do_not_hold() -> None:
    assert "memory" not in held(DOCKER, OFF)
    assert "memory" in held(DOCKER, "something else")


def test_settings_can_give_up_users_and_marks() -> None:
    assert held(DOCKER) - held(DOCKER, set_user="", mark_used=False) == {"users", "marks"}


async def test_the_built_in_template_is_known_at_once() -> None:
    async with open_nomad(NomadSettings()) as executor:
        told = {each.name: each for each in executor.abilities()}
        assert told["isolation"].holds
        assert told["network"].how == "bridge, or none"
        assert not executor.stream_figures().connected

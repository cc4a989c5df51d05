"""Jobs are registered as the original does it, whatever their template, and read back as what they were made from."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.core.model import Environment, EnvironmentId, JobId
from poseidon.errors import ConfigError, Unsupported
from poseidon.executors.nomad import job as jobs
from poseidon.executors.nomad.pulls import Pulls
from poseidon.executors.nomad.settings import NomadSettings
from tests.nomad.loopback import recorded

SETTINGS = NomadSettings()
ENVIRONMENT = Environment(EnvironmentId(10), "image:1", 3, cpu_limit=20, memory_limit=256, executor="nomad")
JOB = JobId("10-8d8eca30-cc4a-4385-94ad-b089bc8bcead")
BARE: dict[str, Any] = {"TaskGroups": [{"Name": "default-group", "Tasks": [{"Name": "default-task"}]}]}


def runner(environment: Environment = ENVIRONMENT, base: Any = None, *, pull: bool = False, **settings: Any) -> Any:
    chosen = NomadSettings(**settings)
    return jobs.runner_of(base or jobs.built_in(chosen), JOB, environment, chosen, pull=pull)


def group(job: Any, name: str = "default-group") -> Any:
    return next(each for each in job["TaskGroups"] if each["Name"] == name)


def task(job: Any) -> Any:
    return group(job)["Tasks"][0]


def test_the_built_in_job_is_the_originals() -> None:
    job = runner()
    assert (job["ID"], job["Name"], job["Type"], job["Datacenters"]) == (JOB, JOB, "batch", ["dc1"])
    assert [(each["Name"], each["Count"]) for each in job["TaskGroups"]] == [("default-group", 1), ("config", 0)]
    assert task(job)["Config"] == {
        "command": "sleep",
        "args": ["infinity"],
        "image": "image:1",
        "force_pull": False,
        "network_mode": "none",
    }
    assert (task(job)["KillTimeout"], task(job)["KillSignal"]) == (0, "SIGKILL")
    assert group(job)["RestartPolicy"] == {"Attempts": 3, "Delay": 15e9, "Interval": 3600e9, "Mode": "fail"}
    assert group(job)["ReschedulePolicy"]["MaxDelay"] == 240e9
    config = group(job, "config")["Tasks"][0]
    assert (config["Driver"], config["Config"], config["Resources"]) == (
        "exec",
        {"command": "true"},
        {"CPU": 1, "MemoryMB": 10},
    )
    assert group(job, "config")["Meta"] == {"used": "false"}


def test_templates_carry_the_size_of_the_pool_and_run_themselves() -> None:
    template = jobs.template_of(jobs.built_in(SETTINGS), ENVIRONMENT, SETTINGS)
    assert template["ID"] == "template-10"
    assert group(template)["Count"] == 1
    assert group(template, "config")["Meta"] == {"used": "false", "prewarmingPoolSize": "3"}


def test_images_are_pulled_for_templates_and_where_wanted_unless_that_is_forbidden() -> None:
    base = jobs.built_in(SETTINGS)
    assert task(jobs.template_of(base, ENVIRONMENT, SETTINGS))["Config"]["force_pull"] is True
    assert task(runner(pull=True))["Config"]["force_pull"] is True
    assert task(runner(pull=True, disable_force_pull=True))["Config"]["force_pull"] is False


@pytest.mark.parametrize(
    ("limit", "reserved", "most"), [(0, 50, None), (4096, 50, 4096), (50, 50, 50), (30, 30, 30), (10, 10, 10)]
)
def test_the_memory_limit_is_a_ceiling_and_the_reservation_is_never_above(
    limit: int, reserved: int, most: int | None
) -> None:
    resources = task(runner(replace(ENVIRONMENT, memory_limit=limit)))["Resources"]
    assert (resources["MemoryMB"], resources.get("MemoryMaxMB")) == (reserved, most)


@pytest.mark.parametrize(("limit", "shares"), [(0, 40), (1, 2), (2, 2), (500, 500)])
def test_cpu_shares_are_the_limit_but_no_fewer_than_a_container_can_have(limit: int, shares: int) -> None:
    assert task(runner(replace(ENVIRONMENT, cpu_limit=limit)))["Resources"]["CPU"] == shares


def test_with_network_access_each_exposed_port_is_mapped_once() -> None:
    job = runner(replace(ENVIRONMENT, network_access=True, exposed_ports=(80, 8080, 80)), network_mode="cni/x")
    ports = [{"Label": "80", "To": 80}, {"Label": "8080", "To": 8080}]
    assert group(job)["Networks"] == [{"Mode": "cni/x", "DynamicPorts": ports}]
    assert task(job)["Config"]["network_mode"] == ""


def test_without_network_access_there_is_no_network_whatever_the_template_says() -> None:
    base = jobs.built_in(SETTINGS)
    base["TaskGroups"][0]["Networks"] = [{"Mode": "host", "DNS": {"Servers": ["192.0.2.1"]}}]
    assert group(runner(replace(ENVIRONMENT, exposed_ports=(80,)), base))["Networks"] == []
    networked = runner(replace(ENVIRONMENT, network_access=True), base)
    assert group(networked)["Networks"][0]["DNS"] == {"Servers": ["192.0.2.1"]}


def test_driver_user_and_command_are_the_templates() -> None:
    base = {
        "Type": "service",
        "TaskGroups": [
            {
                "Name": "default-group",
                "Count": 7,
                "Tasks": [
                    {
                        "Name": "default-task",
                        "Driver": "raw_exec",
                        "User": "worker",
                        "Config": {"command": "/bin/tail", "args": ["-f", "/dev/null"]},
                    }
                ],
            }
        ],
    }
    job = runner(base=base)
    assert (job["Type"], group(job)["Count"]) == ("service", 1)
    assert task(job)["User"] == "worker"
    assert task(job)["Config"] == {"command": "/bin/tail", "args": ["-f", "/dev/null"]}
    assert group(job, "config")["Meta"] == {"used": "false", "image": "image:1"}


def test_what_a_template_lacks_is_added() -> None:
    job = runner(base={"TaskGroups": None} | BARE)
    assert task(job)["Config"]["command"] == "sleep"
    assert group(job, "config")["Count"] == 0
    assert runner(base={"ID": "x"})["TaskGroups"][0]["Name"] == "default-group"


def test_a_template_as_nomad_parses_it_is_made_fit_for_registration() -> None:
    parsed = recorded("post_jobs_parse").body
    assert group(parsed)["ReschedulePolicy"]["Attempts"] is None
    job = runner(base=parsed)
    assert group(job)["ReschedulePolicy"]["Attempts"] == 0
    assert task(job)["Resources"]["MemoryMB"] == 30


def test_a_template_is_never_changed_by_what_is_made_from_it() -> None:
    base = jobs.built_in(SETTINGS)
    before = json.dumps(base)
    runner(replace(ENVIRONMENT, network_access=True, exposed_ports=(1,)), base)
    jobs.template_of(base, ENVIRONMENT, SETTINGS)
    assert json.dumps(base) == before


environments = st.builds(
    Environment,
    id=st.integers(0, 2**63 - 1).map(EnvironmentId),
    image=st.text(min_size=1, max_size=20),
    pool_size=st.integers(0, 2**31 - 1),
    cpu_limit=st.integers(2, 2**31 - 1),
    memory_limit=st.just(0) | st.integers(10, 2**31 - 1),
    network_access=st.booleans(),
    exposed_ports=st.lists(st.integers(1, 65535), unique=True, max_size=4).map(tuple),
    executor=st.just("nomad"),
)


@given(environments, st.sampled_from([None, BARE]))
def test_an_environment_is_read_back_from_its_template(environment: Environment, base: Any) -> None:
    jobs.check(environment)
    template = jobs.template_of(base or jobs.built_in(SETTINGS), environment, SETTINGS)
    expected = environment if environment.network_access else replace(environment, exposed_ports=())
    assert jobs.environment_of_template(json.loads(json.dumps(template)), SETTINGS) == expected


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("template-1", 1),
        ("template-10", 10),
        ("template-100", 100),
        ("template-0", 0),
        ("template", None),
        ("template-", None),
        ("template-010", None),
        ("template-foo", None),
        ("template-10-x", None),
        ("xtemplate-10", None),
        ("template-99999999999999999999", None),
        ("template-9999999999999999999", None),
        ("template-１", None),
    ],
)
def test_template_ids_are_exact(name: str, known: int | None) -> None:
    assert jobs.template_id(name) == known


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("180", 180), (str(2**31 - 1), 2**31 - 1)]
    + [(text, None) for text in ("", "-1", "x", str(2**31), "9" * 30, "9" * 5000, "١")],
)
def test_a_count_in_meta_is_a_number_within_reason(text: str, count: int | None) -> None:
    assert jobs.count_of(text) == count
    template = jobs.template_of(jobs.built_in(SETTINGS), ENVIRONMENT, SETTINGS)
    next(each for each in template["TaskGroups"] if each["Name"] == "config")["Meta"]["prewarmingPoolSize"] = text
    read = jobs.environment_of_template(template, SETTINGS)
    assert read is not None
    assert read.pool_size == (count or 0)


@pytest.mark.parametrize("missing", ["image", "task"])
def test_an_incomplete_template_is_none(missing: str) -> None:
    template = jobs.template_of(jobs.built_in(SETTINGS), ENVIRONMENT, SETTINGS)
    if missing == "image":
        del task(template)["Config"]["image"]
    else:
        group(template)["Tasks"] = None
    assert jobs.environment_of_template(template, SETTINGS) is None
    assert jobs.environment_of_template({}, SETTINGS) is None


@pytest.mark.parametrize(
    "limits",
    [
        {"cpu_limit": -1},
        {"cpu_limit": 2**31},
        {"memory_limit": 9},
        {"memory_limit": 2**31},
        {"memory_limit": -1},
        {"exposed_ports": (0,)},
        {"exposed_ports": (80, 65536)},
    ],
)
def test_limits_that_nomad_would_refuse_are_refused_before(limits: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        jobs.check(replace(ENVIRONMENT, **limits))


def test_a_mark_changes_only_the_config_groups_meta() -> None:
    job = recorded("get_job").body
    changed = jobs.marked(job, SETTINGS, used=True, timeout=60)
    assert changed is not None
    meta = group(changed, "config")["Meta"]
    assert meta == {"timeout": "60", "prewarmingPoolSize": "0", "environment": "10", "used": "true"}
    meta.update(used="false", timeout="300")
    assert changed == job


def test_a_mark_that_is_there_is_not_written_again() -> None:
    job = recorded("get_job").body
    assert jobs.marked(job, SETTINGS, used=False, timeout=0) is None
    once = jobs.marked(job, SETTINGS, used=True, timeout=60)
    assert once is not None
    assert jobs.marked(once, SETTINGS, used=True, timeout=60) is None
    assert jobs.marked(once, SETTINGS, used=True, timeout=61) is not None
    assert jobs.marked({}, SETTINGS, used=True, timeout=60) is None


def test_json_templates_are_read_with_and_without_their_envelope() -> None:
    assert jobs.read_json(json.dumps({"Job": BARE}), "f") == BARE
    assert jobs.read_json(json.dumps(BARE), "f") == BARE
    assert jobs.read_json('job "x" {}', "f") is None
    for wrong in ("{", '{"Job": 3}', '{"TaskGroups": 3}'):
        with pytest.raises(ConfigError, match="f: "):
            jobs.read_json(wrong, "f")


def test_as_many_images_are_pulled_as_the_pool_is_large_and_anew_with_each_generation() -> None:
    pulls = Pulls()
    environment = replace(ENVIRONMENT, pool_size=2)
    assert [pulls.wanted(JobId(f"j{number}"), environment) for number in range(4)] == [True, True, False, False]
    assert pulls.wanted(JobId("j0"), environment)
    assert not pulls.wanted(JobId("j2"), environment)
    pulls.forget(JobId("j0"))
    assert not pulls.wanted(JobId("j0"), environment)
    assert pulls.wanted(JobId("k"), replace(environment, generation=2))

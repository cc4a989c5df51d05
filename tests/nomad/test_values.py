"""What Nomad says becomes values that mean just that, whoever says it: an event, a list, or the allocation itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poseidon.core.events import Claim, EndExecutions, Start, Started
from poseidon.core.fleet import Fleet
from poseidon.core.model import (
    UNTOLD,
    Allocation,
    ClientStatus,
    DesiredStatus,
    EnvironmentId,
    JobGone,
    JobId,
    JobSeen,
    JobStatus,
    Port,
    Reason,
    RunnerId,
)
from poseidon.executors.nomad import wire
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.executors.nomad.values import Reader
from tests.core.nomad_values import RECORDINGS, values_of
from tests.nomad.loopback import HTTP, recorded
from tests.nomad.recorded import DOCKER, events_of, stream_lines

READER = Reader(NomadSettings())
JOB = "10-8d8eca30-cc4a-4385-94ad-b089bc8bcead"
LINE = msgspec.json.Decoder(wire.Line)
ALL = sorted([*RECORDINGS.glob("*.ndjson"), *DOCKER.glob("*.ndjson")])


def allocation(complete: bool = True, **fields: Any) -> Allocation:
    raw = {"ID": "a", "JobID": JOB, "CreateIndex": 1, "ModifyIndex": 2, "TaskGroup": "default-group", **fields}
    return READER.allocation(msgspec.convert(raw, wire.Allocation), complete=complete)


def told(topic: str, payload: dict[str, Any], index: int = 9) -> list[object]:
    line = LINE.decode(msgspec.json.encode({"Index": index, "Events": [{"Topic": topic, "Payload": payload}]}))
    return list(READER.values(line.index, line.events or ()))


def out_of_memory(name: str) -> list[bool]:
    """Of each allocation event that has a task, in order, whether it was an out-of-memory kill."""
    found = [
        READER.allocation(msgspec.convert(raw, wire.Allocation), complete=True)
        for raw in events_of(DOCKER / f"{name}.ndjson", "Allocation")
        if "TaskStates" in raw
    ]
    return [each.oom_killed for each in found]


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_recorded_events_mean_what_the_rules_were_tried_on(file: Path) -> None:
    for raw in stream_lines(file):
        line = LINE.decode(msgspec.json.encode(raw))
        expected = [value for event in raw["Events"] if event["Topic"] != "Node" for value in values_of(event)]
        seen = READER.values(line.index, line.events or ())
        assert {_bare(value) for value in seen} == {_bare(value) for value in expected}


def _bare(value: object) -> object:
    """Without what the plain reading of the core's tests leaves out, or takes as it is."""
    if isinstance(value, Allocation):
        return replace(value, ports=(), oom_killed=False)
    return replace(value, used=None) if isinstance(value, JobSeen) else value


def test_in_a_line_older_allocations_come_first() -> None:
    event = {"Topic": "Allocation", "Payload": {"Allocation": {"ID": "", "JobID": JOB, "TaskGroup": "default-group"}}}
    events = []
    for created in (7, 3):
        events.append(msgspec.json.decode(msgspec.json.encode(event)))
        events[-1]["Payload"]["Allocation"] |= {"ID": f"a{created}", "CreateIndex": created, "ModifyIndex": 8}
    line = LINE.decode(msgspec.json.encode({"Index": 8, "Events": events}))
    assert [value.id for value in READER.values(8, line.events or ()) if isinstance(value, Allocation)] == ["a3", "a7"]


def test_a_list_leaves_open_what_it_does_not_tell() -> None:
    for stub in msgspec.json.decode((HTTP / "http_allocs_after_reschedule.json").read_bytes()):
        listed = READER.allocation(msgspec.convert(stub, wire.Allocation), complete=False)
        assert (listed.previous, listed.next) == (UNTOLD, UNTOLD)
        assert listed.follow_up is None or listed.follow_up == stub["FollowupEvalID"]


@pytest.mark.parametrize(
    ("name", "recording"),
    [
        ("http_allocs_after_reschedule", "c_kill9_attempts0_reschedule_twice_batch"),
        ("http_allocs_after_alloc_stop_batch", "d_alloc_stop_batch"),
        ("http_allocs_after_alloc_stop_service", "d_alloc_stop_service"),
        ("http_allocs_after_e_drain_service_slowstop", "e_drain_service_slowstop"),
        ("http_allocs_after_lost_batch", "f_client_killed_lost_and_back_batch"),
        ("http_allocs_after_lost_service", "f_client_killed_lost_and_back_service"),
    ],
)
def test_recorded_lists_say_the_same_as_the_events_before_them(name: str, recording: str) -> None:
    last = {}
    for raw in events_of(RECORDINGS / f"{recording}.ndjson", "Allocation"):
        last[raw["ID"], raw["ModifyIndex"]] = READER.allocation(msgspec.convert(raw, wire.Allocation), complete=True)
    body = (HTTP / f"{name}.json").read_bytes()
    compared = 0
    for listed in READER.allocations(body):
        if (event := last.get((listed.id, listed.version))) is not None:
            compared += 1
            assert replace(listed, previous=event.previous, next=event.next) == event
    assert compared


def test_ports_come_from_events_from_lists_with_resources_and_from_the_allocation_itself() -> None:
    expected = (Port(80, "127.0.0.1:28399"),)
    [listed] = READER.allocations(msgspec.json.encode(recorded("docker_allocations_bridge").body))
    detail = msgspec.convert(recorded("docker_allocation_bridge").body, wire.Allocation)
    assert listed.ports == expected
    assert READER.allocation(detail, complete=True).ports == expected
    [stub] = READER.allocations(msgspec.json.encode(recorded("docker_job_allocations_bridge").body))
    assert stub.ports == ()
    in_events = [
        READER.allocation(msgspec.convert(raw, wire.Allocation), complete=True).ports
        for raw in events_of(DOCKER / "n_bridge_dynamic_port_to80.ndjson", "Allocation")
    ]
    assert in_events
    assert all(len(ports) == 1 and ports[0].exposed == 80 for ports in in_events)


def test_a_port_without_a_target_is_known_by_its_label_and_ipv6_addresses_keep_their_form() -> None:
    ports = [{"Label": "8080", "Value": 20001, "To": 0, "HostIP": "fd00::1"}]
    found = allocation(AllocatedResources={"Shared": {"Ports": ports}})
    assert found.ports == (Port(8080, "[fd00::1]:20001"),)


def test_each_out_of_memory_kill_of_the_main_process_is_told() -> None:
    told_so = out_of_memory("g_oom_docker_main_restarts")
    assert told_so == [False, False, *[True] * 9, False, False]
    assert out_of_memory("g_oom_docker_main_attempts0_no_reschedule")[-1]


def test_an_end_that_was_asked_for_is_no_out_of_memory_kill_though_the_container_had_one() -> None:
    assert not any(out_of_memory("g_oom_docker_exec_then_purge"))
    assert not any(out_of_memory("g_oom_docker_exec_then_alloc_restart"))


def test_the_newest_end_counts_by_its_time_not_by_its_place() -> None:
    events = [
        {"Type": "Terminated", "Time": 5, "Details": {"oom_killed": "false"}},
        {"Type": "Terminated", "Time": 2, "Details": {"oom_killed": "true"}},
        {"Type": "Started", "Time": 1},
    ]
    assert not allocation(TaskStates={"default-task": {"State": "dead", "Events": events}}).oom_killed


def test_a_failure_is_told_as_the_node_words_it_and_only_until_the_task_runs() -> None:
    found = [
        READER.allocation(msgspec.convert(raw, wire.Allocation), complete=True)
        for raw in events_of(RECORDINGS / "c_driver_failure_bad_command_batch.ndjson", "Allocation")
    ]
    assert 'binary "/does/not/exist" could not be found' in found[-1].trouble
    assert found[0].trouble == ""
    events = [
        {"Type": "Driver Failure", "Time": 1, "DisplayMessage": "Failed to pull `x`"},
        {"Type": "Restarting", "Time": 2, "DisplayMessage": "Task restarting in 15s"},
    ]
    for client, task, trouble in (
        ("pending", "pending", "Failed to pull `x`"),
        ("failed", "dead", "Failed to pull `x`"),
        ("running", "running", ""),
    ):
        states = {"default-task": {"State": task, "Events": events}}
        assert allocation(ClientStatus=client, TaskStates=states).trouble == trouble


def test_only_a_running_task_has_a_life() -> None:
    for state, started in (("running", "t"), ("pending", None), ("dead", None)):
        states = {"default-task": {"State": state, "StartedAt": "t"}, "other": {"State": "running", "StartedAt": "x"}}
        assert allocation(TaskStates=states).started == started
    assert allocation(TaskStates=None).started is None


def test_states_of_newer_versions_are_understood_or_taken_for_the_worst() -> None:
    assert allocation(ClientStatus="unknown").client is ClientStatus.UNKNOWN
    assert allocation(ClientStatus="brand-new").client is ClientStatus.UNKNOWN
    assert allocation(DesiredStatus="brand-new").desired is DesiredStatus.EVICT


def test_slots_are_read_from_names() -> None:
    assert allocation(Name=f"{JOB}.default-group[12]").slot == 12
    assert allocation(Name="").slot == 0


def test_a_purge_is_known_by_its_evaluation() -> None:
    evaluation = {"ID": "e", "JobID": JOB, "CreateIndex": 7, "TriggeredBy": "job-deregister", "Status": "pending"}
    assert told("Evaluation", {"Evaluation": evaluation}) == [JobGone(JobId(JOB), 7)]
    assert told("Evaluation", {"Evaluation": {**evaluation, "TriggeredBy": "node-update"}}) == []


@pytest.mark.parametrize("flag", ["Deleted", "Purge"])
def test_newer_versions_tell_of_a_purge_by_the_job_itself(flag: str) -> None:
    job = {"ID": JOB, "ModifyIndex": 5, "Status": "running"}
    assert told("Job", {"Job": job, flag: True}) == [JobGone(JobId(JOB), 9)]
    assert told("Job", {"Job": job, flag: False}) == [JobSeen(JobId(JOB), 5, JobStatus.RUNNING, used=False)]


def test_a_stopped_job_is_dead_whatever_its_status() -> None:
    job = {"ID": JOB, "ModifyIndex": 5, "Status": "running", "Stop": True}
    [seen] = told("Job", {"Job": job})
    assert isinstance(seen, JobSeen)
    assert seen.status is JobStatus.DEAD


def test_marks_are_told_only_if_they_are_kept() -> None:
    groups = [{"Name": "config", "Meta": {"used": "true"}}, {"Name": "default-group", "Meta": None}]
    job = msgspec.convert({"ID": JOB, "ModifyIndex": 5, "Status": "running", "TaskGroups": groups}, wire.Job)
    assert READER.job(job).used is True
    assert Reader(NomadSettings(mark_used=False)).job(job).used is None


@pytest.mark.parametrize("job", ["template-10", "10", "x-8d8eca30-cc4a-4385-94ad-b089bc8bcead", "010-" + JOB[3:]])
def test_what_is_about_others_is_not_told(job: str) -> None:
    assert told("Job", {"Job": {"ID": job, "ModifyIndex": 5, "Status": "running"}}) == []
    raw = {"ID": "a", "JobID": job, "CreateIndex": 1, "ModifyIndex": 2, "TaskGroup": "default-group"}
    assert told("Allocation", {"Allocation": raw}) == []
    assert told("Allocation", {"Allocation": {**raw, "JobID": JOB, "TaskGroup": "config"}}) == []


def test_the_list_of_jobs_tells_which_run_and_whose_names_are_strange() -> None:
    listed = recorded("get_jobs_prefix_10-").body
    strange = {**listed[0], "ID": "10-nonsense"}
    idle = {**listed[0], "ID": JOB.replace("8d", "9d"), "JobSummary": None}
    templates = [{**listed[0], "ID": "template-7"}, {**listed[0], "ID": "template-8", "Stop": True}]
    table = READER.job_table(msgspec.json.encode([*listed, strange, idle, *templates]))
    assert [seen.job for seen in table.seen] == [listed[0]["ID"], listed[1]["ID"], idle["ID"]]
    assert table.running == {listed[0]["ID"], listed[1]["ID"]}
    assert table.others == ("10-nonsense",)
    assert table.templates == {7: listed[0]["JobModifyIndex"]}
    assert all(seen.used is None for seen in table.seen)


ENDS = {
    Reason.LOST: {"ClientStatus": "lost", "DesiredStatus": "stop", "NextAllocation": "b"},
    Reason.FAILED: {"ClientStatus": "failed", "DesiredStatus": "stop", "NextAllocation": "b"},
    Reason.DISCONNECTED: {"ClientStatus": "unknown", "DesiredStatus": "run"},
    Reason.MIGRATED: {"ClientStatus": "running", "DesiredStatus": "stop", "NextAllocation": "b"},
}


@pytest.mark.parametrize("old_first", [True, False])
@pytest.mark.parametrize("reason", ENDS)
def test_the_order_within_a_line_changes_no_reason(reason: Reason, old_first: bool) -> None:
    """A line tells of an allocation's end and of its replacement, in any order (recorded: Nomad 1.1)."""
    fleet = Fleet(settle=3.0, mint=lambda _: RunnerId("minted"))
    fleet.know(EnvironmentId(10), 1)
    fleet.handle(Start(JobId(JOB), EnvironmentId(10), 1), 0.0)
    fleet.handle(Started(JobId(JOB), 5), 0.0)
    running = {"default-task": {"State": "running", "StartedAt": "t"}}
    fleet.handle(allocation(ModifyIndex=6, ClientStatus="running", DesiredStatus="run", TaskStates=running), 1.0)
    fleet.handle(Claim(RunnerId(JOB)), 1.0)
    both = {"JobID": JOB, "ModifyIndex": 9, "TaskGroup": "default-group"}
    old = {**both, "ID": "a", "CreateIndex": 1, "TaskStates": running, **ENDS[reason]}
    new = {**both, "ID": "b", "CreateIndex": 9, "ClientStatus": "pending", "DesiredStatus": "run"}
    events = [{"Topic": "Allocation", "Payload": {"Allocation": raw}} for raw in (old, new)]
    line = LINE.decode(msgspec.json.encode({"Index": 9, "Events": events if old_first else events[::-1]}))
    decisions = [each for value in READER.values(9, line.events or ()) for each in fleet.handle(value, 2.0)]
    assert [each.reason for each in decisions if isinstance(each, EndExecutions)] == [reason]

"""However an execution ends: one final message, one close, and nothing of it left where nobody wants it."""

import hashlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from poseidon.api.server import ServerLimits
from poseidon.core.model import Reason, RunnerId
from poseidon.errors import AllocationGone, ExecutorUnreachable, LeftRunning, PoseidonError
from poseidon.executors.base import Exit
from poseidon.runners import execution
from tests.api.service import TERMINAL, Service, checked, connected, next_of, open_service, read, stalled, until, vanish

OUT_OF_MEMORY = {"type": "error", "data": "the allocation was OOM Killed"}
STOPPED = {"type": "error", "data": "the allocation stopped as expected"}
FAILED = {"type": "error", "data": "Error executing the request"}
TIMEOUT = {"type": "timeout"}
STUBBORN = "trap '' INT QUIT TERM HUP; "


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_service(tmp_path, limits=ServerLimits(stall=1.0)) as opened:
        await opened.put(1)
        yield opened


@pytest.fixture
async def runner(service: Service) -> str:
    return await service.claim()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GRACE", 0.3)
    monkeypatch.setattr(execution, "SHORT_GRACE", 0.2)
    monkeypatch.setattr(execution, "EXPLANATION", 0.3)


def says_pid(command: str) -> str:
    return f"echo $$ > pid.new; mv pid.new pid; echo up; {command}"  # so that it is never seen empty


def alive(service: Service, runner_folder: Path) -> bool:
    pid = int((runner_folder / "pid").read_text())
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def recorded(service: Service) -> list[dict[str, Any]]:
    """The executions' rows, oldest first."""

    def rows(connection: Any) -> list[dict[str, Any]]:
        found = connection.exec_driver_sql("SELECT * FROM executions ORDER BY created_at").mappings()
        return [dict(row) for row in found]

    await service.store.flush()
    return await service.store.read(rows)


def is_gone(service: Service, runner: str) -> bool:
    try:
        service.shell.claims.used(RunnerId(runner))
    except PoseidonError:
        return True
    return False


# The time limit


async def test_a_time_limit_ends_it_after_its_output_with_timeout(service: Service, runner: str) -> None:
    with trio.fail_after(30):
        ended = await service.run(runner, "echo before; sleep 60", timeLimit=1)
    assert ended.messages[1:] == [{"type": "stdout", "data": "before\n"}, TIMEOUT]
    assert ended.code == 1000


async def test_a_runner_survives_a_time_limit_if_nothing_of_the_command_does(service: Service, runner: str) -> None:
    folder = service.workspace(runner)
    await service.run(runner, says_pid(STUBBORN + "setsid sleep 60 & while true; do sleep 1; done"), timeLimit=1)
    assert (await service.run(runner, "echo again")).text() == "again\n"
    assert not alive(service, folder)


async def test_a_runner_with_a_command_that_survives_its_limit_is_destroyed(service: Service, runner: str) -> None:
    service.executor.unkillable = True
    ended = await service.run(runner, STUBBORN + "while true; do sleep 0.1; done", timeLimit=1)
    assert ended.final == TIMEOUT
    await until(lambda: is_gone(service, runner))
    answer = await service.http.post(f"/runners/{runner}/execute", json={"command": "true"})
    assert (answer.status_code, "unstoppable" in answer.json()["message"]) == (410, True)


async def test_sigquit_comes_first(service: Service, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GRACE", 5)
    folder = service.workspace(runner)
    command = "trap 'echo told > told; exit 0' QUIT; echo up; while true; do sleep 0.01; done"
    await service.run(runner, command, timeLimit=1)
    await until((folder / "told").exists)


async def test_nothing_new_starts_while_a_command_is_being_stopped(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "GRACE", 0.8)
    url = await service.execute(runner, "echo second")
    await service.run(runner, STUBBORN + "while true; do sleep 0.1; done", timeLimit=1)
    before = trio.current_time()
    async with connected(url) as socket:
        assert (await read(socket)).text() == "second\r\n"
    assert trio.current_time() - before > 0.5


async def test_a_client_that_does_not_read_does_not_delay_the_limit(service: Service, runner: str) -> None:
    folder = service.workspace(runner)
    async with stalled(await service.execute(runner, says_pid("yes"), timeLimit=1)):
        await until((folder / "pid").exists)
        with trio.fail_after(15):
            while alive(service, folder):
                await trio.sleep(0.02)


async def test_a_time_limit_holds_the_inactivity_and_none_does_not(service: Service) -> None:
    async def run(limit: int) -> dict[str, Any]:
        patient = await service.claim(timeout=1)
        return (await service.run(patient, "sleep 1.5; exit 7", timeLimit=limit)).final

    finals: dict[int, dict[str, Any]] = {}

    async def keep(limit: int) -> None:
        finals[limit] = await run(limit)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep, 0)
        nursery.start_soon(keep, 10)
    assert finals == {0: TIMEOUT, 10: {"type": "exit", "data": 7}}


# The client


async def test_the_command_is_stopped_when_its_client_closes(service: Service, runner: str) -> None:
    folder = service.workspace(runner)
    async with connected(await service.execute(runner, says_pid(STUBBORN + "while true; do sleep 1; done"))) as socket:
        await next_of(socket, "stdout")
    await until(lambda: not alive(service, folder))
    await until(lambda: service.executions.running == 0)
    assert (await recorded(service))[-1]["outcome"] == "client_gone"
    assert (await service.run(runner, "echo usable")).text() == "usable\n"


async def test_the_command_is_stopped_when_its_client_vanishes(service: Service, runner: str) -> None:
    folder = service.workspace(runner)
    async with connected(await service.execute(runner, says_pid("sleep 60"))) as client:
        await next_of(client, "stdout")
        vanish(client)
        await until(lambda: not alive(service, folder))


async def test_a_client_that_leaves_at_once_leaves_nothing(service: Service, runner: str) -> None:
    service.executor.start_delay = 0.02
    for delay in (0, 0.001, 0.01, 0.02, 0.03):
        async with connected(await service.execute(runner, "sleep 60")):
            await trio.sleep(delay)
    await until(lambda: service.executions.running == 0)
    assert not any(service.executor.processes.values())
    assert {row["outcome"] for row in await recorded(service)} == {"client_gone"}


async def test_a_start_that_takes_long_is_given_up_with_its_client_or_limit(service: Service, runner: str) -> None:
    service.executor.start_delay = 60
    async with connected(await service.execute(runner, "true")) as client:
        await next_of(client, "start")
    await until(lambda: service.executions.running == 0)
    ended = await service.run(runner, "true", timeLimit=1)
    assert ended.messages == [{"type": "start"}, TIMEOUT]


async def test_a_flood_of_input_neither_grows_memory_nor_hides_that_the_client_left(
    service: Service, runner: str
) -> None:
    folder = service.workspace(runner)
    url = await service.execute(runner, says_pid("sleep 60"), tty=False)
    async with connected(url, subprotocol=TERMINAL) as client:
        await next_of(client, "stdout")
        before = rss()
        with trio.move_on_after(1) as scope:
            for _ in range(1000):
                await client.send(b"x" * 100_000)
        assert scope.cancelled_caught
        assert rss() - before < 30_000_000
        vanish(client)
        await until(lambda: not alive(service, folder))


async def test_a_flood_of_input_does_not_keep_the_end_back(service: Service, runner: str) -> None:
    url = await service.execute(runner, "sleep 0.5; exit 4", tty=False)
    async with connected(url, subprotocol=TERMINAL) as client, trio.open_nursery() as nursery:

        async def flood() -> None:
            while True:
                await client.send(b"x" * 10_000)

        nursery.start_soon(flood)
        assert (await next_of(client, "exit"))["data"] == 4
        vanish(client)
        nursery.cancel_scope.cancel()


async def test_a_slow_reader_gets_all_of_it_and_costs_little(service: Service, runner: str) -> None:
    url = await service.execute(runner, "seq 1500000", tty=False)
    before, size, digest = rss(), 0, hashlib.md5()
    final: dict[str, Any] = {}
    async with connected(url, queue=1) as client:
        await trio.sleep(0.3)
        assert sum(life.output.size for life in service.executions._lives) <= 400 * 1024
        await next_of(client, "start")
        while not final:
            message = checked(await client.recv())
            if message["type"] != "stdout":
                final = message
                break
            size += len(message["data"])
            digest.update(message["data"].encode())
            if size % 1_000_000 < len(message["data"]):
                await trio.sleep(0.01)
                assert rss() - before < 30_000_000
    expected = subprocess.run(["seq", "1500000"], check=True, capture_output=True).stdout
    assert (size, digest.digest()) == (len(expected), hashlib.md5(expected).digest())
    assert size > 10_000_000
    assert final == {"type": "exit", "data": 0}


def rss() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_output_that_waited_is_delivered_after_the_end(service: Service, runner: str) -> None:
    url = await service.execute(runner, "head -c 200000 /dev/zero | tr '\\0' x", tty=False)
    async with connected(url, queue=1) as client:
        await until(lambda: all(life.over.is_set() for life in service.executions._lives))
        await trio.sleep(0.2)
        ended = await read(client)
    assert len(ended.text()) == 200_000
    assert ended.final == {"type": "exit", "data": 0}


async def test_a_client_that_never_reads_is_cut_off(service: Service, runner: str) -> None:
    folder = service.workspace(runner)
    async with stalled(await service.execute(runner, says_pid("yes"))):
        await until((folder / "pid").exists)
        await until(lambda: not alive(service, folder))


# The runner


async def test_a_runner_that_ends_says_why(service: Service) -> None:
    for reason, final in (
        (Reason.RELEASED, STOPPED),
        (Reason.STOPPED, STOPPED),
        (Reason.INACTIVE, TIMEOUT),
        (Reason.OUT_OF_MEMORY, OUT_OF_MEMORY),
        (Reason.LOST, FAILED),
        (Reason.RESTARTED, FAILED),
    ):
        runner = await service.claim()
        async with connected(await service.execute(runner, "sleep 60")) as client:
            await next_of(client, "start")
            await service.shell.claims.release(RunnerId(runner), reason)
            ended = await read(client)
        assert (ended.final, ended.code) == (final, 1000), reason


async def test_deleting_a_runner_ends_its_executions(service: Service, runner: str) -> None:
    async with connected(await service.execute(runner, "echo up; sleep 60")) as client:
        await next_of(client, "stdout")
        assert (await service.http.delete(f"/runners/{runner}")).status_code == 204
        assert (await read(client)).final == STOPPED
    assert (await recorded(service))[-1]["detail"] == "released"


async def test_a_restart_in_place_is_explained_though_the_connection_breaks_first(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "EXPLANATION", 10)
    allocation = service.allocation(runner)
    async with connected(await service.execute(runner, "echo up; sleep 60")) as client:
        await next_of(client, "stdout")
        service.executor.lose(allocation.id)
        await trio.sleep(0.1)
        service.executor.run(allocation.job)
        ended = await read(client)
    assert ended.final == FAILED
    await until(lambda: service.executions.running == 0)
    assert (await recorded(service))[-1]["outcome"] == "runner_gone"


async def test_a_lost_connection_is_an_error_and_never_an_exit(service: Service, runner: str) -> None:
    async with connected(await service.execute(runner, "echo up; sleep 60")) as client:
        await next_of(client, "stdout")
        service.executor.lose(service.allocation(runner).id)
        ended = await read(client)
    assert (ended.final, ended.code) == (FAILED, 1000)
    await until(lambda: service.executions.running == 0)
    assert (await recorded(service))[-1]["outcome"] == "failed"


async def test_a_command_that_cannot_be_started_is_an_error(service: Service, runner: str) -> None:
    for failure in (AllocationGone("it is gone"), ExecutorUnreachable("nobody answers")):
        service.executor.start_failure = failure
        ended = await service.run(runner, "true")
        assert ended.messages == [{"type": "start"}, FAILED]
    assert (await recorded(service))[-1]["detail"] == "nobody answers"


async def test_a_runner_in_which_a_lost_start_may_run_on_is_destroyed(service: Service, runner: str) -> None:
    service.executor.start_failure = LeftRunning("it was lost while it began")
    assert (await service.run(runner, "true")).final == FAILED
    await until(lambda: is_gone(service, runner))
    answer = await service.http.post(f"/runners/{runner}/execute", json={"command": "true"})
    assert (answer.status_code, "unstoppable" in answer.json()["message"]) == (410, True)


async def test_a_client_is_told_at_once_though_a_start_cant_be_given_up_quickly(service: Service, runner: str) -> None:
    service.executor.start_delay = 60
    service.executor.stuck = trio.Event()
    async with connected(await service.execute(runner, "true")) as client:
        await next_of(client, "start")
        await service.http.delete(f"/runners/{runner}")
        try:
            with trio.fail_after(30):
                assert (await read(client)).final == STOPPED
            assert service.executions.running == 1
        finally:
            service.executor.stuck.set()
        await until(lambda: service.executions.running == 0)


async def test_what_the_executor_cannot_do_is_told_on_stderr(service: Service, runner: str) -> None:
    service.executor.one_user = True
    ended = await service.run(runner, "true", privilegedExecution=True)
    assert ended.text("stderr") == "there is only one user here\n"
    assert ended.final == FAILED


async def test_want_of_memory_is_told_in_the_words_that_clients_know(service: Service, runner: str) -> None:
    service.executor.ends_as = Exit(137, out_of_memory=True)
    assert (await service.run(runner, "true")).final == OUT_OF_MEMORY


async def test_a_remote_kill_waits_for_its_explanation(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.executor.settle = 1.0
    for code in (128, 137):
        service.executor.ends_as = Exit(code)
        monkeypatch.setattr(execution, "EXPLANATION", 0.05)
        assert (await service.run(runner, "true")).final == {"type": "exit", "data": code}
        monkeypatch.setattr(execution, "EXPLANATION", 10)
        claimed = await service.claim()
        async with connected(await service.execute(claimed, "echo up; exit 5")) as client:
            await next_of(client, "stdout")
            await trio.sleep(0.1)
            await service.shell.claims.release(RunnerId(claimed), Reason.OUT_OF_MEMORY)
            assert (await read(client)).final == OUT_OF_MEMORY


async def test_a_fault_in_one_execution_spares_the_others(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(await service.execute(runner, "echo up; read; exit 6", tty=False)) as client:
        await next_of(client, "stdout")
        with monkeypatch.context() as patch:
            patch.setattr(execution.Execution, "_attend", None)
            ended = await service.run(runner, "true")
        assert ended.messages == [{"type": "start"}, FAILED]
        await client.send("\n")
        assert (await read(client)).final == {"type": "exit", "data": 6}


# Records


async def test_every_execution_is_recorded_without_its_command(service: Service, runner: str) -> None:
    await service.run(runner, "cat; echo err >&2; exit 3", b"some input", environment={"SECRET": "x"})
    await until(lambda: service.executions.running == 0)
    (row,) = await recorded(service)
    expected = {"state": "ended", "outcome": "exit", "exit_code": 3, "command": None, "variables": None}
    expected |= {"stdin_bytes": 10, "stdout_bytes": 10, "stderr_bytes": 4, "runner": runner}
    assert {name: row[name] for name in expected} == expected


async def test_a_hundred_idle_executions_cost_no_time(service: Service, runner: str) -> None:
    async with trio.open_nursery() as nursery:

        async def wait(url: str, task_status: trio.TaskStatus[None]) -> None:
            async with connected(url) as client:
                await next_of(client, "start")
                task_status.started()
                await trio.sleep_forever()

        for _ in range(100):
            await nursery.start(wait, await service.execute(runner, "sleep 60", tty=False))
        before = os.times()
        await trio.sleep(1)
        after = os.times()
        assert (after.user + after.system) - (before.user + before.system) < 0.05
        nursery.cancel_scope.cancel()
    await until(lambda: service.executions.running == 0)


# The end of the daemon


async def test_at_the_shutdown_executions_get_their_time(service: Service, runner: str) -> None:
    async with connected(await service.execute(runner, "sleep 0.3; echo done", tty=False)) as client:
        await next_of(client, "start")
        await service.executions.drain(5)
        assert [message["type"] for message in (await read(client)).messages] == ["stdout", "exit"]


async def test_at_the_shutdown_executions_end_with_a_message_and_1001(service: Service, runner: str) -> None:
    folder = service.workspace(runner)
    async with connected(await service.execute(runner, says_pid(STUBBORN + "sleep 60"))) as client:
        await next_of(client, "stdout")
        with trio.fail_after(30):
            await service.executions.drain(0.1)
        ended = await read(client)
    assert (ended.final, ended.code) == (FAILED, 1001)
    assert not alive(service, folder)


async def test_while_draining_nothing_new_begins(service: Service, runner: str) -> None:
    url = await service.execute(runner, "true")
    await service.executions.drain(0)
    answer = await service.http.post(f"/runners/{runner}/execute", json={"command": "true"})
    assert (answer.status_code, answer.json()["errorCode"]) == (500, "NOMAD_OVERLOAD")
    assert answer.headers["Retry-After"]
    answer = await service.http.get(url.replace("ws://", "http://"))
    assert answer.status_code == 400  # still known: it can be connected to after the restart
    from tests.api.test_executions import connect_status

    assert await connect_status(url) == 500


async def test_a_client_that_does_not_read_does_not_delay_the_shutdown(
    service: Service, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poseidon.runners import executions

    monkeypatch.setattr(executions, "LAST_WORDS", 0.2)
    folder = service.workspace(runner)
    async with stalled(await service.execute(runner, says_pid("yes"))):
        await until((folder / "pid").exists)
        with trio.fail_after(30):
            await service.executions.drain(0.1)
        assert not alive(service, folder)

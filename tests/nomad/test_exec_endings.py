"""Executions that don't end by themselves: killed, cut off, refused, or never begun."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation
from poseidon.errors import AllocationGone, ConnectionLost, ExecutorError, ExecutorUnreachable, LeftRunning
from poseidon.executors.base import Process, Stream
from poseidon.executors.nomad import wrap
from poseidon.executors.nomad.exec import ExecTarget, open_exec
from poseidon.executors.nomad.exec_marks import READY
from poseidon.executors.nomad.exec_session import Session
from poseidon.executors.nomad.exec_side import Side
from tests.fakes.nomad_exec import Behaviour, Head, open_exec_server
from tests.nomad.exec_site import PATIENCE, Site, allocation_of, drain, open_site, read_until

both = pytest.mark.parametrize("driver", ["docker", "raw_exec"])
docker = pytest.mark.parametrize("driver", ["docker"])
with_and_without_tty = pytest.mark.parametrize("tty", [False, True])

STUBBORN = (
    "setsid sh -c 'trap \"\" TERM HUP; sleep 61; true' & (setsid env -i sleep 62 &) & trap '' TERM; echo ready; "
    "sleep 63; true"
)


@pytest.fixture
async def site(driver: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(driver, tmp_path) as site:
        yield site


async def until_there_are(site: Site, count: int) -> None:
    with trio.fail_after(PATIENCE):
        while len(site.box.processes()) < count:
            await trio.sleep(0.005)


def sleepers(site: Site) -> set[str]:
    """The long sleeps in this box, by their times (`env -i` hides them from it, but where they run tells)."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                here = (entry / "cwd").readlink() == site.box.folder
            except OSError:
                continue
            if here and words[0].endswith(b"sleep") and words[1:2] in ([b"61"], [b"62"], [b"63"]):
                found.add(words[1].decode())
    return found


@both
@with_and_without_tty
async def test_killing_takes_all_that_descends_from_the_command(site: Site, tty: bool) -> None:
    async with site.open(Command(STUBBORN, tty=tty)) as process:
        await read_until(process, "ready")
        while sleepers(site) != {"61", "62", "63"}:
            await trio.sleep(0.005)
        assert await process.kill()
        assert sleepers(site) == set()
        assert (await process.wait()).code == 137
        await drain(process)
    await site.until_empty()
    assert (await site.run("echo usable", tty=False)).out == "usable\n"


@both
async def test_killing_one_of_two_executions_leaves_the_other(site: Site) -> None:
    for first, second in ((False, True), (True, False)):
        async with (
            site.open(Command("read x; echo $x", tty=first)) as other,
            site.open(Command("echo ready; sleep 60 & sleep 60", tty=second)) as process,
            site.open(Command("read x; echo $x", tty=second)) as later,
        ):
            await read_until(process, "ready")
            assert await process.kill()
            assert (await process.wait()).code == 137
            for survivor in (other, later):
                await survivor.send(b"alive\n")
                assert "alive" in (await drain(survivor))[0].decode()
                assert (await survivor.wait()).code == 0


@both
async def test_killing_leaves_what_an_earlier_execution_began(site: Site) -> None:
    async with site.open(Command("setsid sleep 61 >/dev/null 2>&1 &", tty=False)) as process:
        assert (await process.wait()).code == 0
        while "61" not in sleepers(site):
            await trio.sleep(0.005)
    async with site.open(Command("echo ready; sleep 63")) as process:
        await read_until(process, "ready")
        assert await process.kill()
    assert sleepers(site) == {"61"}


@both
async def test_after_its_end_a_command_can_still_be_cleared_away(site: Site) -> None:
    async with site.open(Command("(setsid sleep 61 >/dev/null 2>&1 &)", tty=False)) as process:
        assert (await process.wait()).code == 0
        while "61" not in sleepers(site):
            await trio.sleep(0.005)
        assert await process.kill()
        assert sleepers(site) == set()
        assert (await process.wait()).code == 0


@docker
async def test_a_process_that_may_be_ours_makes_a_kill_uncertain(site: Site) -> None:
    """One that has given up its mark, its session and its parents."""
    async with site.open(Command("(ulimit -q 1000; setsid sleep 61 &); echo ready; sleep 63", tty=False)) as process:
        await read_until(process, "ready")
        while sleepers(site) != {"61", "63"}:
            await trio.sleep(0.005)
        assert not await process.kill()
        assert sleepers(site) == {"61"}


@docker
@pytest.mark.parametrize(("line", "certain"), [("setsid sleep 61 &", True), ("(setsid sleep 61 &);", False)])
async def test_where_no_mark_can_be_set_sessions_and_parents_tell(
    site: Site, line: str, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrap, "MARKS", range(-9, -1))
    async with site.open(Command(f"{line} (sleep 63 &); echo ready; sleep 60; true", tty=False)) as process:
        await read_until(process, "ready")
        while sleepers(site) != {"61", "63"}:
            await trio.sleep(0.005)
        assert await process.kill() is certain
        assert sleepers(site) == (set() if certain else {"61"})


@docker
async def test_a_process_that_cant_be_ours_doesnt(site: Site) -> None:
    async with site.open(Command("echo ready; sleep 63", tty=False)) as process:
        await read_until(process, "ready")
        site.box.run(["bash", "-c", "(setsid sleep 61 &)"], tty=False)
        while sleepers(site) != {"61", "63"}:
            await trio.sleep(0.005)
        assert await process.kill()
        assert sleepers(site) == {"61"}


@docker
async def test_no_name_hides_a_process(site: Site) -> None:
    program = "import time\nopen('/proc/self/comm', 'w').write('x) Z 1\\n1 (y')\nprint('ready', flush=True)\n"
    async with site.open(Command(argv=("python3", "-c", program + "time.sleep(60)"), tty=False)) as process:
        await read_until(process, "ready")
        assert await process.kill()
        await site.until_empty()


@both
async def test_a_bomb_of_forks_is_killed(site: Site) -> None:
    line = "touch go; echo ready; while [ -e go ]; do (setsid sleep 60 &); (setsid bash -c 'sleep 60; true' &); done"
    async with site.open(Command(line, tty=False)) as process:
        await read_until(process, "ready")
        await until_there_are(site, 30)
        assert await process.kill()
        await site.until_empty()


@both
@with_and_without_tty
async def test_killing_at_the_moment_of_the_end_is_harmless(site: Site, tty: bool) -> None:
    for number in range(6):
        async with site.open(Command("true", tty=tty)) as process:
            await trio.sleep(number / 1000)
            await process.signal(signal.SIGTERM)
            assert await process.kill()
            assert (await process.wait()).code in (0, 137, 143)


@docker
@with_and_without_tty
async def test_a_kill_is_certain_though_all_exit_codes_are_lost(site: Site, tty: bool) -> None:
    site.server.behaviour = Behaviour(lose_exit=1.0)
    async with site.open(Command("echo ready; sleep 63; true", tty=tty)) as process:
        await read_until(process, "ready")
        assert await process.kill()
        assert (await process.wait()).code == 137


@docker
async def test_a_killed_command_has_ended_though_its_output_is_stuck(site: Site) -> None:
    async with site.open(Command("yes", tty=True)) as process:
        await process.receive()
        await trio.sleep(0.05)
        assert await process.kill()
        assert (await process.wait()).code == 137
        await drain(process)


@both
async def test_leaving_doesnt_kill_and_doesnt_wait(site: Site) -> None:
    async with site.open(Command("echo ready; sleep 63; true", tty=False)) as process:
        await read_until(process, "ready")
        began = trio.current_time()
    assert trio.current_time() - began < 10
    while sleepers(site) != {"63"}:
        await trio.sleep(0.005)


@both
async def test_a_signal_is_for_the_foreground_alone(site: Site) -> None:
    async with site.open(Command("setsid sleep 61 & echo ready; exec sleep 63")) as process:
        await read_until(process, "ready")
        while sleepers(site) != {"61", "63"}:
            await trio.sleep(0.005)
        await process.signal(signal.SIGTERM)
        assert (await process.wait()).code == 143
        assert sleepers(site) == {"61"}


# Cut off


@both
@with_and_without_tty
@pytest.mark.parametrize("how", ["eof", "rst", "1000", "1011 failed to inspect exec result"])
async def test_a_connection_lost_without_a_code_is_no_success(site: Site, tty: bool, how: str) -> None:
    cut = Behaviour(cut=how, cut_after=150)
    site.server.decide = lambda head: cut if wrap.RUN in head.words else Behaviour()
    async with site.open(Command("read; printf '%0200d' 7; sleep 63; true", tty=tty)) as process:
        await process.send(b"\n")
        with pytest.raises(ConnectionLost):
            await process.wait()
        with pytest.raises(ConnectionLost):
            await drain(process)
        await process.send(b"nobody takes this")
        await process.resize(1, 1)
        assert await process.kill()
        with pytest.raises(ConnectionLost):
            await process.wait()
    await site.until_empty()


@both
async def test_what_came_before_the_loss_is_still_received(site: Site) -> None:
    site.server.behaviour = Behaviour(cut="eof", cut_after=150)
    async with site.open(Command("read; printf '%0200d' 7; sleep 63", tty=False)) as process:
        await process.send(b"\n")
        with pytest.raises(ConnectionLost):
            await process.wait()
        chunk = await process.receive()
        assert chunk is not None
        assert (chunk[0], len(chunk[1])) == (Stream.STDOUT, 200)


@both
@with_and_without_tty
async def test_a_frame_that_cant_be_understood_ends_it(site: Site, tty: bool) -> None:
    garbage = Behaviour(garbage_after=150)
    site.server.decide = lambda head: garbage if wrap.RUN in head.words else Behaviour()
    async with site.open(Command("read; printf '%0200d' 7; sleep 63", tty=tty)) as process:
        await process.send(b"\n")
        with pytest.raises(ConnectionLost):
            await process.wait()
        assert await process.kill()


@both
async def test_output_without_its_errors_is_no_success(site: Site) -> None:
    """The connection that carries stderr is lost."""
    cut = Behaviour(cut="eof", cut_after=150)
    site.server.decide = lambda head: cut if wrap.STDERR in head.words else Behaviour()
    async with site.open(Command("read; printf '%0200d' 7 >&2; sleep 63; exit 0")) as process:
        await process.send(b"\n")
        with pytest.raises(ConnectionLost):
            await process.wait()
        assert await process.kill()


@docker
@with_and_without_tty
@pytest.mark.parametrize("code", [0, 3, 143])
async def test_an_exit_code_without_the_end_of_the_output_is_no_success(site: Site, tty: bool, code: int) -> None:
    """Nomad 2.0 closes Docker's stream as soon as it sees that the command has ended, whatever is still in it."""
    mute = Behaviour(mute_after=150)
    site.server.decide = lambda head: mute if wrap.RUN in head.words else Behaviour()
    command = f"read; printf '%0200d' 7; sleep 0.05; echo lost; exit {code}"
    async with site.open(Command(command, tty=tty)) as process:
        await process.send(b"\n")
        with pytest.raises(ConnectionLost, match="end of the output"):
            await process.wait()


@docker
async def test_an_exit_code_without_the_end_of_the_errors_is_no_success(site: Site) -> None:
    site.server.behaviour = Behaviour(mute_after=150)
    async with site.open(Command("read; printf '%0200d' 7 >&2; sleep 0.05; exit 0", tty=False)) as process:
        await process.send(b"\n")
        with pytest.raises(ConnectionLost):
            await process.wait()


@docker
@with_and_without_tty
async def test_what_is_told_to_have_ended_before_it_began_is_begun_again(site: Site, tty: bool) -> None:
    site.server.behaviour = Behaviour(begin_late=2)
    result = await site.run("echo out; exit 3", tty=tty)
    assert (result.out.strip(), result.code) == ("out", 3)


@docker
@with_and_without_tty
async def test_what_never_begins_fails_in_the_end(site: Site, tty: bool) -> None:
    site.server.behaviour = Behaviour(begin_late=100)
    with pytest.raises(ExecutorUnreachable, match="didn't begin"):
        await site.run("touch ran", tty=tty)
    assert not (site.box.folder / "ran").exists()


@both
async def test_a_dead_peer_is_noticed(site: Site) -> None:
    site.server.behaviour = Behaviour(hush=trio.Event())
    async with site.open(Command("sleep 63", tty=False), heartbeat=0.1) as process:
        site.server.behaviour.hush.set()
        with pytest.raises(ConnectionLost):
            await process.wait()


@both
@with_and_without_tty
async def test_a_silent_command_isnt_a_dead_peer(site: Site, tty: bool) -> None:
    async with site.open(Command("sleep 0.5; exit 3", tty=tty), heartbeat=0.01) as process:
        assert (await process.wait()).code == 3


@both
async def test_neither_unread_input_nor_unread_output_is_a_dead_peer(site: Site) -> None:
    async with (
        site.open(Command("sleep 0.6; wc -c", tty=False), heartbeat=0.02) as process,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(process.send, b"x" * 5_000_000)
        await trio.sleep(0.5)
        with trio.fail_after(PATIENCE):
            while True:
                if nursery.child_tasks:
                    await trio.sleep(0.01)
                    continue
                break
        await process.close_stdin()
        assert await drain(process) == (b"5000000\n", b"")
    async with site.open(Command("yes | head -c 3000000", tty=False), heartbeat=0.02) as process:
        await trio.sleep(0.5)
        assert len((await drain(process))[0]) == 3_000_000
        assert (await process.wait()).code == 0


@both
async def test_heartbeats_are_sent_while_nothing_happens(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    from tests.fakes.nomad_exec import _Session

    original = _Session._hear

    async def hear(self: _Session, message: bytes) -> None:
        heard.append(message)
        await original(self, message)

    monkeypatch.setattr(_Session, "_hear", hear)
    async with site.open(Command("read", tty=False), heartbeat=0.02) as process:
        while heard.count(b"{}") < 5:
            await trio.sleep(0.01)
        await process.send(b"\n")
        await process.wait()


# Refused


@both
@with_and_without_tty
@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ((1008, 'task "default-task" is not running.'), AllocationGone),
        ((1008, 'task "default-task" not started yet.'), AllocationGone),
        ((1008, 'Unknown allocation "00000000-0000-0000-0000-000000000001"'), AllocationGone),
        ((1008, "No path to node"), ExecutorUnreachable),
        ((1011, "Permission denied"), ExecutorUnreachable),
        ((1011, "ACL token not found"), ExecutorUnreachable),
        ((1011, "task not found"), ExecutorError),
        ((1000, ""), ConnectionLost),
        ((1011, "No cluster leader"), ConnectionLost),
    ],
)
async def test_refusals_are_told_apart(
    site: Site, tty: bool, refusal: tuple[int, str], error: type[ExecutorError]
) -> None:
    site.server.behaviour = Behaviour(refuse=refusal)
    with pytest.raises(ExecutorError) as caught:
        async with site.open(Command("touch ran", tty=tty)):
            pytest.fail("it was refused")
    assert type(caught.value) is error
    assert refusal[1].partition('"')[0] in caught.value.message


@both
async def test_an_allocation_that_has_ended_is_gone(site: Site) -> None:
    async with site.open(Command("echo ready; sleep 63")) as process:
        await read_until(process, "ready")
        site.box.stop()
        assert (await process.wait()).code == 137
        assert await process.kill()
    with pytest.raises(AllocationGone):
        await site.run("true")


@both
@with_and_without_tty
async def test_an_image_without_bash_is_told(site: Site, tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap, "BASH", "/no/bash")
    with pytest.raises(ExecutorError, match=r"/no/bash.*no"):
        await site.run("true", tty=tty)


@docker
async def test_a_fifo_that_cant_be_made_fails_the_execution(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap, "stderr_words", lambda _: (wrap.BASH, "-c", wrap.STDERR, "bash", "/no/where/a.fifo"))
    with pytest.raises(ExecutorError, match="/no/where"):
        await site.run("touch ran")
    await site.until_empty()
    assert not (site.box.folder / "ran").exists()


# Never begun


async def failure_of(process: Process) -> ExecutorError:
    try:
        pytest.fail(f"it ended with {await process.wait()}")
    except ExecutorError as error:
        return error


def only_for(script: str, behaviour: Behaviour) -> "DecideFor":
    return DecideFor(script, behaviour)


class DecideFor:
    """One behaviour for the sessions of one script, the ordinary one for all others."""

    def __init__(self, script: str, behaviour: Behaviour) -> None:
        self._script, self._behaviour = script, behaviour

    def __call__(self, head: Head) -> Behaviour:
        return self._behaviour if self._script in head.words else Behaviour()


@both
@pytest.mark.parametrize("script", [wrap.RUN, wrap.STDERR])
@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(refuse=(1008, "No path to node")),
        Behaviour(reset=True),
        Behaviour(cut="eof", cut_after=0),
        Behaviour(garbage_after=0),
        Behaviour(silent_after=0),
    ],
)
async def test_when_one_of_both_sessions_fails_nothing_runs_and_nothing_hangs(
    site: Site, script: str, behaviour: Behaviour
) -> None:
    site.server.decide = only_for(script, behaviour)
    began = trio.current_time()

    async def attempt() -> None:
        async with site.open(Command("touch ran; sleep 63"), start_timeout=1.0) as process:
            assert script == wrap.STDERR
            ended = await failure_of(process)
            site.server.decide = lambda _: Behaviour()
            assert await process.kill()
            raise ended

    with pytest.raises(ExecutorError):
        await attempt()
    assert trio.current_time() - began < PATIENCE
    site.server.decide = lambda _: Behaviour()
    if behaviour.refuse or behaviour.reset:  # else its script can't be told; it gives up by itself
        await site.until_empty()
    lost_when_both_were_ready = behaviour.garbage_after == 0 or (script == wrap.STDERR and behaviour.cut_after == 0)
    assert lost_when_both_were_ready or not (site.box.folder / "ran").exists()
    assert sleepers(site) == set()


@both
@with_and_without_tty
async def test_a_start_that_is_cancelled_runs_nothing_unseen(site: Site, tty: bool) -> None:
    for number in range(12):
        entered = False
        with trio.move_on_after(number / 200):
            async with site.open(Command("touch ran; sleep 63", tty=tty)) as process:
                entered = True
                with trio.CancelScope(shield=True):
                    assert await process.kill()
                    (site.box.folder / "ran").unlink(missing_ok=True)
        if not entered:
            await site.until_empty()
            assert not (site.box.folder / "ran").exists()


@both
async def test_once_the_nonce_is_told_a_cancelled_start_is_seen_to(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Side.tell

    async def tell(side: Side, line: bytes) -> None:
        await original(side, line)
        scope.cancel()

    monkeypatch.setattr(Side, "tell", tell)
    entered = False
    with trio.CancelScope() as scope:
        async with site.open(Command("sleep 63; true", tty=False)) as process:
            entered = True
            with trio.CancelScope(shield=True):
                assert await process.kill()
    assert entered
    assert sleepers(site) == set()


@both
@with_and_without_tty
async def test_a_start_that_is_cancelled_leaves_no_script_on_a_slow_node(site: Site, tty: bool) -> None:
    site.server.behaviour = Behaviour(answer_delay=0.8)
    with trio.move_on_after(0.05):
        async with site.open(Command("touch ran", tty=tty)):
            pytest.fail("it can't have begun")
    with trio.fail_after(PATIENCE):
        while site.server.open:
            await trio.sleep(0.005)
    await site.until_empty()
    assert not (site.box.folder / "ran").exists()


@both
async def test_a_start_that_is_lost_and_cant_be_killed_is_told_apart(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Session.receive

    async def lose(session: Session) -> tuple[Stream, bytes] | None:
        piece = await receive(session)
        if piece and READY in piece[1]:
            return piece
        while not (site.box.folder / "ran").exists():
            await trio.sleep(0.005)
        raise ConnectionLost("cut before it told that it began")

    monkeypatch.setattr(Session, "receive", lose)
    refusal = (1008, "No path to node")
    site.server.decide = lambda head: Behaviour(refuse=refusal if wrap.KILL in head.words else None)
    with pytest.raises(LeftRunning):
        async with site.open(Command("touch ran; sleep 63", tty=False)):
            pytest.fail("nothing is known of its start")
    assert site.box.processes()


@both
async def test_errors_of_the_body_come_out_as_they_are(site: Site) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with site.open(Command("sleep 0.05", tty=True)):
            raise KeyError("mine")


# Where to


@both
async def test_the_nodes_own_address_is_used_if_it_can_be_reached(site: Site) -> None:
    async with open_exec_server(site.boxes) as node:

        async def direct(allocation: Allocation) -> str | None:
            assert allocation == site.allocation
            return node.url.removeprefix("http://")

        async with site.open(Command("echo ready; sleep 63"), direct=direct) as process:
            await read_until(process, "ready")
            assert await process.kill()
        assert len(node.requests) == 3
        assert site.server.requests == []


@both
async def test_a_node_that_cant_be_reached_is_avoided_for_a_while(site: Site) -> None:
    asked = 0
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]  # nobody accepts there
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"

    async def direct(_: Allocation) -> str | None:
        nonlocal asked
        asked += 1
        return address

    target = replace(site.target, direct=direct, direct_timeout=0.1)
    for _ in range(2):
        async with open_exec(target, site.allocation, Command("exit 3")) as process:
            with trio.fail_after(PATIENCE):
                assert (await process.wait()).code == 3
    assert await target.addresses(site.allocation) == (site.target.url,)
    assert asked == 3
    await listener.aclose()


@both
async def test_a_node_that_refuses_is_believed(site: Site) -> None:
    async with open_exec_server(site.boxes) as node:
        node.behaviour = Behaviour(refuse=(1008, 'task "default-task" is not running.'))

        async def direct(_: Allocation) -> str | None:
            return node.url

        with pytest.raises(AllocationGone):
            async with site.open(Command("true"), direct=direct):
                pytest.fail("it was refused")
    assert site.server.requests == []


async def test_a_server_that_isnt_there_is_unreachable() -> None:
    target = ExecTarget("http://127.0.0.1:1", headers={"X-Nomad-Token": "secret-token"})
    with pytest.raises(ExecutorUnreachable) as caught:
        async with open_exec(target, allocation_of("x"), Command("true")):
            pytest.fail("nobody is there")
    assert "secret-token" not in repr((caught.value, caught.value.__cause__, caught.value.__context__, target))


async def test_the_token_goes_with_each_request_and_nowhere_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site("docker", tmp_path, headers={"X-Nomad-Token": "secret-token"}) as site:
        site.server.token = "secret-token"
        result = await site.run("env; cat /proc/*/cmdline /proc/*/environ 2>/dev/null")
        assert "secret-token" not in result.out + result.err
        site.server.token = "another"
        with pytest.raises(ExecutorUnreachable, match="ACL token not found") as caught:
            await site.run("true")
    assert "secret-token" not in str(caught.value) + caplog.text
    assert all("secret-token" not in head.target for head in site.server.requests)


@both
async def test_namespace_region_and_task_are_told(site: Site) -> None:
    await site.run("true", tty=False)
    assert site.server.requests[-1].option("task") == "default-task"
    assert "namespace" not in site.server.requests[-1].target
    async with site.open(Command("true"), namespace="a b", region="eu"):
        pass
    assert site.server.requests[-1].option("namespace") == "a b"
    assert site.server.requests[-1].option("region") == "eu"


@both
async def test_connections_are_limited_and_pairs_never_wait_for_their_second_half(site: Site) -> None:
    async def one() -> None:
        async with open_exec(target, site.allocation, Command("sleep 0.05")) as process:
            await process.wait()

    target = replace(site.target, connections=3)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one)
    assert site.server.most_open <= 4  # one may be about to close


@both
async def test_waiting_for_a_connection_is_bounded_and_killing_needs_none(site: Site) -> None:
    target = replace(site.target, connections=2, start_timeout=5.0)
    async with open_exec(target, site.allocation, Command("echo ready; sleep 63")) as process:
        await read_until(process, "ready")
        with pytest.raises(ExecutorUnreachable, match="in use"):
            async with open_exec(replace_room(target), site.allocation, Command("true")):
                pytest.fail("there was no room")
        assert await process.kill()


def replace_room(target: ExecTarget) -> ExecTarget:
    """The same connections, less patience."""
    impatient = replace(target, start_timeout=0.05)
    object.__setattr__(impatient, "_rooms", target._rooms)
    return impatient


@both
async def test_requests_with_large_commands_are_carried(site: Site) -> None:
    environment = {f"V{number}": "x" * 100_000 for number in range(8)}
    result = await site.run("echo ${#V0} ${#V7}", environment=environment, tty=False)
    assert result.out == "100000 100000\n"
    assert os.environ.get("V0") is None

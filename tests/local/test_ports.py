"""Exposed ports: servers in a runner are reached from outside, by a port of this machine that is the runner's alone."""

import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest
import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, ClientStatus, Environment
from poseidon.errors import PlacementFailed, Unsupported
from poseidon.executors.base import Process
from poseidon.executors.local import ports
from poseidon.executors.local.executor import LocalExecutor
from poseidon.executors.local.settings import LocalSettings
from tests.local.support import ENVIRONMENT, IS_ROOT, PATIENCE, World, new_job, read_until, run, start, until

SERVER = """
import asyncio, sys

async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main(host, port):
    async with await asyncio.start_server(serve, host, int(port)) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main(*sys.argv[1:]))
"""
"""Sends back what comes, until its end."""


def exposing(*exposed: int) -> Environment:
    return replace(ENVIRONMENT, exposed_ports=exposed)


async def connect(address: str) -> trio.SocketStream:
    host, port = address.rsplit(":", 1)
    return await trio.open_tcp_stream(host.strip("[]"), int(port))


async def echo(address: str, data: bytes = b"hello") -> bytes:
    """What comes back of *data* from the server behind *address*; empty if there is none."""
    found = b""
    with trio.fail_after(PATIENCE):
        async with await connect(address) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(send, stream, data)
            try:
                while more := await stream.receive_some():
                    found += more
            except trio.BrokenResourceError:
                pass
    return found


async def send(stream: trio.SocketStream, data: bytes) -> None:
    try:
        await stream.send_all(data)
        await stream.send_eof()
    except trio.BrokenResourceError:
        pass


def serving(host: str, port: int) -> Command:
    return Command(argv=("python3", "-c", SERVER, host, str(port)))


class Serving:
    """A server in a sandbox, while in its context."""

    def __init__(self, executor: LocalExecutor, allocation: Allocation, host: str, port: int) -> None:
        self._execution = executor.execute(allocation, serving(host, port))

    async def __aenter__(self) -> Process:
        process = await self._execution.__aenter__()
        await read_until(process, "ready")
        return process

    async def __aexit__(self, *_: object) -> None:
        await self._execution.__aexit__(None, None, None)  # noqa: ASYNC102 - it is bounded itself


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::1"])
async def test_a_server_inside_is_reached_by_the_address_that_is_told(world: World, host: str) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(80, 8080))
        first, second = allocation.ports
        assert (first.exposed, second.exposed) == (80, 8080)
        assert first.address.startswith("127.0.0.1:")
        port = 80 if IS_ROOT else 8080
        async with Serving(executor, allocation, host, port):
            assert await echo(first.address if IS_ROOT else second.address) == b"hello"
            assert await echo(second.address if IS_ROOT else first.address) == b""


async def test_ports_below_1024_can_be_served_by_anybody_inside(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(22))
        async with Serving(executor, allocation, "0.0.0.0", 22):
            assert await echo(allocation.ports[0].address) == b"hello"


async def test_exposed_ports_alone_let_nothing_out(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        script = "cat /proc/net/dev | tail -n +3 | cut -d: -f1; cat /proc/net/route | tail -n +2"
        assert (await run(executor, allocation, script)).out.split() == ["lo"]


async def test_much_data_arrives_complete_both_ways_by_many_at_once(world: World) -> None:
    data = bytes(range(256)) * 4096
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        address = allocation.ports[0].address

        async def exchange() -> None:
            assert await echo(address, data) == data

        async with Serving(executor, allocation, "0.0.0.0", 8080), trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(exchange)


async def test_clients_that_stall_hold_up_no_other(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        address = allocation.ports[0].address
        async with (
            Serving(executor, allocation, "0.0.0.0", 8080),
            await connect(address),
            await connect(address) as one,
        ):
            with trio.move_on_after(0.1):  # it never reads what comes back
                await one.send_all(bytes(32 << 20))
            assert await echo(address) == b"hello"


async def test_a_port_is_free_again_when_its_runner_is_gone(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        host, port = allocation.ports[0].address.split(":")
        with pytest.raises(OSError, match="in use"):
            ports.listen(host, int(port))
        await executor.stop(allocation.job)
        with trio.fail_after(PATIENCE):
            while (await executor.snapshot()).jobs:
                await trio.sleep(0.002)
        ports.listen(host, int(port)).close()


async def test_ports_outlive_the_daemon(world: World) -> None:
    async with world.daemon() as executor:
        before = await start(executor, exposing(8080))
    async with world.executor() as executor:
        (allocation,) = (await executor.snapshot()).allocations
        assert allocation.ports == before.ports
        async with Serving(executor, allocation, "0.0.0.0", 8080):
            assert await echo(before.ports[0].address) == b"hello"


def free_range(size: int) -> tuple[int, int]:
    """Ports that nobody has, one after the other."""
    for first in range(21_000, 32_000, size):
        try:
            for port in range(first, first + size):
                ports.listen("127.0.0.1", port).close()
        except OSError:
            continue
        return first, first + size - 1
    raise AssertionError("no ports are free")


async def test_no_two_runners_share_a_port_and_a_range_is_kept(world: World) -> None:
    first, last = free_range(2)
    async with world.executor(port_range=(first, last)) as executor, executor.follow(None) as stream:
        told = [(await start(executor, exposing(80))).ports[0].address for _ in range(2)]
        assert sorted(told) == [f"127.0.0.1:{first}", f"127.0.0.1:{last}"]
        third = new_job()
        await executor.start(third, exposing(80))
        await until(stream, third, ClientStatus.FAILED)
        assert "ports exhausted" in executor._site.book[third].reason
        assert (await start(executor)).ports == ()


def test_ports_that_others_have_are_passed_over() -> None:
    first, last = free_range(3)
    source = ports.Ports(LocalSettings(port_range=(first, last)))
    with ExitStack() as stack, ports.listen("127.0.0.1", first):
        bound = source.bind((80, 443, 80), stack)
        assert [(each.exposed, each.address) for each in bound] == [
            (80, f"127.0.0.1:{first + 1}"),
            (443, f"127.0.0.1:{last}"),
        ]
        with pytest.raises(PlacementFailed, match="ports exhausted"):
            source.bind((8080,), stack)


def test_what_clients_are_told_can_be_connected_to() -> None:
    assert ports.told_host("10.1.2.3") == "10.1.2.3"
    assert ports.told_host("::1") == "[::1]"
    assert ports.told_host("0.0.0.0") == ports.told_host("::") == socket.gethostname()
    text = "80=127.0.0.1:4000 8080=[::1]:4001"
    assert [(port.exposed, port.address) for port in ports.from_text(text)] == [
        (80, "127.0.0.1:4000"),
        (8080, "[::1]:4001"),
    ]
    assert ports.from_text("") == ()


@pytest.mark.parametrize("exposed", [(0,), (65536,), tuple(range(1, 34))])
async def test_impossible_ports_are_refused(world: World, exposed: tuple[int, ...]) -> None:
    async with world.executor() as executor:
        with pytest.raises(Unsupported, match="exposedPorts"):
            executor.check(exposing(*exposed))


async def test_forwarding_goes_on_after_everything_inside_was_killed(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        await run(executor, allocation, "kill -9 -1; kill -STOP 2; true", privileged=IS_ROOT)
        async with Serving(executor, allocation, "0.0.0.0", 8080):
            with trio.fail_after(PATIENCE):
                while await echo_or_nothing(allocation.ports[0].address) != b"hello":
                    await trio.sleep(0.01)


async def echo_or_nothing(address: str) -> bytes:
    with trio.move_on_after(0.5):
        return await echo(address)
    return b""


async def test_ending_an_execution_doesnt_end_the_forwarding(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        async with executor.execute(allocation, Command("sleep 60 & echo ready; sleep 60")) as process:
            await read_until(process, "ready")
            assert await process.kill()
        pids = "ls /proc | grep '^[0-9]*$' | sort -n | head -2 | tail -1"
        assert (await run(executor, allocation, pids)).out.strip() == "2"


@pytest.mark.parametrize(
    "privileged", [False, pytest.param(True, marks=pytest.mark.skipif(not IS_ROOT, reason="root"))]
)
async def test_programs_inside_cant_get_at_what_the_forwarder_holds(world: World, privileged: bool) -> None:
    traced = (
        "import ctypes; libc = ctypes.CDLL(None); print(libc.ptrace(16, 2, 0, 0)); pidfd = libc.syscall(434, 2, 0)\n"
        "print(pidfd >= 0, {libc.syscall(438, pidfd, number, 0) for number in range(64)})"
    )
    script = (
        "for n in $(seq 0 64); do readlink /proc/2/fd/$n; cat /proc/2/fd/$n; done; cat /proc/2/environ /proc/2/maps"
    )
    async with world.executor() as executor:
        allocation = await start(executor, exposing(8080))
        result = await run(executor, allocation, script, privileged=privileged)
        assert not result.out
        result = await run(executor, allocation, argv=("python3", "-c", traced), privileged=privileged)
        assert result.out == "-1\nTrue {-1}\n"

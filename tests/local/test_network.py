"""Network access: out to others, never to this machine; by a process that lives and dies with its runner."""

import os
import shutil
import signal
import socket
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
import trio

from poseidon.core.model import Allocation, ClientStatus
from poseidon.errors import Unsupported
from poseidon.executors.local import network as networks
from poseidon.executors.local import routing
from poseidon.executors.local.executor import LocalExecutor
from poseidon.executors.local.network import PROGRAM, SEARCHED, Network
from poseidon.executors.local.settings import LocalSettings
from tests.local.support import ENVIRONMENT, IS_ROOT, PATIENCE, World, new_job, run, start, until

LOOPBACK = IPv4Network("127.0.0.0/8")
WITH_NETWORK = replace(ENVIRONMENT, network_access=True)
needs_stack = pytest.mark.skipif(shutil.which(PROGRAM, path=SEARCHED) is None, reason=f"{PROGRAM} isn't installed")
CONNECT = """
import select, socket, sys, time

answers, waiting = {}, {}
for number, (host, port, device) in enumerate(zip(*[iter(sys.argv[1:])] * 3)):
    client = socket.socket()
    client.setblocking(False)
    try:
        if device != "any":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        client.connect_ex((host, int(port)))
        waiting[client] = number
    except OSError:
        pass
end = time.monotonic() + 2
while waiting and time.monotonic() < end:
    for client in select.select(list(waiting), [], [], 0.1)[0]:
        try:
            answers[waiting.pop(client)] = client.recv(99).decode() or "no"
        except OSError:
            pass
print("\\n".join(answers.get(number, "no") for number in range(len(sys.argv) // 3)))
"""
"""Connects to many at once and tells what each says."""


def own_address() -> str:
    """One by which this machine can be reached from elsewhere."""
    found = sorted(str(network[0]) for network in routing.own_networks() if not network.overlaps(LOOPBACK))
    return found[0] if found else pytest.skip("this machine has no address but its loopback")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that counts as another machine's: it is ours, but isn't taken for it."""
    address = own_address()
    kept = routing.own_networks() - {IPv4Network(address)}
    monkeypatch.setattr(networks, "own_networks", lambda: kept)
    return address


class Greeter:
    """A service of this machine on *address*, which says hello to whoever connects."""

    def __init__(self, address: str) -> None:
        self.listener = socket.create_server((address, 0))
        self.port = str(self.listener.getsockname()[1])
        self.visitors = 0

    async def serve(self) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self.listener))
        await trio.serve_listeners(self.greet, [listener])

    async def greet(self, stream: trio.SocketStream) -> None:
        self.visitors += 1
        await stream.send_all(b"hello")
        await stream.aclose()


async def attempts(executor: LocalExecutor, allocation: Allocation, *where: str, privileged: bool = False) -> list[str]:
    """What connections from inside gave: host, port and device each."""
    found = await run(executor, allocation, argv=("python3", "-c", CONNECT, *where), privileged=privileged)
    assert not found.err
    return found.out.splitlines()


def stacks(world: World) -> list[int]:
    """The processes that carry packets for our sandboxes."""
    return [pid for pid in world.processes() if PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()[:99]]


@needs_stack
async def test_a_runner_with_network_access_reaches_other_machines(world: World, elsewhere: str) -> None:
    greeter = Greeter(elsewhere)
    async with world.executor() as executor, trio.open_nursery() as nursery:
        nursery.start_soon(greeter.serve)
        allocation = await start(executor, WITH_NETWORK)
        assert await attempts(executor, allocation, elsewhere, greeter.port, "any") == ["hello"]
        nursery.cancel_scope.cancel()


@needs_stack
@pytest.mark.parametrize(
    "privileged", [False, pytest.param(True, marks=pytest.mark.skipif(not IS_ROOT, reason="root"))]
)
async def test_this_machine_cant_be_reached_whatever_is_tried(world: World, privileged: bool) -> None:
    address = own_address()
    outer, inner, other = Greeter(address), Greeter("127.0.0.1"), Greeter("127.0.0.2")
    ways = [
        *((address, outer.port, device) for device in ("any", "tap0")),
        *(("127.0.0.1", inner.port, device) for device in ("any", "tap0")),
        *(("127.0.0.2", other.port, device) for device in ("any", "tap0")),
        *((host, inner.port, "any") for host in ("0.0.0.0", "localhost", "10.0.2.2", "10.0.2.3", "10.0.2.15")),
        *((host, outer.port, "any") for host in ("10.0.2.2", "10.0.2.3", "10.0.2.100")),
    ]
    async with world.executor() as executor, trio.open_nursery() as nursery:
        for greeter in (outer, inner, other):
            nursery.start_soon(greeter.serve)
        allocation = await start(executor, WITH_NETWORK)
        words = [word for way in ways for word in way]
        assert await attempts(executor, allocation, *words, privileged=privileged) == ["no"] * len(ways)
        nursery.cancel_scope.cancel()
    assert outer.visitors == inner.visitors == other.visitors == 0


@needs_stack
@pytest.mark.skipif(not IS_ROOT, reason="another user has no privileged commands")
async def test_not_even_a_privileged_command_can_change_the_network(world: World) -> None:
    script = "import socket, fcntl; fcntl.ioctl(socket.socket(), 0x890C, b'\\0' * 120)"  # SIOCDELRT
    async with world.executor() as executor:
        allocation = await start(executor, WITH_NETWORK)
        for argv in (("python3", "-c", script), ("/bin/sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")):
            assert (await run(executor, allocation, argv=argv, privileged=True)).code


@needs_stack
async def test_blocked_networks_cant_be_reached(world: World, elsewhere: str) -> None:
    greeter = Greeter(elsewhere)
    async with world.executor(network_blocked=(f"{elsewhere}/32",)) as executor, trio.open_nursery() as nursery:
        nursery.start_soon(greeter.serve)
        allocation = await start(executor, WITH_NETWORK)
        assert await attempts(executor, allocation, elsewhere, greeter.port, "any") == ["no"]
        nursery.cancel_scope.cancel()
    assert not greeter.visitors


@needs_stack
@pytest.mark.skipif(not IS_ROOT, reason="only root may bind the port of a name server")
async def test_names_are_resolved_by_the_name_servers_that_are_set(world: World, elsewhere: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((elsewhere, 53))
        except OSError:
            pytest.skip("this machine has a name server of its own")
        server.setblocking(False)

        async def answer() -> None:
            ours = trio.socket.from_stdlib_socket(server)
            while True:
                query, client = await ours.recvfrom(512)
                body = query[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + query[12:].split(b"\0\0\1\0\1")[0] + b"\0\0\1\0\1"
                await ours.sendto(body + b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4\x01\x02\x03\x04", client)

        async with world.executor(name_servers=(elsewhere,)) as executor, trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            allocation = await start(executor, WITH_NETWORK)
            script = "import socket; print(socket.gethostbyname('some.host.example'))"
            result = await run(executor, allocation, argv=("python3", "-c", script))
            nursery.cancel_scope.cancel()
    assert result.out == "1.2.3.4\n", result.err


@needs_stack
async def test_the_stack_and_its_sandbox_end_together(world: World) -> None:
    async with world.executor() as executor, executor.follow(None) as stream:
        first = await start(executor, WITH_NETWORK)
        (stack,) = stacks(world)
        os.kill(stack, signal.SIGKILL)
        await until(stream, first.job, ClientStatus.FAILED)
        second = await start(executor, WITH_NETWORK)
        (stack,) = stacks(world)
        os.kill(next(record.pid for record in executor._site.book if record.job == second.job), signal.SIGKILL)
        await until(stream, second.job, ClientStatus.FAILED)
        with trio.fail_after(PATIENCE):
            while world.processes():
                await trio.sleep(0.005)


@needs_stack
async def test_the_network_outlives_the_daemon(world: World, elsewhere: str) -> None:
    greeter = Greeter(elsewhere)
    async with world.daemon() as executor:
        allocation = await start(executor, WITH_NETWORK)
    before = stacks(world)
    async with world.executor() as executor, trio.open_nursery() as nursery:
        nursery.start_soon(greeter.serve)
        assert await attempts(executor, allocation, elsewhere, greeter.port, "any") == ["hello"]
        assert stacks(world) == before
        nursery.cancel_scope.cancel()


@needs_stack
@pytest.mark.skipif(not IS_ROOT, reason="needs a cgroup")
async def test_the_stack_counts_as_its_runners(world: World) -> None:
    async with world.executor() as executor:
        allocation = await start(executor, WITH_NETWORK)
        group = executor._site.limiter.group(allocation.id)
        assert set(stacks(world)) <= group.pids()


@needs_stack
async def test_a_stack_that_doesnt_come_up_is_the_end_of_its_runner(world: World) -> None:
    async with world.executor() as executor, executor.follow(None) as stream:
        executor._site.network._program = "/bin/false"
        job = new_job()
        await executor.start(job, WITH_NETWORK)
        await until(stream, job, ClientStatus.FAILED)
        assert "network didn't come up" in executor._site.book[job].reason


async def test_without_its_program_network_access_is_refused_with_the_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "SEARCHED", "/nowhere")
    async with world.executor() as executor:
        with pytest.raises(Unsupported, match="slirp4netns isn't installed"):
            executor.check(WITH_NETWORK)
        executor.check(replace(ENVIRONMENT, exposed_ports=(80,)))
        (ability,) = (each for each in executor.abilities() if each.name == "network")
        assert not ability.holds
        assert "slirp4netns isn't installed" in ability.how


@pytest.fixture
def resolvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Files that name this machine's name servers."""
    files = (tmp_path / "first", tmp_path / "second")
    monkeypatch.setattr(networks, "RESOLVERS", files)
    return files


def test_a_name_server_on_this_machine_is_no_help_to_runners(resolvers: tuple[Path, Path]) -> None:
    network = Network(LocalSettings(), own_users=False)
    assert network.name_servers() == ()
    resolvers[0].write_text("# of a resolver\nnameserver 127.0.0.53\nnameserver fe80::1\nnameserver\noptions x\n")
    assert network.name_servers() == ()
    resolvers[1].write_text("nameserver 10.1.2.3\nnameserver 10.1.2.4 # second\n")
    assert network.name_servers() == ("10.1.2.3", "10.1.2.4")
    assert network.resolver_file() == "nameserver 10.1.2.3\nnameserver 10.1.2.4\n"


def test_a_name_server_in_a_blocked_network_is_let_through(resolvers: tuple[Path, Path]) -> None:
    resolvers[0].write_text("nameserver 10.1.2.3\n")
    network = Network(LocalSettings(network_blocked=("10.0.0.0/8", "192.168.0.0/16")), own_users=False)
    rejected = [IPv4Network(text) for text in network.rejected()]

    def is_rejected(address: str) -> bool:
        return any(IPv4Address(address) in each for each in rejected)

    assert not is_rejected("10.1.2.3")
    assert all(map(is_rejected, ("10.1.2.2", "10.1.2.4", "10.200.0.1", "192.168.3.4", "127.0.0.1", "127.9.9.9")))
    assert not is_rejected("11.0.0.1")


def test_own_addresses_and_networks_are_read_from_the_kernel(tmp_path: Path) -> None:
    trie = tmp_path / "fib_trie"
    trie.write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 4\n     |-- 0.0.0.0\n        /0 universe UNICAST\n"
        "     |-- 192.168.7.0\n        /24 link UNICAST\n     |-- 192.168.7.9\n        /32 host LOCAL\n"
        "     |-- 127.0.0.0\n        /8 host LOCAL\n     |-- 192.168.7.255\n        /32 link BROADCAST\n"
    )
    assert routing.own_networks(trie) == {LOOPBACK, IPv4Network("192.168.7.9")}
    table = tmp_path / "route"
    table.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0107A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert routing.known_networks(table) == {IPv4Network("10.0.2.0/24")}


def test_the_runners_own_subnet_is_one_that_this_machine_doesnt_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "known_networks", lambda: {IPv4Network("10.0.0.0/16")})
    assert routing.free_subnet(networks.SUBNETS, []) == "10.213.2.0/24"
    assert routing.free_subnet(networks.SUBNETS, [IPv4Address("10.213.2.3")]) == "172.29.213.0/24"

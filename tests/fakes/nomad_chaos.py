"""Random trouble for the fake cluster: what can happen to one in production, again and again, the same for one seed."""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import trio

from tests.fakes.nomad import NomadFake
from tests.fakes.nomad_shapes import Json

Trouble = Callable[[NomadFake, Random], Awaitable[None]]


async def trouble(
    fake: NomadFake, seed: int = 0, *, pause: float = 2.0, kinds: tuple[Trouble, ...] | None = None
) -> None:
    """Make trouble for ever, with some *pause* (seconds of Nomad's time) between; `fake.heal()` ends what is left."""
    random = Random(seed)
    while True:
        await trio.sleep(fake.store.clock.scaled(random.uniform(0, 2 * pause)))
        await random.choice(kinds or ALL)(fake, random)


def _some(fake: NomadFake, random: Random) -> str | None:
    """A running allocation, if there is one whose agent lives."""
    found = [
        id for id, row in sorted(fake.allocations.items()) if row["ClientStatus"] == "running" and _alive(fake, row)
    ]
    return random.choice(found) if found else None


def _alive(fake: NomadFake, row: Json) -> bool:
    agent = fake.parts.agents[row["NodeID"]]
    return agent.alive and row["ID"] in agent.runs


def _node(fake: NomadFake, random: Random) -> str:
    return random.choice(sorted(fake.nodes))


# -- tasks ------------------------------------------------------------------------------------------------------------


async def restart(fake: NomadFake, random: Random) -> None:
    if id := _some(fake, random):
        fake.restart(id, delay=random.choice([0, 0, 0.3, 2]))


async def fail(fake: NomadFake, random: Random) -> None:
    if id := _some(fake, random):
        fake.fail(id)


async def exit_cleanly(fake: NomadFake, random: Random) -> None:
    if id := _some(fake, random):
        fake.end(id, exit_code=0, signal=0)


async def out_of_memory(fake: NomadFake, random: Random) -> None:
    if id := _some(fake, random):
        fake.out_of_memory(id, delay=random.choice([0.3, None]))


async def stop_allocation(fake: NomadFake, random: Random) -> None:
    if fake.store.leader and (id := _some(fake, random)):
        fake.stop_allocation(id)


async def make_stubborn(fake: NomadFake, random: Random) -> None:
    if id := _some(fake, random):
        fake.make_stubborn(id)


async def repeat(fake: NomadFake, random: Random) -> None:
    if id := _some(fake, random):
        fake.repeat(id)


async def collect_garbage(fake: NomadFake, random: Random) -> None:
    if fake.store.leader:
        fake.collect_garbage()


# -- nodes ------------------------------------------------------------------------------------------------------------


async def drain(fake: NomadFake, random: Random) -> None:
    """A drain, and the node is eligible again a while later."""
    node = _node(fake, random)
    if not fake.store.leader or not fake.parts.agents[node].alive:
        return
    fake.drain(node, deadline=random.choice([None, 3]))
    await _wait(fake, random.uniform(1, 8))
    await fake.store.led()
    fake.end_drain(node)


async def lose_agent(fake: NomadFake, random: Random) -> None:
    """An agent dies, and comes back before or after its node is down."""
    node = _node(fake, random)
    if not fake.parts.agents[node].alive:
        return
    fake.kill_agent(node)
    await _wait(fake, random.choice([1, 9]))
    await fake.revive_agent(node)


async def refuse_placement(fake: NomadFake, random: Random) -> None:
    fake.refuse_placement(**random.choice([{"dimension": "memory"}, {"constraint": "${attr.kernel.name} = plan9"}]))
    await _wait(fake, random.uniform(1, 6))
    fake.allow_placement()


async def break_driver(fake: NomadFake, random: Random) -> None:
    if not fake.store.leader:
        return
    fake.set_driver("docker", healthy=False)
    await _wait(fake, random.uniform(1, 6))
    await fake.store.led()
    fake.set_driver("docker", healthy=True)


# -- servers and the stream -------------------------------------------------------------------------------------------


async def lose_leader(fake: NomadFake, random: Random) -> None:
    fake.lose_leader(random.uniform(1, 12))
    await fake.store.led()


async def restart_server(fake: NomadFake, random: Random) -> None:
    if fake.server.listening:
        fake.stop_server(abruptly=random.random() < 0.5)
        await _wait(fake, random.uniform(0.5, 4))
        await fake.start_server()


async def cut_streams(fake: NomadFake, random: Random) -> None:
    fake.cut_streams(random.choice(["clean", "eof", "reset"]), at=random.choice([None, 0, 1, 3, 100, 5000]))


async def say_nonsense(fake: NomadFake, random: Random) -> None:
    fake.say(random.choice([b"nonsense\n", b'{"Index":', b"\n", b'{"Error":"no"}\n', b"\xff\xfe\n", b"[1]\n", b"{}\n"]))


async def fall_silent(fake: NomadFake, random: Random) -> None:
    fake.fall_silent(random.uniform(1, 100))
    await _wait(fake, random.uniform(1, 5))


async def disturb_stream(fake: NomadFake, random: Random) -> None:
    """For a while lines are doubled, delayed, swapped or lost."""
    setattr(fake.stream, random.choice(["drop", "double", "reorder", "delay"]), 0.3)
    await _wait(fake, random.uniform(1, 6))
    fake.stream.calm()
    fake.speak()


# -- requests ---------------------------------------------------------------------------------------------------------


async def be_slow(fake: NomadFake, random: Random) -> None:
    fake.fault("/v1/", times=random.randint(1, 5), wait=random.uniform(0.1, 3))


async def lose_answers(fake: NomadFake, random: Random) -> None:
    method = random.choice(["PUT", "DELETE", "GET"])
    fake.fault("/v1/job", method, times=random.randint(1, 3), lost=random.choice(["before", "after"]))


async def refuse_requests(fake: NomadFake, random: Random) -> None:
    status, text = random.choice([(429, "Too many requests"), (500, "rpc error: EOF"), (502, ""), (503, "")])
    fake.fault("/v1/", times=random.randint(1, 4), status=status, text=text)


async def answer_nonsense(fake: NomadFake, random: Random) -> None:
    fake.fault("/v1/", "GET", garbage=random.choice([b"{", b"null", b"[]", b"<html>", b'{"ID":1}']))


async def refuse_tokens(fake: NomadFake, random: Random) -> None:
    fake.refuse_tokens("b0f9ccab-0000-0000-0000-000000000000")
    await _wait(fake, random.uniform(0.5, 3))
    fake.accept_all()


async def _wait(fake: NomadFake, seconds: float) -> None:
    await trio.sleep(fake.store.clock.scaled(seconds))


TASKS: Final = (restart, fail, exit_cleanly, out_of_memory, stop_allocation, make_stubborn, repeat, collect_garbage)
NODES: Final = (drain, lose_agent, refuse_placement, break_driver)
SERVERS: Final = (lose_leader, restart_server)
STREAM: Final = (cut_streams, say_nonsense, fall_silent, disturb_stream)
REQUESTS: Final = (be_slow, lose_answers, refuse_requests, answer_nonsense, refuse_tokens)
ALL: Final = TASKS + NODES + SERVERS + STREAM + REQUESTS

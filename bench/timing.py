"""Taking times: one call, rounds of several calls in turn, and clients that hammer for a while."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

Step = Callable[[], Awaitable[object]]


async def milliseconds(step: Step) -> float:
    """How long *step* takes."""
    began = time.perf_counter()
    await step()
    return 1000 * (time.perf_counter() - began)


async def in_turn(rounds: int, steps: dict[str, Step], *, warm_up: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each step, one after the other in each round, so that all meet the same weather."""
    for _ in range(warm_up):
        for step in steps.values():
            await step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            samples[name].append(await milliseconds(step))
    return samples


@dataclass(frozen=True, slots=True)
class Rush:
    """What some clients did at the same time."""

    each: list[float]
    """Milliseconds of each call."""
    seconds: float

    @property
    def rate(self) -> float:
        """Calls in a second."""
        return len(self.each) / self.seconds


async def rush(steps: Sequence[Step], *, seconds: float, most: int = 1_000_000) -> Rush:
    """Each client repeats its step until time is over, or until they have called *most* times together."""
    each: list[float] = []
    begun = 0
    began = time.perf_counter()

    async def client(step: Step) -> None:
        nonlocal begun
        while begun < most and time.perf_counter() - began < seconds:
            begun += 1
            each.append(await milliseconds(step))

    async with trio.open_nursery() as nursery:
        for step in steps:
            nursery.start_soon(client, step)
    return Rush(each, time.perf_counter() - began)

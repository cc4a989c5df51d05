"""The fake cluster's event stream, as Nomad 1.1 serves it, and what can go wrong with it."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from tests.fakes.nomad_http import Exchange, Gone, Request
from tests.fakes.nomad_store import Event, Line, Store, encode_line

HEARTBEAT: Final = 30.0
MOST_AT_ONCE: Final = 64
DROPPED: Final = b"event dropped from buffer"
CLOSED: Final = b"subscription closed by server, client should resubscribe"


@dataclass
class Disturbance:
    """What happens to lines on their way, by chance (0..1 a line) or to the next ones on order."""

    random: Random
    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    delay_for: float = 0.5
    """Seconds of Nomad's time."""
    orders: deque[str] = field(default_factory=deque)
    """"drop", "double", "reorder" or "delay", for the next lines of any subscription."""
    silent: bool = False
    """Neither events nor heartbeats."""

    def calm(self) -> None:
        self.drop = self.double = self.reorder = self.delay = 0.0
        self.orders.clear()
        self.silent = False

    def fate(self) -> str:
        if self.orders:
            return self.orders.popleft()
        for name in ("drop", "double", "reorder", "delay"):
            if self.random.random() < getattr(self, name):
                return name
        return ""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a stream ends: "clean" (end of body), "eof" (FIN), "reset" (RST); now, or at a byte of the next line."""

    how: str
    at: int | None = None


@dataclass
class Subscription:
    """One open stream."""

    exchange: Exchange
    store: Store
    disturbance: Disturbance
    topics: dict[str, list[str]]
    next: int
    begun: bool = False
    held: list[Line] = field(default_factory=list)
    said: deque[bytes] = field(default_factory=deque)
    """Bytes to send as they are (each a line of the body, its newline included or not)."""
    ending: Cut | None = None
    beat: float = 0.0

    async def run(self) -> None:
        """Send lines and heartbeats until it is cut, too slow, or left by its client."""
        self.beat = trio.current_time() + self._pulse
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_left, nursery)
            with suppress(Gone):
                while await self._step():
                    pass
            nursery.cancel_scope.cancel()

    async def _cancel_when_left(self, nursery: trio.Nursery) -> None:
        await self.exchange.until_client_leaves()
        nursery.cancel_scope.cancel()

    @property
    def _pulse(self) -> float:
        return self.store.clock.scaled(HEARTBEAT)

    async def _step(self) -> bool:
        """Do one thing; False: it is over."""
        if self.said:
            await self._chunks([self.said.popleft()])
        elif self.ending is not None and self.ending.at is None:
            return await self._finish(self.ending)
        elif self.disturbance.silent:
            await self.store.buffer.moved.park()
        elif trio.current_time() >= self.beat:
            await self._heartbeat()
        else:
            return await self._events()
        return True

    async def _heartbeat(self) -> None:
        self.beat += self._pulse
        await self._tell(self._release())
        await self._chunks([b"{}", b"\n"])

    async def _events(self) -> bool:
        """Tell what there is at once; what is told is lost for who reads too slowly."""
        told: list[Line] = []
        while len(told) < MOST_AT_ONCE:
            try:
                line = self.store.buffer.get(self.next)
            except KeyError:
                return await self._give_up(told)
            if line is None:
                break
            self.next += 1
            if (wanted := self._matching(line)) is None:
                continue
            if self.ending is not None:
                await self._tell(told)
                return await self._finish(self.ending, wanted)
            told += await self._fated(wanted)
        if not told and line is None:
            with trio.move_on_at(self.beat):
                await self.store.buffer.moved.park()
        await self._tell(told)
        return True

    async def _give_up(self, told: list[Line]) -> bool:
        await self._tell(told)
        await self._chunks([DROPPED])
        return await self._finish(Cut("clean"))

    async def _fated(self, line: Line) -> list[Line]:
        """What becomes of a line: nothing, itself, twice, later, or after the next one."""
        fate = self.disturbance.fate()
        if fate == "drop":
            return []
        if fate == "reorder":
            self.held.append(line)
            return []
        if fate == "delay":
            await trio.sleep(self.store.clock.scaled(self.disturbance.delay_for))
        return [line] * (2 if fate == "double" else 1) + self._release()

    def _release(self) -> list[Line]:
        held, self.held = self.held[::-1], []
        return held

    def _matching(self, line: Line) -> Line | None:
        events = tuple(event for event in line.events if self._wants(event))
        return Line(line.number, line.index, events) if events else None

    def _wants(self, event: Event) -> bool:
        keys = self.topics.get(event.topic, []) + self.topics.get("*", [])
        if event.namespace not in ("default", ""):
            return False
        return set(keys) == {"*"} or any(key in keys for key in event.keys)

    async def _tell(self, lines: list[Line]) -> None:
        """The newline comes as a chunk of its own."""
        if lines:
            encoded = [encode_line(line.index, line.events) for line in lines]
            await self._chunks([chunk for data in encoded for chunk in (data, b"\n")])

    async def _chunks(self, chunks: list[bytes]) -> None:
        """The head of the answer is held back until there is something to tell."""
        await self._begin()
        await self.exchange.chunks(chunks)

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            await self.exchange.begin()

    async def _finish(self, cut: Cut, line: Line | None = None) -> bool:
        if line is not None and cut.at is not None:
            await self._begin()
            await self.exchange.part_of_chunk(encode_line(line.index, line.events), cut.at)
        if cut.how == "reset":
            self.exchange.reset()
        if cut.how == "eof" or line is not None:
            await self.exchange.hang_up()
        await self._begin()
        await self.exchange.end()
        return False


@dataclass
class Streams:
    """All open subscriptions."""

    store: Store
    disturbance: Disturbance
    open: list[Subscription] = field(default_factory=list)
    opened: int = 0
    """How many there were."""

    async def serve(self, exchange: Exchange) -> None:
        """Answer GET /v1/event/stream."""
        request = exchange.request
        topics = parse_topics(request)
        if isinstance(topics, str):
            await exchange.answer(400, f"Invalid topic query: error parsing topics: {topics}")
            return
        try:
            index = int(request.get("index") or 0)
        except ValueError:
            words = f'strconv.Atoi: parsing "{request.get("index")}": invalid syntax'
            await exchange.answer(400, f"Unable to parse index: {words}")
            return
        if index < 0:  # a body that never ends, as Nomad has it
            await exchange.begin(400)
            await exchange.until_client_leaves()
            return
        await self.store.led()
        await self._follow(exchange, topics, index)

    async def _follow(self, exchange: Exchange, topics: dict[str, list[str]], index: int) -> None:
        first = self.store.buffer.first_number(index)
        subscription = Subscription(exchange, self.store, self.disturbance, topics, first)
        if exchange.request.get("namespace", "default") != "default":
            subscription.topics = {"Node": topics.get("Node", [])}
        self.open.append(subscription)
        self.opened += 1
        self.store.moved.unpark_all()
        try:
            await subscription.run()
        finally:
            self.open.remove(subscription)
            self.store.moved.unpark_all()

    def say(self, data: bytes) -> None:
        """Send *data* as it is on all open streams."""
        for subscription in self.open:
            subscription.said.append(data)
        self.wake()

    def cut(self, how: str = "eof", at: int | None = None) -> None:
        """End all open streams: now, or after *at* bytes (as on the wire) of their next line."""
        for subscription in self.open:
            subscription.ending = Cut(how, at)
        self.wake()

    def close(self, words: bytes = CLOSED) -> None:
        """End all open streams as Nomad does on purpose: a line that isn't JSON, and the end of the body."""
        self.say(words)
        self.cut("clean")

    def wake(self) -> None:
        self.store.buffer.moved.unpark_all()


def parse_topics(request: Request) -> dict[str, list[str]] | str:
    """The topics asked for, with their keys; or what is wrong with them."""
    topics: dict[str, list[str]] = {}
    for text in request.all("topic") or ["*"]:
        topic, *keys = text.split(":")
        if len(keys) > 1:
            return f"Invalid key value pair for topic, topic: {text}"
        topics.setdefault(topic, []).extend(keys or ["*"])
    return topics

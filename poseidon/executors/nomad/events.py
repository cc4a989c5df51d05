"""Nomad's event stream → batches of values. It isn't to be trusted: anything may come, or nothing at all.

Whatever breaks it ends in ExecutorUnreachable; whoever follows again resumes by the index, inclusive.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import time

import msgspec
import trio

from poseidon.core.model import Value
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import Batch, StreamFigures
from poseidon.executors.nomad import wire
from poseidon.executors.nomad.client import Client, NotFound, Refused, path_of, shown
from poseidon.executors.nomad.placement import Evaluations
from poseidon.executors.nomad.values import Reader

LONGEST_LINE = 64 << 20
"""Bytes. One of 17 allocations had 104 kB; a whole cluster's may have tens of MB."""
OFF_LOOP = 1 << 20
"""Bytes from which on a line is parsed in a thread."""
TOPICS = ("Job", "Allocation", "Evaluation")

_line = msgspec.json.Decoder(wire.Line)


@dataclass(slots=True)
class Lines:
    """Cuts chunks into lines, at newlines alone: chunks mean nothing, and other separators may be part of a string."""

    most: int = LONGEST_LINE
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that *chunk* completes. Raises ExecutorUnreachable for one that doesn't end."""
        first, *others = chunk.split(b"\n")
        self._keep(first)
        if not others:
            return []
        lines = [self.rest(), *others[:-1]]
        self._parts.clear()
        self._size = 0
        self._keep(others[-1])
        return lines

    def rest(self) -> bytes:
        """What has come of a line without an end."""
        return b"".join(self._parts)

    def _keep(self, part: bytes) -> None:
        if part:
            self._parts.append(part)
            self._size += len(part)
        if self._size > self.most:
            raise ExecutorUnreachable(f"nomad's event stream has a line of more than {self.most} bytes")


@dataclass(slots=True)
class StreamHealth:
    """The stream in numbers."""

    connected: bool = False
    heard_at: float | None = None
    """When anything came, heartbeats included; by Trio's clock."""
    index: int = 0
    lines: int = 0
    events: int = 0
    breaks: int = 0
    lag: float | None = None
    """Seconds between the newest change that was told and its being told, by two machines' clocks."""

    def age(self) -> float | None:
        """Seconds since anything came."""
        return None if self.heard_at is None else trio.current_time() - self.heard_at

    def figures(self) -> StreamFigures:
        """As of now."""
        return StreamFigures(self.connected, self.age(), self.lag, self.index, self.lines, self.events, self.breaks)


class EventStream:
    """Follows the stream, one follower at a time or more."""

    def __init__(self, client: Client, reader: Reader, evaluations: Evaluations) -> None:
        self.health = StreamHealth()
        self._client = client
        self._settings = client.settings
        self._reader = reader
        self._evaluations = evaluations

    @asynccontextmanager
    async def follow(self, position: int | None) -> AsyncIterator[AsyncIterator[Batch]]:
        """See Executor. A quiet cluster holds the headers back until its next heartbeat. Not to wait that long is
        safe: what happens until Nomad has subscribed us is in its buffer, and we name the index to resume at."""
        await self._check_namespace()
        send, receive = trio.open_memory_channel[Batch](0)
        batches = _Batches(receive)
        opened = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, position, send, batches, opened)
            with trio.move_on_after(self._settings.headers_within):
                await opened.wait()
            refused = batches.failure
            if refused is None:
                yield batches
            nursery.cancel_scope.cancel(reason="no longer followed")
        raise_failure(refused)

    async def _check_namespace(self) -> None:
        """A list of an unknown namespace is just empty, as if all of our jobs were gone."""
        namespace = self._settings.namespace
        if namespace == "default":
            return
        try:
            await self._client.get(path_of("namespace", namespace), msgspec.json.Decoder(msgspec.Raw))
        except NotFound:
            raise ExecutorUnreachable(f"nomad has no namespace {namespace!r} (nomad.namespace)") from None
        except Refused as error:
            raise ExecutorUnreachable(error.message) from error

    async def _read(
        self,
        position: int | None,
        send: trio.MemorySendChannel[Batch],
        batches: "_Batches",
        opened: trio.Event,
    ) -> None:
        """Errors go to who reads the batches, as they are."""
        async with send:
            try:
                await self._receive(position, send, opened)
            except (ExecutorUnreachable, Refused) as error:
                batches.failure = error.message
            except trio.TooSlowError:
                batches.failure = f"nomad's event stream was silent for {self._settings.stream_silence:g} seconds"
            finally:
                self.health.connected = False
                self.health.breaks += 1
                opened.set()

    async def _receive(self, position: int | None, send: trio.MemorySendChannel[Batch], opened: trio.Event) -> None:
        query = [("topic", topic) for topic in TOPICS]
        if position is not None:
            query.append(("index", str(position)))
        lines = Lines()
        patience = self._settings.stream_silence
        with trio.fail_after(patience) as silence:
            async with self._client.stream("/v1/event/stream", query) as answer:
                self.health.connected = True
                opened.set()
                while chunk := await answer.receive():
                    if complete := lines.feed(chunk):
                        batch, failure = await self._batch(complete)
                        await send.send(batch)
                        if failure is not None:
                            raise failure
                    silence.deadline = trio.current_time() + patience
        raise ended(lines.rest())

    async def _batch(self, lines: list[bytes]) -> tuple[Batch, ExecutorUnreachable | None]:
        """All that came at once, as one change; and what ended it, for what came before counts."""
        values: list[Value] = []
        failure = None
        self.health.heard_at = trio.current_time()
        try:
            for raw in lines:
                if raw:
                    values += self._values(await _parsed(raw))
        except ExecutorUnreachable as error:
            failure = error
        return Batch(self.health.index, tuple(values)), failure

    def _values(self, line: wire.Line) -> list[Value]:
        self.health.lines += 1
        if not line.events:
            return []
        self.health.index = line.index
        self.health.events += len(line.events)
        for event in line.events:
            payload = event.payload
            if payload is not None and payload.evaluation is not None:
                self._evaluations.note(payload.evaluation)
        self._note_lag(line.events[-1])
        return self._reader.values(line.index, line.events)

    def _note_lag(self, event: wire.Event) -> None:
        payload = event.payload
        told = None if payload is None else payload.allocation or payload.evaluation
        if told is not None and told.modify_time:
            self.health.lag = time() - told.modify_time / 1e9


class _Batches:
    """What has been read, one after the other; then what went wrong."""

    def __init__(self, receive: trio.MemoryReceiveChannel[Batch]) -> None:
        self._receive = receive
        self.failure: str | None = None

    def __aiter__(self) -> "_Batches":
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise_failure(self.failure)
            raise StopAsyncIteration from None


def raise_failure(failure: str | None) -> None:
    """Raise it where it is of use, not in the task that met it."""
    if failure is not None:
        raise ExecutorUnreachable(failure)


async def _parsed(raw: bytes) -> wire.Line:
    try:
        line = _line.decode(raw) if len(raw) < OFF_LOOP else await trio.to_thread.run_sync(_line.decode, raw)
    except msgspec.DecodeError:
        raise ended(raw) from None
    if not line.index and not line.events and raw.strip() != b"{}":  # an object that tells of an error
        raise ended(raw)
    return line


def ended(last: bytes) -> ExecutorUnreachable:
    """Nomad says good-bye in plain text; else the line just ends."""
    words = shown(last)
    return ExecutorUnreachable(f"nomad ended the event stream: {words}" if words else "nomad ended the event stream")

"""Where executions go: addresses, credentials, limits of connections. Shared by all executions of an executor."""

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from ssl import SSLContext
from urllib.parse import quote, urlencode

import trio

from poseidon.core.model import Allocation
from poseidon.errors import BadRequest
from poseidon.executors.nomad import wrap

LONGEST_REQUEST = 1_000_000
"""Bytes of a request's first line; a Go server takes 1 MiB with all headers."""
AVOIDED = 60.0
"""Seconds for which a node that couldn't be reached isn't tried again."""


class Room:
    """How many connections one address takes."""

    def __init__(self, connections: int) -> None:
        self._limiter = trio.CapacityLimiter(connections)
        self._turn = trio.Lock()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Hold *count*. They are taken by one at a time: else all could wait for their last one."""
        holders = [object() for _ in range(count)]
        held = []
        try:
            async with self._turn:
                for holder in holders:
                    await self._limiter.acquire_on_behalf_of(holder)
                    held.append(holder)
            yield
        finally:
            for holder in held:
                self._limiter.release_on_behalf_of(holder)


@dataclass(frozen=True, slots=True)
class ExecTarget:
    """*direct* knows the address (host:port or URL) of an allocation's node, None if there is none."""

    url: str
    """http(s)://host:port of the server."""
    direct: Callable[[Allocation], Awaitable[str | None]] | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """With the token."""
    tls: SSLContext | None = None
    task: str = "default-task"
    set_user: str = "/sbin/setuser user"
    namespace: str = "default"
    region: str = ""
    connections: int = 64
    """At the same time, of each address; agents take 100 of one client in all."""
    heartbeat: float = 10.0
    direct_timeout: float = 1.0
    connect_timeout: float = 5.0
    start_timeout: float = 30.0
    """Seconds in which the command has to begin."""
    _rooms: dict[str, Room] = field(init=False, repr=False, compare=False)
    _marks: Iterator[int] = field(
        init=False, repr=False, compare=False, default_factory=lambda: count(secrets.randbelow(len(wrap.MARKS)))
    )
    _avoided: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rooms", defaultdict(lambda: Room(self.connections)))

    def mark(self) -> int:
        """A new one; they rise, so that a later execution's is none that an earlier one could have."""
        return wrap.MARKS[next(self._marks) % len(wrap.MARKS)]

    def room(self, address: str) -> Room:
        """Of this address."""
        return self._rooms[address]

    async def addresses(self, allocation: Allocation) -> tuple[str, ...]:
        """Where *allocation* can be reached, best first."""
        node = await self.direct(allocation) if self.direct else None
        if not node:
            return (self.url,)
        scheme = self.url.partition("://")[0]
        address = node.rstrip("/") if "://" in node else f"{scheme}://{node}"
        if address == self.url or self._avoided.get(address, 0.0) > trio.current_time():
            return (self.url,)
        return address, self.url

    def avoid(self, address: str) -> None:
        """It can't be reached now."""
        self._avoided[address] = trio.current_time() + AVOIDED

    def path(self, allocation: Allocation, words: tuple[str, ...], *, tty: bool) -> str:
        """The request for running *words*. Raises BadRequest if it would be too long."""
        options = {
            "task": self.task,
            "tty": "true" if tty else "false",
            "command": json.dumps(words, ensure_ascii=False, separators=(",", ":")),
            **({"namespace": self.namespace} if self.namespace != "default" else {}),
            **({"region": self.region} if self.region else {}),
        }
        path = f"/v1/client/allocation/{quote(allocation.id, safe='')}/exec?{urlencode(options, quote_via=quote)}"
        if len(path) > LONGEST_REQUEST:
            raise BadRequest(
                f"the command with its environment takes {len(path)} bytes in a request to Nomad, "
                f"of at most {LONGEST_REQUEST}"
            )
        return path

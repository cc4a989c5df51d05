"""A real daemon and the bare executor side by side, shared by all measurements that need both."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.bare import Bare
from bench.context import Bench
from bench.daemons import Client, Daemon


@dataclass(frozen=True, slots=True)
class Site:
    """The daemon has one client here; more may come."""

    bench: Bench
    daemon: Daemon
    client: Client
    bare: Bare


Part = Callable[[Site], Awaitable[None]]

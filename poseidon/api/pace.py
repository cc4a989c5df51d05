"""How often a client may start something: a bucket for each, which fills up again with time.

Only what costs a runner is counted. Whatever a client needs to end or to look after what it has is never refused.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import trio
from quart import g, request
from quart_trio import QuartTrio

from poseidon.api.auth import WORK
from poseidon.api.surroundings import Surroundings
from poseidon.errors import Overloaded

MOST_BUCKETS = 10_000
"""Of more clients than that, those who haven't come for longest are forgotten; they begin with a full one."""


@dataclass(slots=True)
class Pace:
    """So many starts in a second, so many at once."""

    rate: float
    burst: int
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """What is left in each, and when that was."""

    def take(self, client: str, now: float) -> float:
        """Count a start of *client*; if it is one too many, it isn't counted: the seconds until one is free."""
        left, since = self._buckets.pop(client, (float(self.burst), now))
        left = min(float(self.burst), left + (now - since) * self.rate)
        wait = max(0.0, (1 - left) / self.rate)
        self._buckets[client] = (left if wait else left - 1, now)
        while len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return wait


def limit_pace(app: QuartTrio, pace: Pace, surroundings: Surroundings) -> None:
    """Have *app* count what starts something, by token, without tokens by address."""
    if not pace.rate:
        return

    @app.before_request
    async def check() -> None:
        if request.method != "POST" or (request.endpoint or "").partition(".")[0] not in WORK:
            return
        client = g.get("caller") or surroundings.client(request._get_current_object())  # type: ignore[attr-defined]
        if wait := pace.take(client, trio.current_time()):
            many = f"more than {pace.rate:g} starts a second; see server.limits"
            raise Overloaded(many, retry_after=math.ceil(wait))

"""How often a client may start something, and be told of: a bucket for each, which fills up again with time.

Only what costs a runner is counted. Whatever a client needs to end or to look after what it has is never refused.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import structlog
import trio
from quart import Response, g, request, websocket
from quart.typing import ResponseTypes
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio

from poseidon.api.auth import WORK
from poseidon.api.surroundings import Surroundings
from poseidon.errors import Overloaded, Unauthorized

log = structlog.get_logger(__name__)

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


def tell_refusals(app: QuartTrio, surroundings: Surroundings) -> None:
    """Have the log tell of tokens that are refused, but not of each one of a flood."""
    told = Pace(rate=0.1, burst=5)

    def tell(asked: BaseRequestWebsocket, response: ResponseTypes | None) -> None:
        if response is None or response.status_code != Unauthorized.status:
            return
        client = surroundings.client(asked)
        if not told.take(client, trio.current_time()):
            log.warning("token refused", client=client, path=asked.path)

    @app.after_request
    async def tell_of_request(response: Response) -> Response:
        tell(request._get_current_object(), response)  # type: ignore[attr-defined]
        return response

    @app.after_websocket
    async def tell_of_websocket(response: ResponseTypes | None) -> ResponseTypes | None:
        tell(websocket._get_current_object(), response)  # type: ignore[attr-defined]
        return response


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

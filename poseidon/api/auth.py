"""The token: asked for on every route but health and version, compared in constant time."""

from hmac import compare_digest

from quart import request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.exceptions import NotFound

from poseidon.errors import Unauthorized

HEADER = "Poseidon-Token"
OPEN = frozenset({"status.health", "status.version"})
"""Endpoints for everybody: load balancers ask them."""


def require_token(app: QuartTrio, token: str) -> None:
    """Have *app* refuse whoever doesn't know *token*; an empty one lets everybody in."""
    expected = token.encode()
    if not expected:
        return

    def check(asked: BaseRequestWebsocket) -> None:
        if asked.endpoint in OPEN or isinstance(asked.routing_exception, NotFound):
            return
        given = asked.headers.get(HEADER, "").encode("latin-1", "replace")  # as its bytes came
        if not compare_digest(given, expected):
            raise Unauthorized("the token is missing or wrong")

    @app.before_request
    async def check_request() -> None:
        check(request._get_current_object())  # type: ignore[attr-defined]

    @app.before_websocket
    async def check_websocket() -> None:
        check(websocket._get_current_object())  # type: ignore[attr-defined]

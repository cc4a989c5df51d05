"""Answers as the contract wants them: bare JSON without a charset, empty bodies that are really empty."""

from contextlib import AsyncExitStack
from typing import cast

import msgspec
from quart import Response, request

UNTIL_ANSWERED = "poseidon.until_answered"
"""Where the server keeps a request's exit stack in its scope."""


def json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """*value* as JSON."""
    return Response(msgspec.json.encode(value), status, headers, content_type="application/json")


def empty(status: int = 204) -> Response:
    """No body, and nothing that speaks of one."""
    response = Response(b"", status)
    del response.headers["Content-Type"]
    return response


def until_answered() -> AsyncExitStack:
    """What is entered there is left when the answer has been sent, or can't be any more."""
    return cast(AsyncExitStack, cast(dict[str, object], request.scope)[UNTIL_ANSWERED])


def problem(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An error; the service's own ones have a *code*."""
    body = {"message": message} if code is None else {"message": message, "errorCode": code}
    return json(body, status, headers)

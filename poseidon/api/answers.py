"""Answers as the contract wants them: bare JSON without a charset, empty bodies that are really empty."""

import msgspec
from quart import Response


def json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """*value* as JSON."""
    return Response(msgspec.json.encode(value), status, headers, content_type="application/json")


def empty(status: int = 204) -> Response:
    """No body, and nothing that speaks of one."""
    response = Response(b"", status)
    del response.headers["Content-Type"]
    return response


def problem(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An error; the service's own ones have a *code*."""
    body = {"message": message} if code is None else {"message": message, "errorCode": code}
    return json(body, status, headers)

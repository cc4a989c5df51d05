"""How CodeOcean speaks HTTP: the headers, bodies and queries that it sends, and what it makes of each answer.

It is as unforgiving as the original client: statuses are compared exactly, and what would have raised out of its
code raises here.
"""

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import httpx

HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "Faraday v2.14.0",
    "Accept": "*/*",
    "Accept-Encoding": "gzip;q=1.0,deflate;q=0.6,identity;q=0.3",
}
KEPT = {"Connection": "keep-alive", "Keep-Alive": "30"}
"""Of the persistent connections, which are all but those of downloads."""
CONNECT_WITHIN, READ_WITHIN = 5, 60
CODES = {"NOMAD_UNREACHABLE", "NOMAD_OVERLOAD", "NOMAD_INTERNAL_SERVER_ERROR", "UNKNOWN"}


class Refused(Exception):
    """Any of the errors that the client knows and tells its users of."""


class BadRequest(Refused):
    pass


class Unauthorized(Refused):
    pass


class RunnerNotFound(Refused):
    pass


class NotAvailable(Refused):
    pass


class InternalServerError(Refused):
    pass


class UnexpectedResponse(Refused):
    pass


class EnvironmentNotFound(Refused):
    pass


class PrewarmingPoolDepleted(Refused):
    pass


class WorkspaceError(Refused):
    pass


class Unhandled(Exception):
    """What the client's code doesn't expect at all: its user meets a fault, or all its executions are cut off."""


def persistent(url: str, token: str) -> httpx.AsyncClient:
    """The connections of one process of the client."""
    return httpx.AsyncClient(
        base_url=url,
        headers=HEADERS | KEPT | {"Poseidon-Token": token},
        timeout=httpx.Timeout(READ_WITHIN, connect=CONNECT_WITHIN),
        trust_env=False,
    )


def fresh(url: str, token: str) -> httpx.AsyncClient:
    """The connection of one download."""
    return httpx.AsyncClient(
        base_url=url,
        headers=HEADERS | {"Poseidon-Token": token, "Connection": "close"},
        timeout=httpx.Timeout(READ_WITHIN, connect=CONNECT_WITHIN),
        trust_env=False,
    )


def body(value: object) -> bytes:
    """JSON as it comes from Ruby: without spaces, and not confined to ASCII."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def query(**parameters: str | bool) -> str:
    """Form-encoded and sorted: a slash is %2F, a space is +."""
    said = {name: str(value).lower() if isinstance(value, bool) else value for name, value in parameters.items()}
    return urlencode(sorted(said.items()))


def submission(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The body of a PATCH: the direct parents as folders first, then the files; everything else is deleted."""
    parents = dict.fromkeys(path.rpartition("/")[0] + "/" for path in files if "/" in path)
    copied = [{"path": path, "content": b64encode(content).decode()} for path, content in files.items()]
    return {"copy": [*({"path": parent} for parent in parents), *copied], "delete": ["./*"]}


def check(answer: httpx.Response, *fine: int, also: Mapping[int, type[Refused]] | None = None) -> None:
    """Raise what the client makes of an answer that isn't one of *fine*; *also*: statuses with a meaning here."""
    status = answer.status_code
    if status in fine:
        return
    if also and status in also:
        raise also[status](_object(answer)["message"] if status == 503 else status)
    match status:
        case 400:
            raise BadRequest(_object(answer)["message"])
        case 401:
            raise Unauthorized
        case 410:
            raise RunnerNotFound
        case 500:
            told = _object(answer)
            if told["errorCode"] not in CODES:
                raise Unhandled(f"unknown errorCode {told['errorCode']!r}")
            raise (NotAvailable if told["errorCode"] == "NOMAD_OVERLOAD" else InternalServerError)(told["message"])
        case _:
            raise UnexpectedResponse(f"{status} {answer.text}")


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        said = answer.json()
    except ValueError:
        raise UnexpectedResponse(answer.text) from None
    if not isinstance(said, dict):
        raise Unhandled(f"no object: {answer.text}")
    return said

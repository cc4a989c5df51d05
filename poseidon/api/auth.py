"""Who may do what: tokens with roles, asked for on every route but health and version, compared in constant time."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Literal

from quart import g, request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.exceptions import MethodNotAllowed, NotFound

from poseidon.errors import Forbidden, Unauthorized

HEADER = "Poseidon-Token"
OPEN = frozenset({"status.health", "status.version"})
"""Endpoints for everybody: load balancers ask them."""
READS = frozenset({"GET", "HEAD"})
WORK = frozenset({"runners", "files", "executions", "runs"})
"""Blueprints that are a client's daily work."""
OF_ALL_CLIENTS = frozenset({"runners.everything"})
"""What in them shows what other clients have."""
FACTS = frozenset({"environments", "runners", "status"})
"""Blueprints whose GETs tell how things are, but nothing of what users write."""
SHARED = frozenset({"environments.everything", "environments.one", "status.statistics"})
"""What clients read of the rest."""
BROWSABLE = frozenset(f"description.{name}" for name in ("openapi", "messages", "page", "start", "one"))
"""Endpoints that a browser opens by itself: HTTP Basic's password counts as the token too, the user's name doesn't.

Nowhere else, for browsers add it unasked: then any web page could have them act for their user."""
CHALLENGE = 'Basic realm="Poseidon: any name, and the token as the password", charset="UTF-8"'

Role = Literal["admin", "client", "read-only"]


@dataclass(frozen=True, slots=True)
class Key:
    """A token, of which only the digest (SHA-256) is known."""

    name: str
    role: Role
    digest: bytes


class Keyring:
    """All tokens. They can be exchanged while the API runs."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def exchange(self, keys: Iterable[Key]) -> None:
        """From now on these are the tokens."""
        self._keys = tuple(keys)

    def find(self, given: str) -> Key | None:
        """The key that *given* is. All are compared, so that the time taken doesn't tell which one is nearly right."""
        digest = sha256(given.encode()).digest()
        found = None
        for key in self._keys:
            if compare_digest(key.digest, digest):
                found = key
        return found


def require_token(app: QuartTrio, keyring: Keyring) -> None:
    """Have *app* refuse whoever has no token of *keyring*, or too little a role. An empty keyring lets all do all."""

    def check(asked: BaseRequestWebsocket) -> None:
        if not keyring or asked.endpoint in OPEN or isinstance(asked.routing_exception, NotFound):
            return
        key = keyring.find(_given(asked))
        if key is None:
            raise Unauthorized("the token is missing or wrong")
        g.caller, g.role = key.name, key.role
        if not isinstance(asked.routing_exception, MethodNotAllowed) and not allows(key.role, asked):
            raise Forbidden(f"the token {key.name!r} has the role {key.role!r}, which doesn't allow this")

    @app.before_request
    async def check_request() -> None:
        check(request._get_current_object())  # type: ignore[attr-defined]

    @app.before_websocket
    async def check_websocket() -> None:
        check(websocket._get_current_object())  # type: ignore[attr-defined]


def allows(role: Role, asked: BaseRequestWebsocket) -> bool:
    """Whether *role* may do it. What nobody has thought of here is for administrators."""
    endpoint = asked.endpoint or ""
    blueprint = endpoint.partition(".")[0]
    if endpoint in BROWSABLE:
        return asked.method in READS
    if role == "client":
        return (blueprint in WORK and endpoint not in OF_ALL_CLIENTS) or (endpoint in SHARED and asked.method in READS)
    return role == "admin" or (blueprint in FACTS and asked.method in READS)


def demand_admin(what: str) -> None:
    """Refuse whoever isn't an administrator something that the route as a whole doesn't ask it for."""
    if g.get("role", "admin") != "admin":
        raise Forbidden(f"{what} takes a token with the role 'admin', {g.caller!r} has {g.role!r}")


def _given(asked: BaseRequestWebsocket) -> str:
    """The token that came, as text: clients send it as UTF-8 or Latin-1."""
    header: str = asked.headers.get(HEADER, "")
    if not header:
        scheme, _, credentials = asked.headers.get("Authorization", "").partition(" ")
        header = credentials.strip() if scheme.lower() == "bearer" else ""
        if asked.endpoint in BROWSABLE and asked.authorization is not None:
            return asked.authorization.password or header
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header

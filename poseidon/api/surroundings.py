"""Where a request comes from, by which name it calls us, and whether that may be: proxies, origins, hosts.

Headers count only from proxies that are trusted; anybody can write them.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from quart import request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.exceptions import NotFound

from poseidon.api.auth import OPEN, Keyring
from poseidon.errors import Forbidden, Misdirected

UNIX = "unix"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")
_PAIR = re.compile(r'([A-Za-z]+)=("[^"]*"|[^;,\s"]*)')
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Called:
    """How the client has to call us: `scheme://host` and what proxies cut off the path's beginning."""

    scheme: str
    host: str
    prefix: str = ""

    @property
    def websocket(self) -> str:
        """The beginning of a WebSocket's address."""
        return f"{'wss' if self.scheme == 'https' else 'ws'}://{self.host}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known about the world between us and our clients."""

    base_url: str = ""
    """How clients call us; empty: as each request says."""
    trusted_proxies: tuple[Network, ...] = ()
    trusts_unix: bool = False
    """Whether whoever connects to a socket in the file system is a proxy too."""
    allowed_origins: tuple[str, ...] = ()
    """Sites beside our own whose pages may use us."""

    def called(self, asked: BaseRequestWebsocket) -> Called:
        """By the base URL, else by a trusted proxy, else by the request itself."""
        if self.base_url:
            parts = urlsplit(self.base_url)
            return Called(parts.scheme, parts.netloc, parts.path.rstrip("/"))
        scheme = "https" if asked.scheme in {"https", "wss"} else "http"
        own = Called(scheme, _valid_host(asked.headers.get("Host", "")) or _local(asked))
        return _as_forwarded(asked, own) if self._trusts(_peer(asked)) else own

    def client(self, asked: BaseRequestWebsocket) -> str:
        """The address of the client, who may be behind proxies that we trust."""
        hops = [*_forwarded_for(asked), _peer(asked)]
        while len(hops) > 1 and self._trusts(hops[-1]):
            hops.pop()
        return hops[-1]

    def is_own(self, origin: str, asked: BaseRequestWebsocket) -> bool:
        """Whether a page of *origin* is one of ours, or of a site that is allowed."""
        if origin in self.allowed_origins:
            return True
        scheme, _, netloc = origin.partition("://")
        place = _place(netloc, scheme)
        ours = (self.called(asked).host, asked.headers.get("Host", ""))
        return place is not None and place in {_place(host, scheme) for host in ours}

    def knows(self, host: str) -> bool:
        """Whether *host* can't be a stranger's name that he has pointed at us: see DNS rebinding."""
        if not host:
            return True
        name, _ = _place(host, "") or ("a.stranger", None)
        if "." not in name.rstrip(".") or name.endswith(".localhost") or _address(name):
            return True
        ours = (self.base_url, *self.allowed_origins)
        return name in {socket.gethostname().lower(), *(urlsplit(each).hostname for each in ours)}

    def _trusts(self, peer: str) -> bool:
        address = _address(peer)
        if address is None:
            return peer == UNIX and self.trusts_unix
        return any(address in network for network in self.trusted_proxies)


def guard(app: QuartTrio, surroundings: Surroundings, keyring: Keyring) -> None:
    """Have *app* refuse what a browser has been talked into by a page that isn't ours."""

    def check(asked: BaseRequestWebsocket) -> None:
        if asked.endpoint in OPEN or isinstance(asked.routing_exception, NotFound):
            return
        origin = asked.headers.get("Origin")
        if origin is not None and not surroundings.is_own(origin, asked):
            raise Forbidden("pages of other sites can't come here; server.allowed_origins lists those that may")
        if not keyring and not surroundings.knows(asked.headers.get("Host", "")):
            raise Misdirected("without a token, only known names of this host are answered: set server.base_url")

    @app.before_request
    async def check_request() -> None:
        check(request._get_current_object())  # type: ignore[attr-defined]

    @app.before_websocket
    async def check_websocket() -> None:
        check(websocket._get_current_object())  # type: ignore[attr-defined]


def _peer(asked: BaseRequestWebsocket) -> str:
    """The address at the other end of the connection; of a socket in the file system: `unix`."""
    client = asked.scope.get("client")
    return str(client[0]) if client else UNIX


def _local(asked: BaseRequestWebsocket) -> str:
    server = asked.scope.get("server")
    if not server or server[1] is None:
        return "localhost"
    return f"[{server[0]}]:{server[1]}" if ":" in server[0] else f"{server[0]}:{server[1]}"


def _as_forwarded(asked: BaseRequestWebsocket, own: Called) -> Called:
    """What the nearest proxy says; of several values that is the last one."""
    said = _forwarded(asked)
    scheme = said.get("proto", "").lower().replace("ws", "http")
    prefix = said.get("prefix", "").rstrip("/")
    return Called(
        scheme if scheme in _DEFAULT_PORTS else own.scheme,
        _valid_host(said.get("host", "")) or own.host,
        prefix if _PREFIX.fullmatch(prefix) else "",
    )


def _forwarded(asked: BaseRequestWebsocket) -> dict[str, str]:
    """X-Forwarded-*; only without any of them Forwarded: a proxy that sets the one may pass on the other unseen."""
    names = ("proto", "host", "prefix", "for")
    said = {name: _all(asked, f"X-Forwarded-{name}").rpartition(",")[2].strip() for name in names}
    return said if any(said.values()) else _pairs(_all(asked, "Forwarded").rpartition(",")[2])


def _all(asked: BaseRequestWebsocket, header: str) -> str:
    return ",".join(asked.headers.getlist(header))


def _pairs(element: str) -> dict[str, str]:
    return {name.lower(): value.strip('"') for name, value in _PAIR.findall(element)}


def _forwarded_for(asked: BaseRequestWebsocket) -> list[str]:
    """The addresses that proxies say they were called from, the nearest last."""
    listed = _all(asked, "X-Forwarded-For").split(",")
    if not any(listed):
        listed = [_pairs(each).get("for", "") for each in _all(asked, "Forwarded").split(",")]
    return [address for each in listed if (address := _bare(each.strip()))]


def _bare(node: str) -> str:
    """An address without its port; empty if it is none."""
    address = _address(node) or _address((_place(node, "") or ("", None))[0])
    return str(address) if address else ""


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _valid_host(host: str) -> str:
    return host if _place(host, "") else ""


def _place(netloc: str, scheme: str) -> tuple[str, int | None] | None:
    """Host and port, the scheme's own port said or not. None if it is no place at all."""
    if not _HOST.fullmatch(netloc):
        return None
    try:
        parts = urlsplit(f"//{netloc}")
        return (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(scheme)
    except ValueError:  # brackets round what is no address, a port above 65535
        return None

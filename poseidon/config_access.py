"""Settings of who may come in, and how: tokens with roles, TLS, proxies, limits."""

import hashlib
import ipaddress
import json
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from poseidon.config_kinds import HASHED, Section

Role = Literal["admin", "client", "read-only"]

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def _sendable(secret: str) -> str:
    """What can't be sent in a header as it is would lock everybody out, or differ between clients."""
    if secret != secret.strip() or not secret.isprintable() or not _is_latin(secret):
        raise ValueError("expected a secret of one line in Latin-1, without control characters or spaces round it")
    return secret


def _is_latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True


def _ascii(token: str) -> str:
    if not token.isascii():
        raise ValueError("expected a token of Nomad, which is ASCII")
    return token


def _perhaps_hashed(token: str) -> str:
    if is_hash(token) and not _DIGEST.fullmatch(token.removeprefix(HASHED)):
        raise ValueError(f"expected 64 hexadecimal digits after {HASHED}")
    return token


Secret = Annotated[str, Field(repr=False), AfterValidator(_sendable)]
"""Sent or received in a header, and never shown."""
ClusterToken = Annotated[Secret, AfterValidator(_ascii)]
"""Sent to Nomad."""
Token = Annotated[Secret, AfterValidator(_perhaps_hashed)]
"""A token that clients send, or `sha256:` and its digest."""
TOKEN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # noqa: S105 - a pattern
TokenName = Annotated[str, Field(pattern=TOKEN_NAME)]


def is_hash(token: str) -> bool:
    return token.startswith(HASHED)


def digest_of(token: str) -> bytes:
    """What is compared, and what may be stored, instead of *token*."""
    if is_hash(token):
        return bytes.fromhex(token.removeprefix(HASHED))
    return hashlib.sha256(token.encode()).digest()


def hashed(token: str) -> str:
    """The form of *token* that can lie in a configuration without giving it away."""
    return HASHED + digest_of(token).hex()


def _web_address(text: str) -> str:
    """scheme://host[:port][/path], without a slash at its end."""
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    else:
        is_usable = is_usable and not (parts.query or parts.fragment or parts.username)
    if text and not is_usable:
        raise ValueError(f"expected http(s)://host[:port], not {json.dumps(text[:60])}")
    return text.rstrip("/").removesuffix("/api/v1")


def _origin(text: str) -> str:
    origin = _web_address(text).lower()
    if not origin or urlsplit(origin).path:
        raise ValueError(f"expected http(s)://host[:port] without a path, not {json.dumps(text[:60])}")
    return origin


def _proxy(text: str) -> str:
    try:
        return text if text == UNIX else str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError(f'expected an address, a network or "{UNIX}", not {json.dumps(text[:60])}') from None


UNIX = "unix"
"""Instead of an address: whoever connects to a socket in the file system."""
WebAddress = Annotated[str, AfterValidator(_web_address)]
Origin = Annotated[str, AfterValidator(_origin)]
Proxy = Annotated[str, AfterValidator(_proxy)]


class LimitSettings(Section):
    """[server.limits]"""

    connections: Annotated[int, Field(ge=0, le=2**20)] = 0
    starts_per_second: Annotated[float, Field(ge=0)] = 0.0
    starts_at_once: Annotated[int, Field(ge=1, le=2**20)] = 20


class TlsSettings(Section):
    """[server.tls]"""

    active: bool = False
    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    client_ca_file: str = ""
    min_version: Literal["1.2", "1.3"] = "1.2"

    @model_validator(mode="after")
    def _has_certificate(self) -> "TlsSettings":
        if self.active and not self.cert_file:
            raise ValueError("expected cert_file in it, if it is active")
        return self


class TokenSettings(Section):
    """[server.tokens.NAME]"""

    role: Role = "client"
    token: Token = ""
    token_file: str = ""

    @model_validator(mode="after")
    def _has_token(self) -> "TokenSettings":
        if not self.token and not self.token_file:
            raise ValueError("expected token or token_file in it")
        return self

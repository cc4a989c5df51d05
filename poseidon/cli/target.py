"""Where the daemon is and which token it wants: options, then environment variables, then the configuration.

The configuration's token is only sent to the configuration's address, never to one given otherwise.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from poseidon.cli.failures import CommandFailed
from poseidon.config import Config, load_config
from poseidon.config_access import is_hash

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - we call, we don't listen
"""Addresses to listen on that can't be called, and what to call instead."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was said before the name of the command."""

    url: str | None = None
    token: str | None = None
    token_file: Path | None = None
    config: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon: the address before /api/v1, and the token (empty: none)."""

    url: str
    token: str
    ca_file: str = ""
    """Whose certificates are trusted; empty: whom the system trusts."""


def find_target(options: Options) -> Target:
    """The daemon that *options* mean."""
    token = given_token(options)
    if options.url is not None:
        return Target(checked(options.url), token or "", str(options.ca_file or ""))
    server = configuration(options.config).server
    own = "" if is_hash(server.token) else server.token  # a hash is for those who compare
    url = address_url(server.address, server.port, encrypted=server.tls.active)
    return Target(url, own if token is None else token, str(options.ca_file or server.tls.ca_file))


def given_token(options: Options) -> str | None:
    """The token by option or file; None if neither was given."""
    if options.token is not None or options.token_file is None:
        return options.token
    try:
        return options.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"can't read the token from {str(options.token_file)!r}: {error}") from error


def checked(url: str) -> str:
    """*url* without what we add ourselves."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in url
    except ValueError:  # a port above 65535 would be cut to another one by the system
        is_usable = False
    if not is_usable:
        raise CommandFailed(f"the daemon's URL must be like http://127.0.0.1:7200, not {url!r}")
    return url.rstrip("/").removesuffix("/api/v1")


def address_url(address: str, port: int, *, encrypted: bool = False) -> str:
    """The URL of a daemon that listens there, called from this machine."""
    host = EVERYWHERE.get(address, address)
    return f"{'https' if encrypted else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def authorities(target: Target) -> ssl.SSLContext:
    """What checks the certificate of the daemon."""
    try:
        return ssl.create_default_context(cafile=target.ca_file or None)
    except OSError as error:  # of a file, or ssl's own
        reason = getattr(error, "reason", None) or error.strerror
        raise CommandFailed(f"can't read certificates from {target.ca_file!r}: {reason}") from error


def configuration(path: Path | None) -> Config:
    """The daemon's configuration, as it would read it here."""
    return load_config(path, os.environ)

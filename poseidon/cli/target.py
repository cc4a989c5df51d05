"""Where the daemon is and which token it wants: options, then environment variables, then the configuration.

The configuration's token is only sent to the configuration's address, never to one given otherwise.
"""

import os
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


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon: the address before /api/v1, and the token (empty: none)."""

    url: str
    token: str


def find_target(options: Options) -> Target:
    """The daemon that *options* mean."""
    token = given_token(options)
    if options.url is not None:
        return Target(checked(options.url), token or "")
    server = configuration(options.config).server
    own = "" if is_hash(server.token) else server.token  # a hash is for those who compare
    return Target(address_url(server.address, server.port), own if token is None else token)


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


def address_url(address: str, port: int) -> str:
    """The URL of a daemon that listens there, called from this machine."""
    host = EVERYWHERE.get(address, address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configuration(path: Path | None) -> Config:
    """The daemon's configuration, as it would read it here."""
    return load_config(path, os.environ)

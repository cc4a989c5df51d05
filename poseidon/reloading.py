"""SIGHUP: read the configuration anew and put into force what can change while the daemon runs.

Tokens, certificates and logging can. A configuration with a mistake changes nothing at all.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio

from poseidon.api.auth import Key, Keyring
from poseidon.api.tls import Tls, make_context
from poseidon.config import Config, Settings, load_config
from poseidon.config_access import digest_of
from poseidon.errors import ConfigError
from poseidon.telemetry.logging import setup_logging

log = structlog.get_logger(__name__)

CHANGEABLE = ("server.token", "server.tokens", "server.tls", "nomad.token", "logging")
"""Settings, and tables of them, that count without a restart."""
FIXED = ("server.tls.active",)


def keys_of(config: Config) -> list[Key]:
    """The tokens that clients may come with."""
    return [Key(name, each.role, digest_of(each.token)) for name, each in config.server.all_tokens.items()]


@dataclass(slots=True)
class Reloading:
    """What the configuration is now, and who is told when it changes."""

    config: Config
    keyring: Keyring
    tls: Tls | None = None
    environ: Mapping[str, str] | None = None
    """Of the process, unless a test has another."""
    followers: list[Callable[[Config], None]] = field(default_factory=list)
    """Others who are told of the new configuration."""

    async def listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Heed SIGHUP for ever."""
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                self.reload()

    def reload(self) -> None:
        """All of it or nothing; the log tells."""
        try:
            config = load_config(self.config.origin, os.environ if self.environ is None else self.environ)
            context = make_context(config.server.tls) if self.tls and config.server.tls.active else None
        except ConfigError as error:
            log.error("configuration not reloaded: it has mistakes", problems=error.message.splitlines())
            return
        setup_logging(config.logging.level, config.logging.format, secrets=self.config.secrets() + config.secrets())
        self.keyring.exchange(keys_of(config))
        if self.tls and context:
            self.tls.exchange(context)
        for tell in self.followers:
            tell(config)
        left = sorted(_waiting(self.config, config))
        self.config = config
        log.info("configuration reloaded", callers=sorted(config.server.all_tokens))
        if left:
            log.warning("changed settings wait for a restart", settings=left)


def _waiting(old: Config, new: Config) -> set[str]:
    """Settings that differ and aren't taken over."""
    settings = set(Settings.model_fields)
    differing = set(_differing(old.model_dump(include=settings), new.model_dump(include=settings), ""))
    return {path for path in differing if not _counts(path)}


def _counts(path: str) -> bool:
    if path in FIXED:
        return False
    return any(path == known or path.startswith((f"{known}.", f"{known}_")) for known in CHANGEABLE)


def _differing(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _differing(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield path

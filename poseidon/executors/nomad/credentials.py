"""Who we are to a cluster, and who it is to us: the token, the certificates. Both can be replaced at any time."""

import ssl
from collections.abc import Callable

import structlog
import trio

from poseidon.errors import ConfigError
from poseidon.executors.nomad.settings import NomadSettings

log = structlog.get_logger(__name__)

HEADER = "X-Nomad-Token"
RENEWAL_INTERVAL = 1.0
"""Seconds between two readings of the token: many requests may be refused at once."""


class Credentials:
    """*renew* reads the token anew, where it is kept. Raises ConfigError for certificates that can't be read."""

    def __init__(self, settings: NomadSettings, renew: Callable[[], str] | None = None) -> None:
        self.headers = headers_of(settings.token)
        """For all requests; they change with the token."""
        self.tls = _context(settings) if settings.address.startswith("https") else None
        self._settings = settings
        self._renew = renew
        self._renewed_at = -RENEWAL_INTERVAL

    @property
    def token(self) -> str | None:
        """As of now; None: there is none."""
        return self.headers.get(HEADER)

    def use(self, token: str) -> None:
        """From now on *token* counts, and what is in the files of certificates; connections that are open stay.

        An authority that was trusted stays so until the end. Raises ConfigError, and changes nothing then."""
        if self.tls is not None:
            _context(self._settings)
            _load(self.tls, self._settings)
        self._use_token(token)

    def another_than(self, refused: str | None) -> bool:
        """Whether there is another token than *refused*: it may have been replaced where it is kept."""
        due = self._renewed_at + RENEWAL_INTERVAL <= trio.current_time()
        if self.token == refused and self._renew is not None and due:
            self._renewed_at = trio.current_time()
            try:
                self._use_token(self._renew())
            except ConfigError as error:
                log.warning("token of the cluster not read anew", error=error.message)
        return self.token != refused

    def _use_token(self, token: str) -> None:
        headers = headers_of(token)
        if headers != self.headers:
            self.headers.clear()
            self.headers.update(headers)
            log.info("token of the cluster replaced")


def headers_of(token: str) -> dict[str, str]:
    """For all requests: the stream is read as it is, so nothing may be compressed."""
    headers = {"Accept-Encoding": "identity"}
    return headers | {HEADER: token} if token else headers


def _context(settings: NomadSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file or None)
        _load(context, settings)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"nomad.tls: {error.strerror or error}: {error.filename or 'certificate or key'}") from error
    return context


def _load(context: ssl.SSLContext, settings: NomadSettings) -> None:
    if settings.tls_ca_file:
        context.load_verify_locations(settings.tls_ca_file)
    if settings.tls_cert_file:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)

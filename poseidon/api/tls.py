"""TLS: from files to what connections use, exchangeable while the server runs."""

import ssl
from dataclasses import dataclass

from poseidon.config_access import TlsSettings
from poseidon.errors import ConfigError

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(slots=True)
class Tls:
    """What new connections shake hands with; whoever is connected stays so."""

    context: ssl.SSLContext

    def __post_init__(self) -> None:
        self.exchange(self.context)

    def exchange(self, context: ssl.SSLContext) -> None:
        """From now on use this one. HTTP/2 is never offered: WebSockets need HTTP/1.1."""
        context.set_alpn_protocols(["http/1.1"])
        self.context = context


def open_tls(settings: TlsSettings) -> Tls | None:
    """As the settings say; None: plain HTTP. Raises ConfigError."""
    return Tls(make_context(settings)) if settings.active else None


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Read the files. Raises ConfigError, which names the setting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[settings.min_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    _load_certificate(context, settings)
    if settings.client_ca_file:
        _load_client_authorities(context, settings.client_ca_file)
    return context


def _load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    for name, path in (("cert_file", settings.cert_file), ("key_file", settings.key_file)):
        _check_readable(name, path)
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file or None, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"server.tls.cert_file: {settings.cert_file}: no certificate with its key: {_words(reason)}"
        ) from error


def _load_client_authorities(context: ssl.SSLContext, path: str) -> None:
    _check_readable("client_ca_file", path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"server.tls.client_ca_file: {path}: no certificates: {_words(error.reason)}") from error
    context.verify_mode = ssl.CERT_REQUIRED


def _check_readable(name: str, path: str) -> None:
    """OpenSSL doesn't say which of its files it can't read."""
    try:
        if path:
            open(path, "rb").close()
    except OSError as error:
        raise ConfigError(f"server.tls.{name}: {path}: {error.strerror}") from error


def _no_password() -> str:
    """Without this, OpenSSL would ask on the terminal and wait."""
    raise ValueError("the key is locked by a password")


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")

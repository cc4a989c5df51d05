"""Certificates of an authority that exists for one test."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

from poseidon.config_access import TlsSettings


@dataclass
class Authority:
    """Signs what a test needs; its files lie in *folder*."""

    folder: Path

    def __post_init__(self) -> None:
        self._ca = trustme.CA()
        self.file = self.folder / f"ca-{id(self)}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str = "127.0.0.1") -> Path:
        """A certificate with its key, in one file."""
        path = self.folder / f"{name}-{len(list(self.folder.iterdir()))}.pem"
        self._ca.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def settings(self, **more: object) -> TlsSettings:
        """Of a server at 127.0.0.1."""
        return TlsSettings.model_validate({"active": True, "cert_file": str(self.issue()), **more})

    def client(self, certificate: Path | None = None) -> ssl.SSLContext:
        """Of a client that trusts this authority."""
        context = ssl.create_default_context(cafile=str(self.file))
        if certificate:
            context.load_cert_chain(certificate)
        return context

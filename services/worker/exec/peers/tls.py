"""TLS between workers: both sides show a certificate, and take what the authority of their files has signed.

With a name, each side's certificate must have it: all services may have one authority then. Without, names are not looked at, so
the authority is one that signs workers and nothing else. An address is never among them: it is that of a pod, which discovery has
named and no certificate does.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from services.shared.tls.certificate_files import CertificateFiles, Certificates
from services.shared.tls.handshake import names_of


class PeerTls:
    """name: of workers' certificates, "" for any. Raises ValueError for files that cannot be used."""

    def __init__(self, certificate: Path, key: Path, authority: Path, name: str = "") -> None:
        self._files = CertificateFiles(certificate, key, authority, name)
        self.name = name

    def contexts(self) -> Certificates:
        """Of new connections, by the files as they are; connections that are open stay."""
        return self._files.now()

    def check(self, reader: ssl.SSLSocket) -> None:
        """Raises ssl.SSLError for the certificate of another one than a worker."""
        names = names_of(reader).names if self.name else frozenset()
        if self.name and self.name not in names:
            raise ssl.SSLError(f"a certificate of {self.name} is wanted, this one is of {', '.join(sorted(names)) or 'nobody'}")

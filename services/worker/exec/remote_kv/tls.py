"""TLS between workers: both sides present a certificate that the configured authority has signed.

If a name is configured, the certificate of the other side must have this name. So the same authority can also sign certificates
of other services. Without a configured name, names are not checked, and the authority must sign only certificates of workers. The
name is not the address of the remote worker, because certificates do not have the addresses of pods.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from rootstock_llm.services.shared.tls.certificate_files import CertificateFiles, Certificates
from rootstock_llm.services.shared.tls.handshake import names_of


class PeerTls:
    """The certificate of this worker, and the check of the other side's certificate."""

    def __init__(self, certificate: Path, key: Path, authority: Path, name: str = "") -> None:
        """Loads the files.

        Args:
            certificate: this worker's certificate.
            key: private key of the certificate.
            authority: certificate of the authority.
            name: name that the certificates of other workers must have; empty for any name.

        Raises:
            ValueError: a file cannot be used.
        """
        self._files = CertificateFiles(certificate, key, authority, name)
        self.name = name

    def contexts(self) -> Certificates:
        """Returns TLS contexts for new connections, from the present files. Open connections keep theirs."""
        return self._files.now()

    def check(self, reader: ssl.SSLSocket) -> None:
        """Checks the reader's certificate. Raises ssl.SSLError if a name is configured and the certificate lacks it."""
        names = names_of(reader).names if self.name else frozenset()
        if self.name and self.name not in names:
            raise ssl.SSLError(f"the certificate needs the name {self.name}; it has {', '.join(sorted(names)) or 'no name'}")

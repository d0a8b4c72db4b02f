"""A certificate, its key and its authorities, from files that may be replaced while the process runs.

now() checks the files for a change, at most once per CHECK_S. If a file changes while the files are read, all are read again, so
that certificate, key and authorities belong together: cert-manager and the kubelet replace them together by changing the target
of a link. If new files cannot be used, an error is logged, and the content read before stays in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.tls.handshake import CertificateNames, handshake_in_memory

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # shortest time in seconds between two checks of the files
TRIES = 5  # attempts to read all files without a change in between
EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED

Signature = tuple[tuple[int, int, int], ...]  # inode, modification time and size of each file


class BadTls(ValueError):
    """TLS files cannot be used. The message names the files and the reason."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of the files at one moment, in PEM."""

    version: int  # 0 for the first content of the files; increases with each change
    certificate: bytes  # certificate of this process, followed by its chain
    key: bytes
    authorities: bytes
    server: ssl.SSLContext  # context for connections that this process accepts
    client: ssl.SSLContext  # context for connections that this process opens
    # Names and expiry of the certificate. None: no name was to be checked, or the certificate has expired.
    named: CertificateNames | None = None


class CertificateFiles:
    """Files with a certificate, its key and its authorities. Thread-safe."""

    def __init__(self, certificate: Path, key: Path, authorities: Path, name: str = "") -> None:
        """Reads the files. An expired certificate is accepted, because it may be replaced before it is used.

        Args:
            name: DNS name that the certificate must have; "" for no check.

        Raises:
            BadTls: the files cannot be used.
        """
        self._paths = (certificate, key, authorities)
        self._name = name
        self._lock = threading.Lock()
        self.valid = True  # whether the current content of the files is in use
        try:
            self._signature_read, self._current = self._read(0)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise BadTls(f"{self}: {_reason(error)}") from None
        self._next_check = time.monotonic() + CHECK_S

    def __str__(self) -> str:
        return ", ".join(map(str, self._paths))

    def now(self) -> Certificates:
        """Returns the current content of the files; if it cannot be used, the last usable content."""
        with self._lock:
            if time.monotonic() >= self._next_check:
                self._reload_if_changed()
                self._next_check = time.monotonic() + CHECK_S
            return self._current

    def _reload_if_changed(self) -> None:
        try:
            if self._signature() == self._signature_read:
                self.valid = True  # after a fault, the files may again have the content in use
                return
            self._signature_read, self._current = self._read(self._current.version + 1)
        except (OSError, ssl.SSLError, ValueError) as error:
            if self.valid:
                logger.error(
                    "the new TLS files cannot be used; the old ones stay in use: %s",
                    _reason(error),
                    extra=fields(files=str(self)),
                )
            self.valid = False
            return
        self.valid = True
        logger.info("reloaded the TLS files", extra=fields(files=str(self)))

    def _read(self, version: int) -> tuple[Signature, Certificates]:
        """Reads all files, again if one changed meanwhile, at most TRIES times. Raises OSError, ssl.SSLError or ValueError."""
        for _ in range(TRIES):
            before = self._signature()
            certificate, key, authorities = (path.read_bytes() for path in self._paths)
            server, client = self._contexts()
            if self._signature() == before:
                named = self._check_name(server, client)
                return before, Certificates(version, certificate, key, authorities, server, client, named)
        raise OSError("the files change while they are read")

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        certificate, key, authorities = self._paths
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = bool(self._name)
        if self._name:
            client.set_alpn_protocols(["h2"])  # gRPC closes a connection without it
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key, "")  # the empty password prevents a prompt for one
            context.load_verify_locations(authorities)
        return server, client

    def _check_name(self, server: ssl.SSLContext, client: ssl.SSLContext) -> CertificateNames | None:
        if not self._name:
            return None
        try:
            return handshake_in_memory(server, client, self._name)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code != EXPIRED:
                raise
        logger.error("the certificate has expired; other services refuse it", extra=fields(files=str(self)))
        return None

    def _signature(self) -> Signature:
        stats = [path.stat() for path in self._paths]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def _reason(error: Exception) -> str:
    """Returns the reason in an error of the ssl module, without the position in the module's source code."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the authorities do not verify the certificate: {error.verify_message}"
    return (error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)) or type(error).__name__

"""A certificate, its key and its authorities, from files that may be replaced while the process runs.

The files are checked when they are needed, at most once a second, and read together: cert-manager and the kubelet replace them by
changing the target of a link. Files that cannot be used are logged, and the old ones stay in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.tls.handshake import Named, shown

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two checks of the files
TRIES = 5  # attempts to read all files without a change in between
EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED

Signature = tuple[tuple[int, int, int], ...]  # inode, modification time and size of each file


class BadTls(ValueError):
    """TLS files cannot be used. The message names the files and the reason."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of the files at one moment, in PEM."""

    number: int  # number of the version of the files; differs after each change
    certificate: bytes  # with its chain
    key: bytes
    authorities: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    named: Named | None = None  # names in the certificate, or None if they were not checked or it has expired


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
            self._seen, self._held = self._read(0)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise BadTls(f"{self}: {_words(error)}") from None
        self._next_look = time.monotonic() + LOOK_S

    def __str__(self) -> str:
        return ", ".join(map(str, self._paths))

    def now(self) -> Certificates:
        """Returns the content of the files, or the last content that could be used."""
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + LOOK_S
            return self._held

    def _look(self) -> None:
        try:
            if self._signature() == self._seen:
                self.valid = True  # the files in use have been restored
                return
            self._seen, self._held = self._read(self._held.number + 1)
        except (OSError, ssl.SSLError, ValueError) as error:
            if self.valid:
                logger.error(
                    "the new TLS files cannot be used; the old ones stay in use: %s", _words(error), extra=fields(files=str(self))
                )
            self.valid = False
            return
        self.valid = True
        logger.info("reloaded the TLS files", extra=fields(files=str(self)))

    def _read(self, number: int) -> tuple[Signature, Certificates]:
        """Reads all files in the same state. Raises OSError, ssl.SSLError, or ValueError for another service's certificate."""
        for _ in range(TRIES):
            before = self._signature()
            certificate, key, authorities = (path.read_bytes() for path in self._paths)
            server, client = self._contexts()
            if self._signature() == before:
                named = self._named(server, client)
                return before, Certificates(number, certificate, key, authorities, server, client, named)
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

    def _named(self, server: ssl.SSLContext, client: ssl.SSLContext) -> Named | None:
        if not self._name:
            return None
        try:
            return shown(server, client, self._name)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code != EXPIRED:
                raise
        logger.error("the certificate has expired; other services refuse it", extra=fields(files=str(self)))
        return None

    def _signature(self) -> Signature:
        stats = [path.stat() for path in self._paths]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in stats)


def _words(error: Exception) -> str:
    """Returns the library's message without the position in its source code."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the authorities do not verify the certificate: {error.verify_message}"
    return (error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)) or type(error).__name__

"""A certificate, its key and the authorities that sign both sides', from files that may be replaced while they are in use.

They are looked at when they are needed, once a second at most, and taken together: as cert-manager and the kubelet write them,
behind a link whose target changes. What cannot be used is logged and not taken. Any thread may ask.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from services.shared.observe.log_fields import fields
from services.shared.tls.own_handshake import Named, shown

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the files
TRIES = 5  # to read all of them between two changes
EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED

Signature = tuple[tuple[int, int, int], ...]


class BadTls(ValueError):
    """Files that cannot be used; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files held at one moment. number: another one after each change. PEM: certificate (its chain with it), key,
    authorities. named: who the certificate says that it is; None where nobody has looked."""

    number: int
    certificate: bytes
    key: bytes
    authorities: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    named: Named | None = None


class CertificateFiles:
    """name: what the certificate must say that it is, by these authorities; "": nobody looks. Raises BadTls for files
    that cannot be used. One that has expired can: it may be replaced before anybody has met it."""

    def __init__(self, certificate: Path, key: Path, authorities: Path, name: str = "") -> None:
        self._paths = (certificate, key, authorities)
        self._name = name
        self._lock = threading.Lock()
        self.valid = True  # False: what they hold now is not what is used
        try:
            self._seen, self._held = self._read(0)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise BadTls(f"{self}: {_words(error)}") from None
        self._next_look = time.monotonic() + LOOK_S

    def __str__(self) -> str:
        return ", ".join(map(str, self._paths))

    def now(self) -> Certificates:
        """By the files as they are, or were when they could be used last."""
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + LOOK_S
            return self._held

    def _look(self) -> None:
        try:
            if self._signature() == self._seen:
                self.valid = True  # those in use are there again
                return
            self._seen, self._held = self._read(self._held.number + 1)
        except (OSError, ssl.SSLError, ValueError) as error:
            if self.valid:
                logger.error("new TLS files cannot be used, the old ones are: %s", _words(error), extra=fields(files=str(self)))
            self.valid = False
            return
        self.valid = True
        logger.info("TLS files are reloaded", extra=fields(files=str(self)))

    def _read(self, number: int) -> tuple[Signature, Certificates]:
        """All of one moment. Raises OSError, ssl.SSLError, and ValueError for one that is somebody else's."""
        for _ in range(TRIES):
            before = self._signature()
            certificate, key, authorities = (path.read_bytes() for path in self._paths)
            server, client = self._contexts()
            if self._signature() == before:
                named = self._named(server, client)
                return before, Certificates(number, certificate, key, authorities, server, client, named)
        raise OSError("the files are being replaced all the time")

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        certificate, key, authorities = self._paths
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = bool(self._name)
        if self._name:
            client.set_alpn_protocols(["h2"])  # of gRPC, which ends a connection without
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key, "")  # asks nobody for a password
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
        logger.error("the certificate has expired: nobody takes it until it is renewed", extra=fields(files=str(self)))
        return None

    def _signature(self) -> Signature:
        stats = [path.stat() for path in self._paths]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in stats)


def _words(error: Exception) -> str:
    """What the library says, without where in its source it says so."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not taken by its own authorities: {error.verify_message}"
    return (error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)) or type(error).__name__

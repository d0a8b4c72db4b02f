"""TLS between workers: a certificate, its key and the authority that signs both sides', from files that may be replaced.

Both sides show a certificate, and take what that authority has signed. Names in it are not looked at: an address is that of a
pod, which discovery has named and no certificate does, so the authority is one that signs workers and nothing else.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from services.shared.observe.log import fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """Of new connections: as their server, as their client."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class PeerTls:
    """Raises OSError or ssl.SSLError for files that cannot be used."""

    def __init__(self, certificate: Path, key: Path, authority: Path) -> None:
        self._files = (certificate, key, authority)
        self._lock = threading.Lock()  # connections are made on threads of their own
        self._seen = self._signature()
        self._contexts = self._made()

    def contexts(self) -> TlsContexts:
        """By the files as they are. Those that cannot be used are logged and not taken; connections that are open stay."""
        with self._lock:
            try:
                if (seen := self._signature()) != self._seen:
                    self._seen = seen
                    self._contexts = self._made()
                    logger.info("TLS files of the KV port are reloaded")
            except (OSError, ssl.SSLError) as error:
                logger.error("the new TLS files of the KV port cannot be used, the old ones are", extra=fields(error=str(error)))
            return self._contexts

    def _made(self) -> TlsContexts:
        certificate, key, authority = self._files
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
        return TlsContexts(server, client)

    def _signature(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._files]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in stats]

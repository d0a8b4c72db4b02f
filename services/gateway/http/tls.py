"""TLS of the HTTP port: a certificate and its key from files, which may be replaced while the server runs.

New connections get the new certificate, open ones stay as they are. A pair that cannot be used is logged and not taken.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the files


class TlsFiles:
    """context: of all connections to come. Raises OSError or ssl.SSLError for files that cannot be used."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._signature()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.load_cert_chain(*self._files)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Takes what the files hold if they have changed: a Secret's are changed by a link's new target."""
        try:
            seen = self._signature()
            if seen == self._seen:
                return
            self._seen = seen
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)  # a wrong pair would spoil the one in use
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            logger.error("the new TLS files cannot be used, the old ones are", extra=fields(error=str(error)))
        else:
            logger.info("TLS files are reloaded")

    def _signature(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._files]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in stats]

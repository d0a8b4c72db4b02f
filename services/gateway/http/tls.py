"""Loads the certificate and the private key of the HTTP port, and reloads them when their files change.

New connections get the new certificate, and open ones keep theirs. If the new files are invalid, an error is logged and the old
certificate stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two checks of the files


class TlsFiles:
    """The TLS context of the HTTP port, and the files that it was loaded from.

    `context` is used by every new connection. The constructor raises OSError or ssl.SSLError if a file is unreadable or invalid.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._signature()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.load_cert_chain(*self._files)

    async def run(self) -> None:
        """Reloads changed files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Reloads the files if they have changed. Kubernetes changes a Secret's files by the target of a symbolic link."""
        try:
            seen = self._signature()
            if seen == self._seen:
                return
            self._seen = seen
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                *self._files
            )  # an invalid pair would break the context in use
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            logger.error("could not load the new TLS files; the old ones stay in use", extra=fields(error=str(error)))
        else:
            logger.info("reloaded the TLS files")

    def _signature(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._files]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in stats]

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

CHECK_S = 1.0  # seconds between two checks of the files


class TlsFiles:
    """The TLS context of the HTTP port, and the files that it was loaded from.

    Every new connection uses `context`. The constructor raises OSError or ssl.SSLError if a file is unreadable or invalid.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._loaded_signature = self._signature()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.load_cert_chain(*self._files)

    async def run(self) -> None:
        """Reloads changed files until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Reloads the files if they have changed.

        Compares the file behind a symbolic link, because Kubernetes updates a Secret's files by changing the link's target.
        """
        try:
            signature = self._signature()
            if signature == self._loaded_signature:
                return
            self._loaded_signature = signature
            # Loads the pair into a new context first, because an invalid pair would break the context in use.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            logger.error("could not load the new TLS files; the old ones stay in use", extra=fields(error=str(error)))
        else:
            logger.info("reloaded the TLS files")

    def _signature(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._files]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in stats]

"""Certificates of workers, signed by one authority, in folders."""

from __future__ import annotations

from pathlib import Path

from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls
from tests import certificates


class Authority:
    """A certificate authority with a folder."""

    def __init__(self, folder: Path) -> None:
        self._authority = certificates.Authority(folder, "workers")
        self._folder = folder
        self._made = 0
        self.file = folder / "ca.crt"

    def files(self, name: str) -> tuple[Path, Path, Path]:
        """Returns certificate, key and authority of a worker, in a new folder."""
        self._made += 1
        return certificates.Mounted(self._folder / f"{name}-{self._made}", self._authority.signed(name), self._authority).paths

    def tls(self, name: str, wanted: str = "") -> PeerTls:
        """Returns the TLS files of a worker.

        Args:
            name: name in the worker's certificate.
            wanted: name that both sides' certificates must have; "" for any.
        """
        return PeerTls(*self.files(name), wanted)

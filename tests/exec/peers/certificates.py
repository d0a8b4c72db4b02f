"""Workers' certificates by an authority of their own, in folders."""

from __future__ import annotations

from pathlib import Path

from services.worker.exec.peers.tls import PeerTls
from tests import certificates


class Authority:
    """With a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._authority = certificates.Authority(folder, "workers")
        self._folder = folder
        self._made = 0
        self.file = folder / "ca.crt"

    def files(self, name: str) -> tuple[Path, Path, Path]:
        """Certificate, key and authority of a worker, in a folder of its own."""
        self._made += 1
        return certificates.Mounted(self._folder / f"{name}-{self._made}", self._authority.signed(name), self._authority).paths

    def tls(self, name: str, wanted: str = "") -> PeerTls:
        """wanted: name that both sides' certificates must have."""
        return PeerTls(*self.files(name), wanted)

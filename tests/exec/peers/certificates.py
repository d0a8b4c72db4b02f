"""Authorities, and what they sign: made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from services.worker.exec.peers.tls import PeerTls

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


class Authority:
    """With a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.file = folder / "ca.crt"
        self._openssl("req", "-x509", *KEY, "-subj", "/CN=workers", "-keyout", self._folder / "ca.key", "-out", self.file)

    def files(self, name: str) -> tuple[Path, Path, Path]:
        """Certificate, key and authority of a worker, in a folder of its own."""
        folder = self._folder / name
        folder.mkdir()
        certificate, key, authority = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
        signed = ["-CA", self.file, "-CAkey", self._folder / "ca.key"]
        self._openssl("req", "-x509", *KEY, *signed, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate)
        authority.write_bytes(self.file.read_bytes())
        return certificate, key, authority

    def tls(self, name: str) -> PeerTls:
        return PeerTls(*self.files(name))

    @staticmethod
    def _openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

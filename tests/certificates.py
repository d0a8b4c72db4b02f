"""Real certificates and authorities for tests, made by openssl and laid out like a Secret of cert-manager."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
LEAF = ("-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth,clientAuth")
ROLES = ("gateway", "tokenizer", "detokenizer", "worker", "operator")


@dataclass(frozen=True)
class Pems:
    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority. Its key and certificates are in `folder`, which must not exist before."""

    def __init__(self, folder: Path, name: str = "services") -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._file, self._key = folder / "ca.crt", folder / "ca.key"
        _openssl("req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self._file)
        self.pem = self._file.read_bytes()

    def signed(self, *names: str, expired: bool = False) -> Pems:
        """Returns a leaf certificate and key for these DNS names, made as docs/how-to/kubernetes/security.md describes."""
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            folder = Path(made)
            certificate, key = folder / "tls.crt", folder / "tls.key"
            alternative = ",".join(f"DNS:{name}" for name in names) or "DNS:nobody"
            wanted = ("-subj", f"/CN={(names or ('nobody',))[0]}", "-addext", f"subjectAltName={alternative}", *LEAF)
            if expired:
                return self._expired(folder, wanted, key, certificate)
            signer = ("-CA", self._file, "-CAkey", self._key)
            _openssl("req", "-x509", *KEY, "-days", "2", *signer, *wanted, "-keyout", key, "-out", certificate)
            return Pems(certificate.read_bytes(), key.read_bytes())

    def _expired(self, folder: Path, wanted: tuple[str, ...], key: Path, certificate: Path) -> Pems:
        """Returns an expired certificate. Only `openssl ca` can sign a certificate with an end in the past."""
        request, settings = folder / "tls.csr", folder / "ca.cnf"
        (folder / "index").touch()
        settings.write_text(
            f"[ca]\ndefault_ca=d\n[d]\ndatabase={folder}/index\nserial={folder}/serial\nnew_certs_dir={folder}\n"
            "default_md=sha256\npolicy=p\ncopy_extensions=copy\nrand_serial=yes\n[p]\ncommonName=supplied\n"
        )
        _openssl("req", "-new", *KEY, *wanted, "-keyout", key, "-out", request)
        dates = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
        signer = ("-cert", self._file, "-keyfile", self._key)
        _openssl("ca", "-batch", "-notext", "-config", settings, *signer, *dates, "-in", request, "-out", certificate)
        return Pems(certificate.read_bytes(), key.read_bytes())


class Mounted:
    """A Secret's files as the kubelet mounts them: below a symbolic link. An update changes the link's target atomically."""

    def __init__(self, folder: Path, pems: Pems, *authorities: Authority) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._version = 0
        self.put(pems, *authorities)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(Path("..data", name))

    def put(self, pems: Pems, *authorities: Authority) -> None:
        self._version += 1
        version = self.folder / f"..{self._version}"
        version.mkdir()
        (version / "tls.crt").write_bytes(pems.certificate)
        (version / "tls.key").write_bytes(pems.key)
        (version / "ca.crt").write_bytes(b"".join(authority.pem for authority in authorities))
        link = self.folder / "..new"
        link.symlink_to(version.name)
        os.replace(link, self.folder / "..data")

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.folder / "tls.crt", self.folder / "tls.key", self.folder / "ca.crt"


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

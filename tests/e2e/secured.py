"""The whole system with mutual TLS between all processes and Redis servers. Tests can replace certificates while it runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.certificates import ROLES, Authority, Mounted
from tests.e2e.system import System

REDIS = ("redis", "state")
REDIS_HOST = "localhost"  # the name in the certificate of Redis


def role_of(name: str) -> str:
    """Returns the certificate role of a process, for example `gateway` for gateway-1, and `worker` for prefill-0 and decode-0."""
    role = name.partition("-")[0]
    return role if role in (*ROLES, *REDIS) else "worker"


class SecuredSystem(System):
    """A system whose connections all use mutual TLS.

    Attributes:
        mounted: certificate files by role. Both Redis servers have the role `redis`.
        token: file with the token that all services share.
        health_ports: health port of each process, which has no TLS.
    """

    def __init__(self, folder: Path, authority: Authority, **settings: Any) -> None:
        program = shutil.which("redis-server")
        assert program, "this test needs Debian's redis-server, because the bundled one has no TLS"
        super().__init__(folder / "logs", redis_server=program, **settings)
        self.authority = authority
        self.mounted = {
            role: Mounted(folder / role, authority.signed(*self.names(role)), authority) for role in (*ROLES, "redis")
        }
        self.token = folder / "token"
        self.token.write_text("the-token-of-all-services\n")
        self.health_ports = {name: part.health for name, part in self.parts.items() if role_of(name) == "gateway"}
        for name, part in self.parts.items():
            role = role_of(name)
            if role in REDIS:
                part.command.argv[:] = self._redis(part.command.argv)
                continue
            certificate, key, authorities = self.mounted[role].paths
            part.command.argv[:] = [self._with_tls(word, self.mounted[role]) for word in part.command.argv]
            part.command.env.update(
                ROOTSTOCK_MTLS_CERT_FILE=str(certificate),
                ROOTSTOCK_MTLS_KEY_FILE=str(key),
                ROOTSTOCK_MTLS_CA_FILE=str(authorities),
                ROOTSTOCK_MTLS_TOKEN_FILE=str(self.token),
            )
            if role != "gateway":
                (self.health_ports[name],) = free_ports(1)
                part.command.env["ROOTSTOCK_HEALTH_PORT"] = str(self.health_ports[name])

    @staticmethod
    def names(role: str) -> tuple[str, ...]:
        return (REDIS_HOST,) if role == "redis" else (f"rootstock-{role}",)

    def renew(self, signer: Authority, *authorities: Authority) -> None:
        """Replaces all certificates by new ones from `signer`, and the trusted authorities by `authorities`."""
        for role, mounted in self.mounted.items():
            mounted.put(signer.signed(*self.names(role)), *authorities)

    def _redis(self, argv: list[str]) -> list[str]:
        certificate, key, authorities = map(str, self.mounted["redis"].paths)
        port = argv.index("--port")
        tls = ["--port", "0", "--tls-port", argv[port + 1], "--tls-auth-clients", "yes"]
        files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authorities]
        return [*argv[:port], *tls, *files, *argv[port + 2 :]]

    @staticmethod
    def _with_tls(word: str, mounted: Mounted) -> str:
        if not word.startswith("redis://"):
            return word
        certificate, key, authorities = mounted.paths
        query = f"ssl_ca_certs={authorities}&ssl_certfile={certificate}&ssl_keyfile={key}"
        return f"{word.replace('redis://', 'rediss://').replace(HOST, REDIS_HOST)}?{query}"

"""TLS between services in which both sides show a certificate, and a shared token in addition: what a process needs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from services.shared.settings import TlsSettings
from services.shared.tls.certificate_files import CertificateFiles, Certificates
from services.shared.tls.roles import Role
from services.shared.tls.token_file import TokenFile

TOKEN_KEY = "rootstock-token"  # metadata of each call


class MutualTls:
    """role: this process's own. tokens: None for none. refused: calls that were turned away here, by why.

    Nothing is raised later: files that cannot be used any more are told of in the log."""

    def __init__(self, files: CertificateFiles, role: Role, tokens: TokenFile | None = None) -> None:
        self.files = files
        self.role = role
        self.tokens = tokens
        self.refused = {"certificate": 0, "token": 0}

    @property
    def number(self) -> int:
        """Another one once the files have changed: connections to come are to be made anew."""
        return self.files.now().number

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a port, for its whole life: each handshake goes by the files as they are."""
        served = self.files.now()
        return grpc.dynamic_ssl_server_credentials(_served(served), _following(self.files, served.number), True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of connections that are made before the files change again."""
        held = self.files.now()
        credentials = grpc.ssl_channel_credentials(held.authorities, held.key, held.certificate)
        if self.tokens is None:
            return credentials
        return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_TokenOf(self.tokens)))


class _TokenOf(grpc.AuthMetadataPlugin):  # type: ignore[misc]  # grpcio has no types
    """On a thread of gRPC's own, for each call."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback(((TOKEN_KEY, self._tokens.sent),), None)


def _served(held: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.certificate)], held.authorities)


def _following(files: CertificateFiles, number: int) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Asked by gRPC at each handshake, one after the other; None: what it has is right."""

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal number
        held = files.now()
        if held.number == number:
            return None
        number = held.number
        return _served(held)

    return fetch


def mutual_tls(settings: TlsSettings, role: Role) -> MutualTls | None:
    """None where the settings name no certificate. Raises BadTls for files that cannot be used."""
    if not settings.mtls_cert_file:
        return None
    certificate, key, authorities = map(Path, (settings.mtls_cert_file, settings.mtls_key_file, settings.mtls_ca_file))
    tokens = TokenFile(Path(settings.mtls_token_file)) if settings.mtls_token_file else None
    return MutualTls(CertificateFiles(certificate, key, authorities, role.value), role, tokens)

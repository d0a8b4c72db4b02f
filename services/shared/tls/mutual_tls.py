"""Mutual TLS between services: the credentials of a process, with an optional shared token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from rootstock_llm.services.shared.settings import TlsSettings
from rootstock_llm.services.shared.tls.certificate_files import CertificateFiles, Certificates
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.shared.tls.token_file import TokenFile

TOKEN_KEY = "rootstock-token"  # metadata key of the token in each call


class MutualTls:
    """Certificate files, role and tokens of this process. If a file becomes unusable, its last usable content stays in use."""

    def __init__(self, files: CertificateFiles, role: Role, tokens: TokenFile | None = None) -> None:
        self.files = files
        self.role = role  # role of this process
        self.tokens = tokens  # None: calls need no token
        self.refused = {"certificate": 0, "token": 0}  # calls refused by this process, by reason

    @property
    def version(self) -> int:
        """Version of the certificate files. When it changes, new connections need new credentials."""
        return self.files.now().version

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for the lifetime of a port. Each handshake uses the current files."""
        current = self.files.now()
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(current), _changed_configuration(self.files, current.version), True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials with the current files. After a change of the files, new connections need new credentials."""
        current = self.files.now()
        credentials = grpc.ssl_channel_credentials(current.authorities, current.key, current.certificate)
        if self.tokens is None:
            return credentials
        return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_TokenMetadata(self.tokens)))


class _TokenMetadata(grpc.AuthMetadataPlugin):  # type: ignore[misc]  # grpcio has no types
    """Adds the token to each call. gRPC calls the plugin on its own thread."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback(((TOKEN_KEY, self._tokens.sent),), None)


def _server_configuration(current: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(current.key, current.certificate)], current.authorities)


def _changed_configuration(files: CertificateFiles, version: int) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Returns the function that gRPC calls before each handshake.

    The function returns the new configuration, or None if the certificate has not changed.
    """

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal version
        current = files.now()
        if current.version == version:
            return None
        version = current.version
        return _server_configuration(current)

    return fetch


def mutual_tls(settings: TlsSettings, role: Role) -> MutualTls | None:
    """Returns the credentials in the settings, or None if they name no certificate. Raises BadTls if files cannot be used."""
    if not settings.mtls_cert_file:
        return None
    certificate, key, authorities = map(Path, (settings.mtls_cert_file, settings.mtls_key_file, settings.mtls_ca_file))
    tokens = TokenFile(Path(settings.mtls_token_file)) if settings.mtls_token_file else None
    return MutualTls(CertificateFiles(certificate, key, authorities, role.value), role, tokens)

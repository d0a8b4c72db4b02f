"""API keys as gateways name them to each other: by a digest, never by the key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from services.gateway.config.settings import key_name

_PURPOSE = b"rootstock-tenant"  # 16 bytes at most


class Tenants:
    """api_keys: as this gateway has them, in whatever order. token: of the operators, mixed in where there is one, so that nobody
    else can try keys on a digest."""

    def __init__(self, api_keys: Sequence[str], token: str) -> None:
        secret = hashlib.sha256(token.encode()).digest() if token else b""
        digests = [hashlib.blake2b(key.encode(), digest_size=16, key=secret, person=_PURPOSE).digest() for key in api_keys]
        self._digests = {key_name(index): digest for index, digest in enumerate(digests)} or {"": b""}
        self._names = {digest: name for name, digest in reversed(self._digests.items())}

    def digest(self, key: str) -> bytes:
        """key: an API key's name, "" where there are none."""
        return self._digests[key]

    def key(self, digest: bytes) -> str | None:
        """The name of the key; None: this gateway has no such key."""
        return self._names.get(digest)

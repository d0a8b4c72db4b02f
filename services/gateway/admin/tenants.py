"""API keys as gateways name them to each other: by a digest of the name, so that a key that is replaced keeps what is its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from services.gateway.keys.key_table import KeyTable

_PURPOSE = b"rootstock-tenant"  # 16 bytes at most


class Tenants:
    """table: the keys as this gateway has them at the moment, in whatever order; None where nobody has keys. token: of the
    operators, mixed in where there is one, so that nobody else can try names on a digest."""

    def __init__(self, table: Callable[[], KeyTable | None], token: str) -> None:
        self._table = table
        self._secret = hashlib.sha256(token.encode()).digest() if token else b""
        self._known: KeyTable | None = None
        self._names: dict[bytes, str] = {b"": ""}  # of that table

    def digest(self, key: str) -> bytes:
        """key: an API key's name, "" where there are none."""
        if not key:
            return b""
        return hashlib.blake2b(key.encode(), digest_size=16, key=self._secret, person=_PURPOSE).digest()

    def key(self, digest: bytes) -> str | None:
        """The name of the key; None: this gateway has no such key."""
        table = self._table()
        if table is not self._known:
            self._known = table
            self._names = {b"": ""} if table is None else {self.digest(key.name): key.name for key in table}
        return self._names.get(digest)

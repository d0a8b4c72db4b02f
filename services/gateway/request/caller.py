"""Whose a request is, and what follows from that. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_DIGEST_BYTES = 16
_PURPOSE = b"rootstock-salt"  # 16 bytes at most
_TENANT = b"rootstock-share"


@dataclass(frozen=True, slots=True)
class Caller:
    """key: name of the API key, "" where nobody has one. priority: of what asks for none, and the most urgent that may be asked
    for; None leaves it to the request. weight: of the key's share where requests wait. low_first: lower ones are more urgent.
    salts_cache: cached prefixes are the key's own."""

    key: str = ""
    priority: int | None = None
    low_first: bool = False
    salts_cache: bool = False
    weight: float = 1.0

    @property
    def tenant(self) -> bytes:
        """What workers know the key by; empty where nobody has one."""
        return blake2b(self.key.encode(), digest_size=_DIGEST_BYTES, person=_TENANT).digest() if self.key else b""

    def priority_of(self, asked: int | None) -> int:
        if asked is None or self.priority is None:
            return (self.priority or 0) if asked is None else asked
        return max(asked, self.priority) if self.low_first else min(asked, self.priority)

    def cache_salt_of(self, asked: str) -> str:
        """What workers and the prefix index know: who has the same shares cached prefixes."""
        if not self.salts_cache or not self.key:
            return asked
        text = f"{len(self.key)}:{self.key}{asked}"
        return blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=_PURPOSE).hexdigest()


NOBODY = Caller()

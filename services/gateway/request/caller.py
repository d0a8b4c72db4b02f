"""Whose a request is, and what follows from that. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

from services.shared.limits import PRIORITY_RANGE

_DIGEST_BYTES = 16
_PURPOSE = b"rootstock-salt"  # 16 bytes at most
_TENANT = b"rootstock-share"


@dataclass(frozen=True, slots=True)
class Caller:
    """key: name of the API key, "" where nobody has one. priority: of what asks for none, and the most urgent that may be asked
    for; None leaves it to the request. weight: of the key's share where requests wait. low_first: lower ones are more urgent.
    salts_cache: cached prefixes are the key's own. background: its requests wait behind all others."""

    key: str = ""
    priority: int | None = None
    low_first: bool = False
    salts_cache: bool = False
    weight: float = 1.0
    background: bool = False
    models: frozenset[str] | None = None  # names of the models that the key may use; None: every model

    @property
    def tenant(self) -> bytes:
        """What workers know the key by; empty where nobody has one."""
        return blake2b(self.key.encode(), digest_size=_DIGEST_BYTES, person=_TENANT).digest() if self.key else b""

    def in_background(self, low_first: bool) -> Caller:
        """The same, for what nobody waits for: of the least urgent priority, whatever is asked."""
        least = PRIORITY_RANGE[1] if low_first else PRIORITY_RANGE[0]
        return replace(self, priority=least, low_first=low_first, background=True)

    def may_use(self, model: str) -> bool:
        """Whether the key may use the model of this name."""
        return self.models is None or model in self.models

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

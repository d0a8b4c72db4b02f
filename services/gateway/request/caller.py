"""The caller of a request: its API key, and the priority, cache salt and models that follow from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

from services.shared.limits import PRIORITY_RANGE

_DIGEST_BYTES = 16
_PURPOSE = b"rootstock-salt"  # 16 bytes at most
_TENANT = b"rootstock-share"


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights and the share of the API key that a request came with."""

    key: str = ""  # name of the API key; "" without keys
    priority: int | None = None  # default and most urgent priority, or None for any priority
    low_first: bool = False  # lower priorities are more urgent
    salts_cache: bool = False  # no other key shares its cached prefixes
    weight: float = 1.0  # share of the key while requests wait, relative to other keys
    background: bool = False  # requests wait until no client's request waits
    models: frozenset[str] | None = None  # names of the models that the key may use, or None for every model

    @property
    def tenant(self) -> bytes:
        """Hash of the key's name, for workers; empty without keys."""
        return blake2b(self.key.encode(), digest_size=_DIGEST_BYTES, person=_TENANT).digest() if self.key else b""

    def in_background(self, low_first: bool) -> Caller:
        """Returns the caller of a background request, which always has the least urgent priority."""
        least = PRIORITY_RANGE[1] if low_first else PRIORITY_RANGE[0]
        return replace(self, priority=least, low_first=low_first, background=True)

    def may_use(self, model: str) -> bool:
        """Whether the key may use the model of this name."""
        return self.models is None or model in self.models

    def priority_of(self, asked: int | None) -> int:
        """Returns the priority of a request, within the key's limit. `asked` is the client's, or None."""
        if asked is None or self.priority is None:
            return (self.priority or 0) if asked is None else asked
        return max(asked, self.priority) if self.low_first else min(asked, self.priority)

    def cache_salt_of(self, asked: str) -> str:
        """Returns the salt for workers and the prefix index. Requests with equal salts share cached prefixes."""
        if not self.salts_cache or not self.key:
            return asked
        text = f"{len(self.key)}:{self.key}{asked}"
        return blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=_PURPOSE).hexdigest()


NOBODY = Caller()

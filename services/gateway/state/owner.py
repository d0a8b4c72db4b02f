"""Whose records are whose."""

from __future__ import annotations

from hashlib import blake2b


def owner_of(key: str) -> str:
    """Of an API key's name, "" where there are none: no key's records can be named by another one's."""
    return blake2b(key.encode(), digest_size=16, person=b"rootstock-state").hexdigest()

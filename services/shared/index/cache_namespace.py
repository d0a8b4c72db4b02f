"""What a cached prefix belongs to, besides its tokens. Pure: the scheduler core uses it too."""

from __future__ import annotations


def cache_namespace(lora: str, salt: str) -> str:
    """Requests share KV only within one adapter and one salt. Unambiguous whatever the parts contain."""
    return f"{len(lora)}:{lora}{salt}" if lora or salt else ""


def salt_of(namespace: str) -> str:
    """The salt that cache_namespace() was given."""
    length, _, rest = namespace.partition(":")
    return rest[int(length) :] if namespace else ""

"""The namespace of a cached prefix: requests share KV only within one adapter and one cache salt.

Standard library only: the scheduler core uses it too.
"""

from __future__ import annotations


def cache_namespace(lora: str, salt: str) -> str:
    """Joins an adapter and a salt. Different pairs give different namespaces."""
    return f"{len(lora)}:{lora}{salt}" if lora or salt else ""


def salt_of(namespace: str) -> str:
    """Returns the salt of a namespace."""
    length, _, rest = namespace.partition(":")
    return rest[int(length) :] if namespace else ""

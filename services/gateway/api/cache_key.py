"""Who shares cached prefixes: vLLM's cache_salt and SGLang's extra_key as the one salt that workers know. Pure."""

from __future__ import annotations

from hashlib import blake2b

from services.shared.index.cache_namespace import cache_namespace

DIGEST_BYTES = 16


def cache_key(cache_salt: str | None, extra_key: str | None) -> str:
    """One alone is itself, whatever its name and the endpoint; both together are a namespace of their own."""
    if not cache_salt or not extra_key:
        return cache_salt or extra_key or ""
    return blake2b(cache_namespace(cache_salt, extra_key).encode(), digest_size=DIGEST_BYTES).hexdigest()

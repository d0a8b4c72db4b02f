"""Reasoning in the form that clients carry from one response to the next without reading it. It is no secret: the same client may
have the reasoning itself."""

from __future__ import annotations

import base64
from hashlib import blake2b

_MARK = "rr1."
_CHECK_BYTES = 8


def sealed(text: str) -> str:
    content = text.encode()
    return _MARK + base64.urlsafe_b64encode(_check(content) + content).decode()


def opened(given: str) -> str | None:
    """None for what sealed() has not made."""
    if not given.startswith(_MARK):
        return None
    try:
        found = base64.urlsafe_b64decode(given.removeprefix(_MARK))
        content = found[_CHECK_BYTES:]
        return content.decode() if found[:_CHECK_BYTES] == _check(content) else None
    except ValueError:  # no base64, no ASCII even, or no UTF-8 within
        return None


def _check(content: bytes) -> bytes:
    return blake2b(content, digest_size=_CHECK_BYTES).digest()

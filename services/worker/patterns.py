"""Stop patterns: RE2, so that time is linear in the text whatever the pattern, with a cap on memory."""

from __future__ import annotations

from typing import Any

import re2  # type: ignore[import-untyped]

PATTERN_MEMORY_BYTES = 8 << 20  # of one compiled pattern


class InvalidPattern(ValueError):
    """The message is RE2's reason."""


def compile_pattern(pattern: str) -> Any:
    """A compiled pattern with RE2's `search`. Raises InvalidPattern."""
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        raise InvalidPattern(reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)) from None

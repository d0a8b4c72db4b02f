"""Stop patterns: RE2, so that time is linear in the text whatever the pattern; and in its program's size, so that is capped."""

from __future__ import annotations

from typing import Any

import re2

PATTERN_MEMORY_BYTES = 8 << 20  # of one compiled pattern
MAX_PROGRAM = 250  # RE2's instructions; a first search in 1,024 characters then takes up to 4 ms, later ones up to 0.4 ms


class InvalidPattern(ValueError):
    """The message is RE2's reason, or says that the pattern is too complex."""


def compile_pattern(pattern: str) -> Any:
    """A compiled pattern with RE2's `search`. Raises InvalidPattern."""
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        raise InvalidPattern(reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)) from None
    sizes = (compiled.programsize, compiled.reverseprogramsize)  # negative where RE2 has given up on one of them
    if not all(0 <= size <= MAX_PROGRAM for size in sizes):
        raise InvalidPattern(f"too complex: its program has {max(sizes)} instructions, and {MAX_PROGRAM} are allowed")
    return compiled

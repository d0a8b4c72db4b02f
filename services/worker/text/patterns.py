"""Compiles stop patterns with RE2.

RE2's search time is linear in the length of the text and in the size of the compiled program, which is limited.
"""

from __future__ import annotations

from typing import Any

import re2

PATTERN_MEMORY_BYTES = 8 << 20  # memory that one compiled pattern may use
# Largest number of RE2 instructions of a pattern. With this number, the first search in 1,024 characters takes up to 4 ms, and
# each later search takes up to 0.4 ms.
MAX_PROGRAM = 250


class InvalidPattern(ValueError):
    """RE2 cannot compile the pattern, or its program is larger than MAX_PROGRAM. The message has the reason."""


def compile_pattern(pattern: str) -> Any:
    """Returns the compiled pattern, an object with RE2's method `search`. Raises InvalidPattern."""
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        raise InvalidPattern(reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)) from None
    sizes = (compiled.programsize, compiled.reverseprogramsize)  # a size is negative if RE2 could not build the program
    if not all(0 <= size <= MAX_PROGRAM for size in sizes):
        raise InvalidPattern(f"it is too complex: its program has {max(sizes)} instructions; the limit is {MAX_PROGRAM}")
    return compiled

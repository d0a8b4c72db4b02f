"""Why a grammar is not served: one line that a client may read."""

from __future__ import annotations

MAX_REASON_CHARS = 400


class GrammarRefused(ValueError):
    """The grammar is malformed, unsupported or too expensive. The message is one line and holds no stack trace."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str) -> str:
    """Text without line breaks, cut to what fits an error message."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_REASON_CHARS else flat[: MAX_REASON_CHARS - 1] + "…"

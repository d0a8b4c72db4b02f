"""Why a grammar is not served: one line that a client may read."""

from __future__ import annotations

MAX_REASON_CHARS = 400


class GrammarRefused(ValueError):
    """The grammar is malformed, unsupported or too expensive. The message is one line and holds no stack trace.

    path: JSON pointer of the schema's keyword that is refused; empty if the reason lies elsewhere. why: the reason without it.
    part: index of the part of a structural tag that is refused; None for the whole grammar.
    """

    def __init__(self, reason: str, path: str = "", why: str = "", part: int | None = None) -> None:
        super().__init__(one_line(reason))
        self.path = path
        self.why = why or reason
        self.part = part


def one_line(text: str) -> str:
    """Text without line breaks, cut to what fits an error message."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_REASON_CHARS else flat[: MAX_REASON_CHARS - 1] + "…"

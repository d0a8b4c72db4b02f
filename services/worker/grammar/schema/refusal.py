"""The exception for a refused grammar, with a reason of one line for the client."""

from __future__ import annotations

MAX_REASON_CHARS = 400  # longer reasons are cut


class GrammarRefused(ValueError):
    """The grammar is malformed, unsupported or too expensive. The message is one line without a stack trace."""

    def __init__(self, reason: str, path: str = "", why: str = "", part: int | None = None) -> None:
        """Builds the message.

        Args:
            reason: the message; line breaks are removed, and it is cut at MAX_REASON_CHARS.
            path: JSON pointer of the schema keyword that is refused; "" if the refusal concerns no single keyword.
            why: the reason without the pointer; "" if it equals `reason`.
            part: index of the refused part of a structural tag; None if the whole grammar is refused.
        """
        super().__init__(one_line(reason))
        self.path = path
        self.why = why or reason
        self.part = part


def one_line(text: str) -> str:
    """Returns the text as one line of at most MAX_REASON_CHARS characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_REASON_CHARS else flat[: MAX_REASON_CHARS - 1] + "…"

"""The tokens of a sequence behind its history, as they were sampled, corrected by what later comes as input."""

from __future__ import annotations

from collections.abc import Sequence


class FollowedTokens:
    """Input of the model is the truth: a sampled token whose position is computed with another one never was, nor what
    followed it. first: position of the first token behind the history."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._tokens: list[int] = []

    def add(self, token: int) -> None:
        """The next token, sampled."""
        self._tokens.append(token)

    def follow(self, start: int, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Takes note of input at positions from start on. Returns the tokens that were wrong or stale, in order, and those
        that have come in their place or behind them."""
        skipped = max(0, self._first - start)
        begin, end = max(0, start - self._first), start + len(ids) - self._first
        if end < 0:
            return [], []
        given = list(ids[skipped:])
        same = begin
        while same < min(end, len(self._tokens)) and self._tokens[same] == given[same - begin]:
            same += 1
        removed, added = self._tokens[same:], given[same - begin :]
        self._tokens[same:] = added
        return removed, added

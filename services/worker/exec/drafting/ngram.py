"""Guesses by what followed the last few tokens before: prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding).

Good where an answer repeats its prompt or itself: quotes, code that is edited, JSON, counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.core.contracts.plan import SlotParams

LONGEST, SHORTEST = 4, 2  # tokens that are looked up, the longest that stand somewhere
MOST_TOKENS = 8192  # last ones of a history in which they are sought


@dataclass(slots=True)
class _Text:
    """tokens: those from position `first` on. after: where, in tokens, what once followed these begins."""

    first: int
    tokens: list[int]
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0  # tokens whose places `after` knows

    def index(self) -> None:
        for place in range(max(self.indexed, SHORTEST), len(self.tokens)):
            for size in range(SHORTEST, min(LONGEST, place) + 1):
                self.after[tuple(self.tokens[place - size : place])] = place
        self.indexed = len(self.tokens)

    def find(self, most: int) -> list[int]:
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            tail = self.tokens[-size:]
            place = self.after.get(tuple(tail))
            if place is not None and self.tokens[place - size : place] == tail:  # it may have been another text then
                return self.tokens[place : place + most]
        return []


class NgramDrafter:
    """A Drafter."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def admit(self, slot: SlotParams) -> None:
        first = max(0, len(slot.history) - MOST_TOKENS)
        self._texts[slot.slot] = _Text(first, slot.history[first:].tolist())

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        text = self._texts[slot]
        skipped = max(0, text.first - start)
        begin, given = start + skipped - text.first, list(ids[skipped:])
        if text.tokens[begin : begin + len(given)] == given:
            return  # of a prompt that is cut, the rest is known too
        text.tokens[begin:] = given
        text.indexed = min(text.indexed, begin)

    def propose(self, slot: int, most: int) -> list[int]:
        text = self._texts[slot]
        text.index()
        return text.find(most)

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        self._texts[slot].tokens.extend(tokens)

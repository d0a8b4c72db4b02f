"""Guesses by what followed the last few tokens before: prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding).

Good where an answer repeats its prompt or itself: quotes, code that is edited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.worker.core.contracts.plan import SlotParams
from services.worker.exec.contracts.drafter import Computed

LONGEST, SHORTEST = 4, 2  # tokens that are looked up, the longest that stand somewhere
MOST_TOKENS = 4096  # last ones in which they are sought, up to twice as many
MOST_INDEXES = 16  # texts whose places are known at a time: each takes up to five megabytes


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

    def forget(self) -> None:
        self.after.clear()
        self.indexed = 0

    def shorten(self) -> None:
        if len(self.tokens) > 2 * MOST_TOKENS:
            cut = len(self.tokens) - MOST_TOKENS
            self.first += cut
            del self.tokens[:cut]
            self.forget()

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
        self._indexes: OrderedDict[int, None] = OrderedDict()  # slots whose texts have one, the last asked for at the end

    def begin(self) -> None:
        """Nothing is kept of a token."""

    def admit(self, slot: SlotParams) -> None:
        first = max(0, len(slot.history) - MOST_TOKENS)
        self._texts[slot.slot] = _Text(first, slot.history[first:].tolist())

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        text = self._texts[slot]
        skipped = max(0, text.first - start)
        begin, given = start + skipped - text.first, list(ids[skipped:])
        if text.tokens[begin:] != given:
            text.tokens[begin:] = given
            text.indexed = min(text.indexed, begin)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        return {slot: self._guess(slot, most) for slot, most in wanted.items()}

    def _guess(self, slot: int, most: int) -> list[int]:
        text = self._texts[slot]
        self._indexes[slot] = None
        self._indexes.move_to_end(slot)
        if len(self._indexes) > MOST_INDEXES:
            self._texts[self._indexes.popitem(last=False)[0]].forget()
        text.index()
        return text.find(most)

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        text = self._texts[slot]
        text.tokens.extend(tokens)
        text.shorten()

    def computed(self, rows: Sequence[Computed]) -> None:
        """As begin()."""

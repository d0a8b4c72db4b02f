"""Guesses by what followed the last few tokens before: prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding).

Good where an answer repeats its prompt or itself, or what its client has predicted: quotes, code that is edited. Where these say
nothing, texts that an operator has given may.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import ne

from services.worker.core.contracts.plan import SlotParams
from services.worker.exec.contracts.drafter import Computed
from services.worker.exec.drafting.ngram_index import LONGEST, SHORTEST, NgramIndex
from services.worker.exec.drafting.prediction import Prediction

MOST_TOKENS = 4096  # last ones in which they are sought, up to twice as many
MOST_INDEXES = 16  # texts whose places are known at a time: each takes up to five megabytes
SHORTEST_OF_CORPUS = 3  # tokens: fewer stand in a large text by chance


@dataclass(slots=True)
class _Text:
    """tokens: those from position `first` on. after: where, in tokens, what once followed these begins. prediction: None where
    nobody has said one."""

    first: int
    tokens: list[int]
    prediction: Prediction | None = None
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0  # tokens whose places `after` knows

    @property
    def tail(self) -> list[int]:
        """The last tokens."""
        return self.tokens[-LONGEST:]

    def index(self) -> None:
        for place in range(max(self.indexed, SHORTEST), len(self.tokens)):
            for size in range(SHORTEST, min(LONGEST, place) + 1):
                self.after[tuple(self.tokens[place - size : place])] = place
        self.indexed = len(self.tokens)

    def forget(self) -> None:
        self.after.clear()
        self.indexed = 0
        if self.prediction is not None:
            self.prediction.forget()

    def shorten(self) -> None:
        if len(self.tokens) > 2 * MOST_TOKENS:
            cut = len(self.tokens) - MOST_TOKENS
            self.first += cut
            del self.tokens[:cut]
            self.after.clear()
            self.indexed = 0

    def find(self) -> tuple[int, int]:
        """How many of its last tokens have stood in it before, 0 for none, and the place behind them."""
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            tail = self.tokens[-size:]
            place = self.after.get(tuple(tail))
            if place is not None and self.tokens[place - size : place] == tail:  # it may have been another text then
                return size, place
        return 0, 0


class NgramDrafter:
    """A Drafter. corpus: texts of nobody's request, None for none."""

    def __init__(self, corpus: NgramIndex | None = None) -> None:
        self._corpus = corpus
        self._texts: dict[int, _Text] = {}
        self._indexes: OrderedDict[int, None] = OrderedDict()  # slots whose texts have one, the last asked for at the end
        self._predicted: set[int] = set()  # slots whose last guesses are of their predictions

    def begin(self) -> None:
        """Nothing is kept of a token."""

    def admit(self, slot: SlotParams) -> None:
        first = max(0, len(slot.history) - MOST_TOKENS)
        text = self._texts[slot.slot] = _Text(first, slot.history[first:].tolist())
        if len(slot.prediction):
            text.prediction = Prediction(slot.prediction, slot.num_prompt_tokens)
            text.prediction.follow(slot.history[slot.num_prompt_tokens :].tolist())

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        text = self._texts[slot]
        skipped = max(0, text.first - start)
        begin, given = start + skipped - text.first, list(ids[skipped:])
        if text.prediction is not None:
            text.prediction.know(start, ids, any(map(ne, text.tokens[begin:], given)))
        if text.tokens[begin:] != given:
            text.tokens[begin:] = given
            text.indexed = min(text.indexed, begin)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self._predicted.clear()
        return {slot: self._guess(slot, most) for slot, most in wanted.items()}

    def predicted(self, slot: int) -> bool:
        return slot in self._predicted

    def _guess(self, slot: int, most: int) -> list[int]:
        text = self._texts[slot]
        prediction = text.prediction
        if prediction is not None and (guess := prediction.ahead(most)):
            self._predicted.add(slot)
            return guess
        self._index(slot, text)
        size, place = text.find()
        if prediction is not None:
            found, there = prediction.find(text.tail)
            if found and found >= size:
                prediction.go_on(there)
                self._predicted.add(slot)
                return prediction.ahead(most)
        return text.tokens[place : place + most] if size else self._of_corpus(text.tail, most)

    def _index(self, slot: int, text: _Text) -> None:
        self._indexes[slot] = None
        self._indexes.move_to_end(slot)
        if len(self._indexes) > MOST_INDEXES:
            self._texts[self._indexes.popitem(last=False)[0]].forget()
        text.index()

    def _of_corpus(self, tail: Sequence[int], most: int) -> list[int]:
        if self._corpus is None:
            return []
        size, places = self._corpus.places(tail)
        return self._corpus.follow(self._corpus.likeliest(places), most) if size >= SHORTEST_OF_CORPUS else []

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        text = self._texts[slot]
        text.tokens.extend(tokens)
        text.shorten()
        if text.prediction is not None:
            text.prediction.follow(tokens)

    def computed(self, rows: Sequence[Computed]) -> None:
        """As begin()."""

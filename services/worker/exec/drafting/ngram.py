"""Draft tokens from n-grams of earlier text: prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding).

The drafter finds the last few tokens in earlier text, and proposes the tokens that followed there. These are often accepted if
the output repeats parts of its prompt, of itself or of the client's prediction, as in quotes and edited code. If there is no
match in these texts, the drafter searches the operator's corpus.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import ne

from rootstock_llm.services.worker.core.contracts.plan import SlotParams
from rootstock_llm.services.worker.exec.contracts.drafter import Computed
from rootstock_llm.services.worker.exec.drafting.ngram_index import LONGEST, SHORTEST, NgramIndex
from rootstock_llm.services.worker.exec.drafting.prediction import Prediction

MOST_TOKENS = 4096  # a text of more than twice this number of tokens is cut to its last MOST_TOKENS tokens
MOST_INDEXES = 16  # largest number of texts with an index; an index takes up to 5 MB
SHORTEST_OF_CORPUS = 3  # smallest number of matching tokens in the corpus; a large text has shorter matches by chance


@dataclass(slots=True)
class _SlotHistory:
    """The text of a slot's request: its last tokens and their index."""

    first: int  # position in the slot of tokens[0]
    tokens: list[int]  # last tokens of the text
    prediction: Prediction | None = None  # the client's prediction, or None without one
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram to the index in `tokens` after its last occurrence
    indexed: int = 0  # `after` covers the first `indexed` tokens

    @property
    def tail(self) -> list[int]:
        """The last tokens, at most LONGEST."""
        return self.tokens[-LONGEST:]

    def index(self) -> None:
        for end in range(max(self.indexed, SHORTEST), len(self.tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.after[tuple(self.tokens[end - size : end])] = end
        self.indexed = len(self.tokens)

    def drop_index(self) -> None:
        self.after.clear()
        self.indexed = 0
        if self.prediction is not None:
            self.prediction.drop_index()

    def shorten(self) -> None:
        if len(self.tokens) > 2 * MOST_TOKENS:
            cut = len(self.tokens) - MOST_TOKENS
            self.first += cut
            del self.tokens[:cut]
            self.after.clear()
            self.indexed = 0

    def find(self) -> tuple[int, int]:
        """Returns the number of last tokens that also occur earlier in the text, and the index after that occurrence.

        Returns:
            (0, 0) if fewer than SHORTEST tokens match.
        """
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            tail = self.tokens[-size:]
            end = self.after.get(tuple(tail))
            if (
                end is not None and self.tokens[end - size : end] == tail
            ):  # set_tokens() does not remove entries of replaced tokens
                return size, end
        return 0, 0


class NgramDrafter:
    """A Drafter that looks up n-grams in the request's texts, its prediction and an optional corpus of the operator."""

    def __init__(self, corpus: NgramIndex | None = None) -> None:
        self._corpus = corpus
        self._texts: dict[int, _SlotHistory] = {}
        self._indexes: OrderedDict[int, None] = OrderedDict()  # slots whose texts are indexed, least recently used first
        self._predicted: set[int] = set()  # slots whose last draft tokens come from their predictions

    def begin(self) -> None:
        """Does nothing, because n-grams need no KV."""

    def admit(self, slot: SlotParams) -> None:
        first = max(0, len(slot.history) - MOST_TOKENS)
        text = self._texts[slot.slot] = _SlotHistory(first, slot.history[first:].tolist())
        if len(slot.prediction):
            text.prediction = Prediction(slot.prediction, slot.num_prompt_tokens)
            text.prediction.append(slot.history[slot.num_prompt_tokens :].tolist())

    def set_tokens(self, slot: int, start: int, ids: Sequence[int]) -> None:
        text = self._texts[slot]
        skipped = max(0, text.first - start)
        begin, new = start + skipped - text.first, list(ids[skipped:])
        if text.prediction is not None:
            text.prediction.set_tokens(start, ids, any(map(ne, text.tokens[begin:], new)))
        if text.tokens[begin:] != new:
            text.tokens[begin:] = new
            text.indexed = min(text.indexed, begin)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self._predicted.clear()
        return {slot: self._proposed(slot, most) for slot, most in wanted.items()}

    def used_prediction(self, slot: int) -> bool:
        return slot in self._predicted

    def _proposed(self, slot: int, most: int) -> list[int]:
        text = self._texts[slot]
        prediction = text.prediction
        if prediction is not None and (predicted := prediction.next_tokens(most)):
            self._predicted.add(slot)
            return predicted
        self._index(slot, text)
        size, end = text.find()
        if prediction is not None:
            found, index = prediction.find(text.tail)
            if found and found >= size:
                prediction.follow_from(index)
                self._predicted.add(slot)
                return prediction.next_tokens(most)
        return text.tokens[end : end + most] if size else self._from_corpus(text.tail, most)

    def _index(self, slot: int, text: _SlotHistory) -> None:
        self._indexes[slot] = None
        self._indexes.move_to_end(slot)
        if len(self._indexes) > MOST_INDEXES:
            self._texts[self._indexes.popitem(last=False)[0]].drop_index()
        text.index()

    def _from_corpus(self, tail: Sequence[int], most: int) -> list[int]:
        if self._corpus is None:
            return []
        size, positions = self._corpus.find(tail)
        return self._corpus.tokens_from(self._corpus.likeliest(positions), most) if size >= SHORTEST_OF_CORPUS else []

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        text = self._texts[slot]
        text.tokens.extend(tokens)
        text.shorten()
        if text.prediction is not None:
            text.prediction.append(tokens)

    def computed(self, rows: Sequence[Computed]) -> None:
        """Does nothing, because n-grams need no KV."""

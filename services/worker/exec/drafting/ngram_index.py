"""An index of a constant text that finds the last few tokens of another text: a suffix array of limited depth.

A place is an index in the text. The places are sorted by the tokens before them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import I32
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS

LONGEST, SHORTEST = 4, 2  # tokens of a match; the longest match is used
SAMPLE = 256  # largest number of places that likeliest() compares


class NgramIndex:
    """An index of texts. It takes 4 bytes per token in addition to the tokens, and 40 while it is built."""

    def __init__(self, tokens: I32) -> None:
        """Builds the index.

        Args:
            tokens: int32[n], texts that are separated by BETWEEN_TEXTS. The index keeps a reference to it.
        """
        self._tokens = tokens
        padded = np.concatenate([np.full(LONGEST, BETWEEN_TEXTS, dtype=np.int32), tokens])
        before = [padded[LONGEST - back : len(padded) - back] for back in range(LONGEST, 0, -1)]
        kept = (tokens != BETWEEN_TEXTS) & np.all([part != BETWEEN_TEXTS for part in before[-SHORTEST:]], axis=0)
        order = np.lexsort(
            [part[kept] for part in before]
        )  # sorted by the token before the place, then by the token before that, and so on; equal places by index
        self._places: I32 = np.flatnonzero(kept)[order].astype(np.int32)

    def places(self, tail: Sequence[int]) -> tuple[int, I32]:
        """Finds the longest end of `tail` that occurs in the text, of at most LONGEST tokens.

        Returns:
            The number of tokens of that end and the places after its occurrences. 0 and no places if fewer than SHORTEST tokens
            match.
        """
        begin, end, found = 0, len(self._places), 0
        for size in range(SHORTEST, min(len(tail), LONGEST) + 1):
            wanted = list(tail[: -size - 1 : -1])

            def before(place: np.int32, size: int = size) -> list[int]:
                reverse: list[int] = self._tokens[max(0, int(place) - size) : place][::-1].tolist()
                return reverse

            low = bisect_left(self._places, wanted, begin, end, key=before)
            high = bisect_right(self._places, wanted, low, end, key=before)
            if low == high:
                break
            begin, end, found = low, high, size
        return found, self._places[begin:end] if found else self._places[:0]

    def follow(self, place: int, most: int) -> list[int]:
        """Returns up to `most` tokens from a place on, not beyond the end of its text."""
        tokens: list[int] = self._tokens[place : place + most].tolist()
        return tokens[: tokens.index(BETWEEN_TEXTS)] if BETWEEN_TEXTS in tokens else tokens

    def likeliest(self, places: I32) -> int:
        """Returns one of the places with the most frequent next token. It compares at most SAMPLE of them."""
        some = places[:: -(-len(places) // SAMPLE)]
        following = self._tokens[some]
        tokens, counts = np.unique(following, return_counts=True)
        return int(some[np.flatnonzero(following == tokens[counts.argmax()])[-1]])

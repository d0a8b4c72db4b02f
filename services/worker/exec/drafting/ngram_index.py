"""Where the last few tokens of a text stand in another one, which does not change: places, sorted by what stands before them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from services.worker.core.contracts.plan import I32
from services.worker.exec.contracts.drafter import BETWEEN_TEXTS

LONGEST, SHORTEST = 4, 2  # tokens that are looked up, the longest that stand somewhere
SAMPLE = 256  # places that are looked at, of what stands in more


class NgramIndex:
    """tokens: int32[n], texts with BETWEEN_TEXTS among them, which are kept. Takes 4 bytes more for each token, and 40 while it
    is made."""

    def __init__(self, tokens: I32) -> None:
        self._tokens = tokens
        padded = np.concatenate([np.full(LONGEST, BETWEEN_TEXTS, dtype=np.int32), tokens])
        before = [padded[LONGEST - back : len(padded) - back] for back in range(LONGEST, 0, -1)]
        kept = (tokens != BETWEEN_TEXTS) & np.all([part != BETWEEN_TEXTS for part in before[-SHORTEST:]], axis=0)
        order = np.lexsort([part[kept] for part in before])  # by the nearest token first; of equals by place
        self._places: I32 = np.flatnonzero(kept)[order].astype(np.int32)

    def places(self, tail: Sequence[int]) -> tuple[int, I32]:
        """Of the longest end of the tail that stands somewhere, up to LONGEST tokens, how many it has, and the places behind it;
        0 and none where SHORTEST of it stand nowhere."""
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
        """Tokens from a place on, to the end of its text."""
        tokens: list[int] = self._tokens[place : place + most].tolist()
        return tokens[: tokens.index(BETWEEN_TEXTS)] if BETWEEN_TEXTS in tokens else tokens

    def likeliest(self, places: I32) -> int:
        """Of some places, one behind which stands what stands behind most of them."""
        some = places[:: -(-len(places) // SAMPLE)]
        following = self._tokens[some]
        tokens, counts = np.unique(following, return_counts=True)
        return int(some[np.flatnonzero(following == tokens[counts.argmax()])[-1]])

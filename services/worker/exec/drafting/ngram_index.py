"""An index of a constant text that finds where the last few tokens of another text occur: a suffix array of limited depth.

A position is an index into the text. The positions are sorted by the tokens before them, read from right to left.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import I32
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS

LONGEST, SHORTEST = 4, 2  # largest and smallest number of matching tokens
SAMPLE = 256  # largest number of positions that likeliest() compares


class NgramIndex:
    """An index of texts. In addition to the tokens, it takes 4 bytes per token, and 40 bytes per token while it is built."""

    def __init__(self, tokens: I32) -> None:
        """Builds the index.

        Args:
            tokens: int32[n], texts that are separated by BETWEEN_TEXTS. The index reads the array later, so the array must not
            change.
        """
        self._tokens = tokens
        padded = np.concatenate([np.full(LONGEST, BETWEEN_TEXTS, dtype=np.int32), tokens])
        before = [padded[LONGEST - back : len(padded) - back] for back in range(LONGEST, 0, -1)]
        usable = (tokens != BETWEEN_TEXTS) & np.all([part != BETWEEN_TEXTS for part in before[-SHORTEST:]], axis=0)
        # Sorts by the token before the position, then by the token before that, and so on, and finally by position.
        order = np.lexsort([part[usable] for part in before])
        self._positions: I32 = np.flatnonzero(usable)[order].astype(np.int32)

    def find(self, tail: Sequence[int]) -> tuple[int, I32]:
        """Finds the occurrences of the longest suffix of `tail` that is in the text and has at most LONGEST tokens.

        Returns:
            The length of the suffix, and the positions after its occurrences. (0, no positions) if the suffix has fewer than
            SHORTEST tokens.
        """
        begin, end, found = 0, len(self._positions), 0
        for size in range(SHORTEST, min(len(tail), LONGEST) + 1):
            wanted = list(tail[: -size - 1 : -1])

            def before(position: np.int32, size: int = size) -> list[int]:
                reverse: list[int] = self._tokens[max(0, int(position) - size) : position][::-1].tolist()
                return reverse

            low = bisect_left(self._positions, wanted, begin, end, key=before)
            high = bisect_right(self._positions, wanted, low, end, key=before)
            if low == high:
                break
            begin, end, found = low, high, size
        return found, self._positions[begin:end] if found else self._positions[:0]

    def tokens_from(self, position: int, most: int) -> list[int]:
        """Returns up to `most` tokens from a position on. Stops at the end of the text in which the position is."""
        tokens: list[int] = self._tokens[position : position + most].tolist()
        return tokens[: tokens.index(BETWEEN_TEXTS)] if BETWEEN_TEXTS in tokens else tokens

    def likeliest(self, positions: I32) -> int:
        """Returns a position whose token is the most frequent token at the given positions. Reads at most SAMPLE positions."""
        some = positions[:: -(-len(positions) // SAMPLE)]
        following = self._tokens[some]
        tokens, counts = np.unique(following, return_counts=True)
        return int(some[np.flatnonzero(following == tokens[counts.argmax()])[-1]])

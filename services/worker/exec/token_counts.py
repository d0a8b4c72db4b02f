"""How often each token has occurred, kept sparse: a few hundred numbers per request instead of one per vocabulary entry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import I32


class TokenCounts:
    """Distinct tokens and their counts, in parallel arrays that grow. Tokens are inside the vocabulary."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        self._size = len(ids)
        self._ids = np.concatenate((ids, np.zeros(16, dtype=np.int64)))
        self._counts = np.concatenate((counts.astype(np.int32), np.zeros(16, dtype=np.int32)))
        self._place = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> I32:
        """Each at least 1."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        place = self._place.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        if self._size == len(self._ids):
            self._ids, self._counts = np.resize(self._ids, 2 * self._size), np.resize(self._counts, 2 * self._size)
        self._place[token] = self._size
        self._ids[self._size], self._counts[self._size] = token, 1
        self._size += 1

    def remove(self, token: int) -> None:
        """Takes back one add() of a token that occurs."""
        place = self._place[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        self._size -= 1
        last = int(self._ids[self._size])
        self._ids[place], self._counts[place] = last, self._counts[self._size]
        self._place[last] = place
        del self._place[token]

"""Computes the DRY penalties of a sequence ("Don't Repeat Yourself", p-e-w, text-generation-webui #5677).

If the last n tokens of a sequence also occur earlier in it, the token after the earlier occurrence would continue the repetition.
The logit of this token gets a penalty that grows with n. A breaker is a token that ends repetitions.
"""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import I32, DryParams

MAX_PENALTY = 1e30  # larger than any logit; finite, so that a row always has a token with a finite logit


def suffix_lengths(tokens: list[int], breakers: frozenset[int]) -> I32:
    """Returns int32[n]: for each index j, the length of the longest common suffix of tokens[:j] and all tokens.

    No suffix contains a breaker. The lengths are the Z function (Gusfield 1997) of the reversed sequence, computed in O(n).
    """
    size = len(tokens)
    back = tokens[::-1]
    longest = next((i for i, token in enumerate(back) if token in breakers), size)
    lengths = [0] * size
    left = right = 0
    for i in range(1, size):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < size and back[length] == back[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    assert all(length <= size - i for i, length in enumerate(lengths)), "a repetition is not longer than the tokens before it"
    before = [0, *lengths[:0:-1]]  # before[j] is lengths[size - j], and before[0] is 0
    assert right <= size and 0 <= longest <= size, "a repetition is inside the sequence"
    return np.minimum(np.array(before[:size], dtype=np.int32), longest)


class Repeats:
    """The past tokens of one request, and for each index j the length of the longest common suffix of tokens[:j] and all tokens.

    No suffix contains a breaker. Adding a token takes O(window). All tokens must be inside the vocabulary.
    """

    def __init__(self, params: DryParams, tokens: NDArray[np.int64]) -> None:
        self._params = params
        self._breakers = frozenset(params.breakers)
        self._breaker_ids = np.array(sorted(self._breakers), dtype=np.int64)
        window = tokens[-params.window :] if params.window else tokens
        self._set_tokens(window.tolist())

    def _set_tokens(self, tokens: list[int]) -> None:
        self._size = len(tokens)
        zeros = np.zeros(self._size + 256, dtype=np.int32)
        self._tokens, self._lengths = zeros, zeros.copy()
        self._tokens[: self._size] = tokens
        self._lengths[: self._size] = suffix_lengths(tokens, self._breakers)

    @property
    def _first(self) -> int:
        """Index of the first token in the window."""
        return max(0, self._size - self._params.window) if self._params.window else 0

    def add(self, token: int) -> None:
        if self._size == len(self._tokens):
            self._tokens, self._lengths = (np.resize(array, 2 * self._size) for array in (self._tokens, self._lengths))
        first, size = self._first, self._size
        assert first <= size < len(self._tokens) == len(self._lengths), "the arrays have a free element"
        if token in self._breakers:
            self._lengths[first : size + 1] = 0
        else:
            longer = np.where(self._tokens[first:size] == token, self._lengths[first:size] + 1, 0)
            self._lengths[first + 1 : size + 1] = longer
            self._lengths[first] = 0
        self._tokens[size] = token
        self._size += 1

    def remove_last(self, count: int) -> None:
        assert 0 <= count <= self._size, "at most all tokens are removed"
        self._set_tokens(self._tokens[: self._size - count].tolist())

    def continued(self) -> Repeats:
        """Returns an independent copy, to which draft tokens can be added."""
        other = copy.copy(self)
        other._tokens, other._lengths = self._tokens.copy(), self._lengths.copy()
        return other

    def penalties(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the distinct tokens that would continue a repetition, int64[n], and the penalty to subtract from each logit.

        Breakers are not in the result, because they end a repetition.
        """
        first, params = self._first, self._params
        lengths = np.minimum(self._lengths[first : self._size], np.arange(self._size - first))  # within the window
        indices = np.flatnonzero(lengths >= max(1, params.allowed_length))
        tokens = self._tokens[first : self._size][indices].astype(np.int64)
        penalised = ~np.isin(tokens, self._breaker_ids)
        ids, where = np.unique(tokens[penalised], return_inverse=True)
        assert len(where) == int(penalised.sum()), "each penalised occurrence has an index into ids"
        longest = np.zeros(len(ids), dtype=np.int32)
        np.maximum.at(longest, where, lengths[indices[penalised]].astype(np.int32))
        assert (longest >= max(1, params.allowed_length)).all(), (
            "only repetitions of at least allowed_length tokens are penalised"
        )
        with np.errstate(over="ignore"):
            lost = params.multiplier * np.float64(params.base) ** (longest.astype(np.float64) - params.allowed_length)
        return ids, np.minimum(lost, MAX_PENALTY).astype(np.float32)

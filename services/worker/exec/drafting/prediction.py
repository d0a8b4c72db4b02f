"""The output that a client predicts for its request (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import I32
from rootstock_llm.services.worker.exec.drafting.ngram_index import NgramIndex


class Prediction:
    """The prediction of a slot's request, and the index of the predicted token that would come next in the output.

    The index advances by one per output token, even after the output differs from the prediction. From then on, the index is an
    estimate, which is usually close, because insertions and omissions are short compared with the text. The object belongs to the
    thread that launches steps.
    """

    def __init__(self, tokens: I32, output_at: int) -> None:
        """Assumes that the output begins with the first predicted token.

        Args:
            tokens: int32[n], the prediction.
            output_at: position in the slot of the output's first token.
        """
        self._tokens, self._output_at = tokens, output_at
        self._index: NgramIndex | None = None
        self._next = 0  # index of the next predicted token
        self._matches = True  # whether the output is assumed to continue with this token
        self._num_output = 0  # output tokens so far

    def append(self, tokens: Sequence[int]) -> None:
        """Adds the next tokens of the output."""
        for token in tokens:
            self._matches = self._matches and self._next < len(self._tokens) and int(self._tokens[self._next]) == token
            self._next += 1
        self._num_output += len(tokens)

    def set_tokens(self, start: int, ids: Sequence[int], replaces: bool) -> None:
        """Sets the slot's tokens from position `start` on. The text ends after `ids`.

        Args:
            replaces: whether `ids` differ from earlier tokens at the same positions.
        """
        before, now = self._num_output, max(0, start + len(ids) - self._output_at)
        if not now:
            self._next, self._matches, self._num_output = 0, True, 0
            return
        self._matches = self._matches and not replaces and now >= before
        if now > before:
            self.append(ids[before - now :])
        else:
            self._next, self._num_output = max(0, self._next - (before - now)), now

    def next_tokens(self, most: int) -> list[int]:
        """Returns up to `most` next tokens of the prediction. Empty at the end of the prediction.

        Also empty after the output has differed from the prediction, until follow_from() is called.
        """
        return self._tokens[self._next : self._next + most].tolist() if self._matches else []

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """Finds the last tokens of the output in the prediction.

        Returns:
            The number of matching tokens and the index after them, or (0, 0) without a match. Of several matches, it returns the
            one nearest to the index of the next predicted token.
        """
        if self._index is None:
            self._index = NgramIndex(self._tokens)
        size, positions = self._index.find(tail)
        return (size, int(positions[np.abs(positions - self._next).argmin()])) if size else (0, 0)

    def follow_from(self, index: int) -> None:
        """Assumes that the output continues with the predicted token at the index."""
        self._next, self._matches = index, True

    def drop_index(self) -> None:
        """Frees the n-gram index. The next find() builds it again."""
        self._index = None

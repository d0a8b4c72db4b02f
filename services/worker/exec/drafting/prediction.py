"""The output that a client predicts for its request (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import I32
from rootstock_llm.services.worker.exec.drafting.ngram_index import NgramIndex


class Prediction:
    """The prediction of a slot's request, and the place, which is the index in it that the output has reached.

    While the output equals the prediction, the place is the index of the next token. After a difference, the place still advances
    by one per output token, because insertions and omissions are usually short compared with the text. The object belongs to the
    thread that launches steps.
    """

    def __init__(self, tokens: I32, output_at: int) -> None:
        """Begins at the start of the prediction.

        Args:
            tokens: int32[n].
            output_at: position of the output's first token.
        """
        self._tokens, self._output_at = tokens, output_at
        self._index: NgramIndex | None = None
        self._place, self._along = 0, True  # whether the output follows the prediction at the place
        self._had = 0  # output tokens received so far

    def follow(self, tokens: Sequence[int]) -> None:
        """Adds the next tokens of the output."""
        for token in tokens:
            self._along = self._along and self._place < len(self._tokens) and int(self._tokens[self._place]) == token
            self._place += 1
        self._had += len(tokens)

    def know(self, start: int, ids: Sequence[int], replaces: bool) -> None:
        """Sets the slot's text from position `start` on, which ends after `ids`.

        Args:
            replaces: whether the ids differ from known tokens at these positions.
        """
        had, has = self._had, max(0, start + len(ids) - self._output_at)
        if not has:
            self._place, self._along, self._had = 0, True, 0
            return
        self._along = self._along and not replaces and has >= had
        if has > had:
            self.follow(ids[had - has :])
        else:
            self._place, self._had = max(0, self._place - (had - has)), has

    def ahead(self, most: int) -> list[int]:
        """Returns up to `most` next tokens of the prediction. Empty if the output does not follow it or has reached its end."""
        return self._tokens[self._place : self._place + most].tolist() if self._along else []

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """Finds the last tokens of the output in the prediction.

        Returns:
            The number of matching tokens and the place after them, or (0, 0) without a match. Of several places, it returns the
            one nearest to the output's place.
        """
        if self._index is None:
            self._index = NgramIndex(self._tokens)
        size, places = self._index.places(tail)
        return (size, int(places[np.abs(places - self._place).argmin()])) if size else (0, 0)

    def go_on(self, place: int) -> None:
        """Sets the place, from which the output is assumed to follow the prediction."""
        self._place, self._along = place, True

    def forget(self) -> None:
        """Frees the index, which find() builds again."""
        self._index = None

"""A text that an answer may turn out to be, as its client has said (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.worker.core.contracts.plan import I32
from services.worker.exec.drafting.ngram_index import NgramIndex


class Prediction:
    """One request's, on one slot, and where its output is in it. tokens: int32[n]. output_at: position of the output's first
    token. Written by the thread that launches steps.

    A place is that of the output's next token, as long as the output goes along. Where it does not, the place goes on by a token
    for each of the output: what the output has inserted or left out is short against the text, mostly."""

    def __init__(self, tokens: I32, output_at: int) -> None:
        self._tokens, self._output_at = tokens, output_at
        self._index: NgramIndex | None = None
        self._place, self._along = 0, True
        self._had = 0  # the output's tokens that it has been told of

    def follow(self, tokens: Sequence[int]) -> None:
        """The output's next ones."""
        for token in tokens:
            self._along = self._along and self._place < len(self._tokens) and int(self._tokens[self._place]) == token
            self._place += 1
        self._had += len(tokens)

    def know(self, start: int, ids: Sequence[int], replaces: bool) -> None:
        """The text of its slot has these from position `start` on, and nothing behind them. replaces: where others stood, as far
        as that is known."""
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
        """What comes next in it; nothing where the output does not go along, and at its end."""
        return self._tokens[self._place : self._place + most].tolist() if self._along else []

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """How many of the last tokens stand in it, 0 for none, and the place behind them: the nearest, if they stand in
        several."""
        if self._index is None:
            self._index = NgramIndex(self._tokens)
        size, places = self._index.places(tail)
        return (size, int(places[np.abs(places - self._place).argmin()])) if size else (0, 0)

    def go_on(self, place: int) -> None:
        """The output is taken to go along from there."""
        self._place, self._along = place, True

    def forget(self) -> None:
        """What can be made again."""
        self._index = None

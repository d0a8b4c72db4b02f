"""The masks of one step, in one buffer. Two buffers take turns: the executor may still read one while the next is filled."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.worker.grammar.matcher import XgrammarMatcher


class MaskFiller:
    """Used on the loop's thread alone. max_rows: the most masks of one step."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._buffers = [np.zeros((max_rows, -(-vocab_size // 32)), np.uint32) for _ in range(2)]

    def fill(self, matchers: Iterable[tuple[int, XgrammarMatcher]]) -> dict[int, NDArray[np.uint32]]:
        """Plan row → uint32[words], which hold until the call after next."""
        self._buffers.reverse()
        masks: dict[int, NDArray[np.uint32]] = {}
        for index, (row, matcher) in enumerate(matchers):
            masks[row] = self._buffers[0][index]
            masks[row][:] = matcher.mask()
        return masks

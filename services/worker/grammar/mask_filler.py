"""The masks of one step, in one buffer. Two buffers take turns: the executor may still read one while the next is filled."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import xgrammar
from numpy.typing import NDArray

from services.worker.grammar.matcher import XgrammarMatcher

MIN_BATCH = 4  # masks below which threads cost more than they save
SLOW_MASK_S = 5e-3  # thread time of one mask of a batch, on average, above which the next step looks at each alone


class MaskFiller:
    """Used on the loop's thread alone. max_rows: the most masks of one step. threads: 1 fills one after the other.

    In a batch nobody knows whose mask was slow, so nobody pays for it; after a slow batch the next step's masks are filled
    one by one, and the slow matcher is found out by its own meter.
    """

    def __init__(self, vocab_size: int, max_rows: int, threads: int = 1) -> None:
        self._buffers = [np.zeros((max_rows, -(-vocab_size // 32)), np.uint32) for _ in range(2)]
        self._threads = threads
        self._batch = xgrammar.BatchGrammarMatcher(threads) if threads > 1 else None
        self._one_by_one = False

    def fill(self, matchers: Iterable[tuple[int, XgrammarMatcher]]) -> dict[int, NDArray[np.uint32]]:
        """Plan row → uint32[words], which hold until the call after next."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        rows = list(matchers)
        unfilled = [index for index, (_, matcher) in enumerate(rows) if matcher.needs_fill]
        if self._batch is not None and len(unfilled) >= MIN_BATCH and not self._one_by_one:
            self._fill_batch(self._batch, [rows[index][1] for index in unfilled], buffer, unfilled)
        else:
            self._one_by_one = False
        for index, (_, matcher) in enumerate(rows):
            buffer[index] = matcher.mask()
        return {row: buffer[index] for index, (row, _) in enumerate(rows)}

    def _fill_batch(
        self,
        batch: xgrammar.BatchGrammarMatcher,
        matchers: list[XgrammarMatcher],
        buffer: NDArray[np.uint32],
        indices: list[int],
    ) -> None:
        started = time.perf_counter()
        batch.batch_fill_next_token_bitmask([matcher.raw for matcher in matchers], buffer.view(np.int32), indices)
        thread_s = (time.perf_counter() - started) * self._threads
        self._one_by_one = thread_s > SLOW_MASK_S * len(matchers)
        for index, matcher in zip(indices, matchers, strict=True):
            matcher.adopt(buffer[index])

"""Fills the grammar masks of a step into one of two alternating buffers, because the executor may still read the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.grammar.compile.grammar_limits import GrammarLimits
from rootstock_llm.services.worker.grammar.match.matcher import XgrammarMatcher

if TYPE_CHECKING:
    import xgrammar

MIN_BATCH = 4  # smallest number of masks for which threads are faster than one thread
SLOW_MASK_S = 5e-3  # if a batch takes more thread time per mask than this, the next step fills its masks one by one

logger = logging.getLogger(__name__)


class MaskFiller:
    """Fills masks within a budget of CPU time per step. Used only on the scheduler loop's thread.

    The budget covers the CPU time of a step's masks, and of accept() and forced() for the requests of the step since their last
    masks. CPU time beyond the budget is added to the meter of the matcher that took the most time. Otherwise, many grammars that
    each stay within their own limit could slow down every step.

    In a batch on several threads, the time of a single mask is unknown, so no meter gets the time of the batch. After a slow
    batch, the masks of the next step are filled one by one, so that each matcher's meter measures its own mask.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        threads: int = 1,
        fill_ms: float = GrammarLimits().fill_ms,
        max_drafts: int = 0,
    ) -> None:
        """Allocates the buffers.

        Args:
            max_rows: largest number of masks of a step.
            threads: threads that fill a batch; 1: masks are filled one by one.
            fill_ms: the budget of a step, in milliseconds of CPU time.
            max_drafts: largest number of masks per step for the positions after draft tokens; 0: no masks for drafts.
        """
        self._buffers = [np.zeros((max_rows, -(-vocab_size // 32)), np.uint32) for _ in range(2)]
        self._draft_buffers = [np.zeros((max_drafts, -(-vocab_size // 32)), np.uint32) for _ in range(2)]
        self._threads = threads
        self._budget_s = fill_ms / 1e3
        self._batch = _batch_matcher(threads) if threads > 1 else None
        self._one_by_one = False

    def fill(self, matchers: Iterable[tuple[int, XgrammarMatcher]]) -> dict[int, NDArray[np.uint32]]:
        """Returns the mask of each plan row, uint32[words]. The masks stay valid until fill() has been called two more times."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        rows = list(matchers)
        unfilled = [index for index, (_, matcher) in enumerate(rows) if matcher.needs_fill]
        batch_s = 0.0
        if self._batch is not None and len(unfilled) >= MIN_BATCH and not self._one_by_one:
            batch_s = self._fill_batch(self._batch, [rows[index][1] for index in unfilled], buffer, unfilled)
        for index, (_, matcher) in enumerate(rows):
            buffer[index] = matcher.mask()
        total_s = batch_s + self._charge([matcher for _, matcher in rows])
        too_slow = batch_s * self._threads > SLOW_MASK_S * len(unfilled)
        self._one_by_one = too_slow or total_s > self._budget_s
        return {row: buffer[index] for index, (row, _) in enumerate(rows)}

    def fill_after_drafts(
        self, matchers: Iterable[tuple[int, XgrammarMatcher]], draft_tokens: Mapping[int, Sequence[int]]
    ) -> dict[int, NDArray[np.uint32]]:
        """Returns the masks of the position after each draft token.

        A row's masks end before its first draft token that the grammar does not allow or that ends the output. No mask is filled
        after the step's budget is used up. The masks are valid as long as the masks of fill() for the same step.

        Returns:
            uint32[n, words] by plan row, with n at most the number of draft tokens. Rows without draft tokens have no entry.
        """
        self._draft_buffers.reverse()
        buffer, used = self._draft_buffers[0], 0
        masks = {}
        until = time.thread_time() + self._budget_s
        for row, matcher in matchers:
            draft = draft_tokens.get(row, ())[: len(buffer) - used]
            if not draft:
                continue
            count = matcher.fill_after(draft, buffer[used:], until)
            masks[row] = buffer[used : used + count]
            used += count
        return masks

    def _charge(self, matchers: list[XgrammarMatcher]) -> float:
        """Adds CPU time beyond the budget to the meter of the most expensive matcher. Returns the CPU seconds of all matchers."""
        costs = [matcher.take_cost() for matcher in matchers]
        total_s = sum(costs)
        if total_s > self._budget_s:
            matchers[costs.index(max(costs))].charge(total_s - self._budget_s)
        return total_s

    def _fill_batch(
        self,
        batch: xgrammar.BatchGrammarMatcher,
        matchers: list[XgrammarMatcher],
        buffer: NDArray[np.uint32],
        indices: list[int],
    ) -> float:
        """Fills the masks of several matchers with threads. Returns the wall time in seconds.

        If the batch fails, each matcher fills its own mask later. Only the faulty matcher then fails again.
        """
        started = time.perf_counter()
        try:
            batch.batch_fill_next_token_bitmask([matcher.raw for matcher in matchers], buffer.view(np.int32), indices)
        except Exception:
            logger.exception("could not fill a batch of grammar masks; they are filled one by one")
        else:
            for index, matcher in zip(indices, matchers, strict=True):
                matcher.set_mask(buffer[index])
        return time.perf_counter() - started


def _batch_matcher(threads: int) -> xgrammar.BatchGrammarMatcher:
    import xgrammar  # imported at first use, because it takes seconds

    return xgrammar.BatchGrammarMatcher(threads)

"""The masks of one step, in one buffer. Two buffers take turns: the executor may still read one while the next is filled."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from services.worker.grammar.compile.grammar_limits import GrammarLimits
from services.worker.grammar.match.matcher import XgrammarMatcher

if TYPE_CHECKING:
    import xgrammar

MIN_BATCH = 4  # masks below which threads cost more than they save
SLOW_MASK_S = 5e-3  # thread time of one mask of a batch, on average, above which the next step looks at each alone

logger = logging.getLogger(__name__)


class MaskFiller:
    """Used on the loop's thread alone. max_rows: the most masks of one step. threads: 1 fills one after the other. max_guesses:
    the most places of one step behind guesses.

    fill_ms is the budget of one step: CPU time of its masks, with the accepts and jumps of its requests since their masks
    before. What goes beyond it is charged to the most expensive matcher, so that many grammars that are each just bearable do
    not add up unpunished.
    In a batch nobody knows whose mask was slow, so nobody pays for it; after a slow batch the next step's masks are filled
    one by one, and the slow matcher is found out by its own meter.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        threads: int = 1,
        fill_ms: float = GrammarLimits().fill_ms,
        max_guesses: int = 0,
    ) -> None:
        self._buffers = [np.zeros((max_rows, -(-vocab_size // 32)), np.uint32) for _ in range(2)]
        self._ahead = [np.zeros((max_guesses, -(-vocab_size // 32)), np.uint32) for _ in range(2)]
        self._threads = threads
        self._budget_s = fill_ms / 1e3
        self._batch = _batch_matcher(threads) if threads > 1 else None
        self._one_by_one = False

    def fill(self, matchers: Iterable[tuple[int, XgrammarMatcher]]) -> dict[int, NDArray[np.uint32]]:
        """Plan row → uint32[words], which hold until the call after next."""
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

    def behind(
        self, matchers: Iterable[tuple[int, XgrammarMatcher]], guesses: Mapping[int, Sequence[int]]
    ) -> dict[int, NDArray[np.uint32]]:
        """Plan row → uint32[places, words], for the places behind each row's guesses as far as they are allowed. Those hold as
        long as what fill() gave for the same step. What would take longer than a step's masks may is not looked at."""
        self._ahead.reverse()
        buffer, used = self._ahead[0], 0
        masks = {}
        until = time.thread_time() + self._budget_s
        for row, matcher in matchers:
            guess = guesses.get(row, ())[: len(buffer) - used]
            if not guess:
                continue
            count = matcher.look_ahead(guess, buffer[used:], until)
            masks[row] = buffer[used : used + count]
            used += count
        return masks

    def _charge(self, matchers: list[XgrammarMatcher]) -> float:
        """Seconds spent by all of them."""
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
        """Seconds that it took. Where one of them fails, none is filled: it shows when each is asked for its own."""
        started = time.perf_counter()
        try:
            batch.batch_fill_next_token_bitmask([matcher.raw for matcher in matchers], buffer.view(np.int32), indices)
        except Exception:
            logger.exception("filling a batch of masks failed; they are filled one by one")
        else:
            for index, matcher in zip(indices, matchers, strict=True):
                matcher.adopt(buffer[index])
        return time.perf_counter() - started


def _batch_matcher(threads: int) -> xgrammar.BatchGrammarMatcher:
    import xgrammar  # imported only where it is wanted

    return xgrammar.BatchGrammarMatcher(threads)

"""What the core's stop rules know of text, over the model's own tokenizer and RE2."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.shared.hf_tokenizer import HfTokenizer
from services.worker.core.requests.finish import StopRuleTooExpensive
from services.worker.text.patterns import compile_pattern
from services.worker.text.step_meter import StepMeter

MAX_PATTERNS = 256
SEARCH_MS, BURST_MS = 0.3, 30.0  # CPU time of one pattern's searches on the loop's thread, see StepMeter


class PatternTooExpensive(StopRuleTooExpensive):
    """A stop pattern has cost more CPU time than it may. It is not searched again while it is remembered."""


@dataclass(frozen=True, slots=True)
class _Metered:
    """pattern: compiled by RE2."""

    pattern: Any
    meter: StepMeter


class ModelText:
    """Implements core.finish.TextRules. Used on the loop's thread alone.

    Tokenizers that write a space into the next word's token drop it at the start of a text: an anchor token stands before
    the tail, and its text is cut off again.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = [] if tokenizer.anchor_id is None else [tokenizer.anchor_id]
        self._anchor_chars = len(tokenizer.decode(self._anchor, False))
        self._patterns: OrderedDict[str, _Metered] = OrderedDict()  # least recently used first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens)[self._anchor_chars :]

    def search(self, pattern: str, text: str) -> bool:
        """Raises PatternTooExpensive. Requests with equal patterns share a meter, as they share what RE2 has learnt of it."""
        known = self._patterns.get(pattern)
        if known is None:
            known = self._patterns[pattern] = _Metered(compile_pattern(pattern), StepMeter(SEARCH_MS, BURST_MS))
            if len(self._patterns) > MAX_PATTERNS:
                self._patterns.popitem(last=False)
        self._patterns.move_to_end(pattern)
        if known.meter.overrun:
            raise PatternTooExpensive("stop_regex: searching for this pattern takes too long")
        started = time.thread_time()
        found: bool = known.pattern.search(text) is not None
        known.meter.step()
        known.meter.spend(time.thread_time() - started)
        return found

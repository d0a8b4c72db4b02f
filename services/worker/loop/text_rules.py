"""Implements the text functions of the core's stop rules with the model's tokenizer and RE2."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.worker.core.requests.finish import StopRuleTooExpensive
from rootstock_llm.services.worker.text.patterns import compile_pattern
from rootstock_llm.services.worker.text.step_meter import StepMeter

MAX_PATTERNS = 256  # largest number of cached compiled stop patterns
# Limits of a pattern's CPU time on the scheduler loop's thread: step_ms and burst_ms of StepMeter.
SEARCH_MS, BURST_MS = 0.3, 30.0


class PatternTooExpensive(StopRuleTooExpensive):
    """A stop pattern has exceeded its CPU time. It is refused until it is no longer among the MAX_PATTERNS cached patterns."""


@dataclass(frozen=True, slots=True)
class _Metered:
    """A stop pattern and the meter of its CPU time."""

    pattern: Any  # compiled by RE2
    meter: StepMeter


class ModelText:
    """Implements TextRules. Only the scheduler loop's thread uses it.

    Tokenizers with byte fallback need two precautions for a window that begins within the output:

    - They include the space before a word in the word's token, but drop this space at the start of a text. decode() therefore
      puts an anchor token before the ids, and removes the anchor's text from the result.
    - Their decoder replaces a whole run of byte tokens if one byte is wrong, for example because the window begins within a
      character. decode() therefore decodes the bytes itself.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = [] if tokenizer.anchor_id is None else [tokenizer.anchor_id]
        self._anchor_chars = len(tokenizer.decode(self._anchor, False))
        self._patterns: OrderedDict[str, _Metered] = OrderedDict()  # least recently used first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if not self._anchor:
            return self._tokenizer.decode(ids, skip_special_tokens)
        parts: list[str] = []
        for are_bytes, run in groupby(ids, lambda token: self._tokenizer.token_bytes(token) is not None):
            if are_bytes:
                parts.append(b"".join(self._tokenizer.token_bytes(token) or b"" for token in run).decode(errors="replace"))
            else:
                parts.append(self._tokenizer.decode([*self._anchor, *run], skip_special_tokens)[self._anchor_chars :])
        return "".join(parts)

    def search(self, pattern: str, text: str) -> bool:
        """Returns whether the pattern matches anywhere in the text.

        Requests with equal patterns share the compiled pattern and its meter.

        Raises:
            PatternTooExpensive: earlier searches of the pattern have exceeded its CPU time.
        """
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

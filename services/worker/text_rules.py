"""What the core's stop rules know of text, over the model's own tokenizer and RE2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from services.shared.hf_tokenizer import HfTokenizer
from services.worker.patterns import compile_pattern

MAX_PATTERNS = 256


class ModelText:
    """Implements core.finish.TextRules. Used on the loop's thread alone.

    Tokenizers that write a space into the next word's token drop it at the start of a text: an anchor token stands before
    the tail, and its text is cut off again.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = [] if tokenizer.anchor_id is None else [tokenizer.anchor_id]
        self._anchor_chars = len(tokenizer.decode(self._anchor, False))
        self._patterns: OrderedDict[str, Any] = OrderedDict()  # least recently used first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens)[self._anchor_chars :]

    def search(self, pattern: str, text: str) -> bool:
        compiled = self._patterns.get(pattern)
        if compiled is None:
            compiled = self._patterns[pattern] = compile_pattern(pattern)
            if len(self._patterns) > MAX_PATTERNS:
                self._patterns.popitem(last=False)
        self._patterns.move_to_end(pattern)
        return compiled.search(text) is not None

"""The text that a grammar leaves no choice about, as tokens."""

from __future__ import annotations

import xgrammar

from services.shared.hf_tokenizer import HfTokenizer

MIN_CHARS = 2  # shorter texts are one token, nearly always


class ForcedText:
    """Tokenizers that write a space into a text's first word get an anchor token before it, which is cut off again."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_id = tokenizer.anchor_id
        self._anchor = "" if tokenizer.anchor_id is None else tokenizer.decode([tokenizer.anchor_id], False)

    def tokens(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        """Of what must come next, as the tokenizer would cut it if it ended there. Empty where little or nothing is forced."""
        text = _jump_forward_text(matcher)
        if len(text) < MIN_CHARS:
            return []
        (ids,) = self._tokenizer.encode_batch([self._anchor + text], False)
        if self._anchor_id is None:
            return ids
        return ids[1:] if ids and ids[0] == self._anchor_id else []


def _jump_forward_text(matcher: xgrammar.GrammarMatcher) -> str:
    """The forced bytes may end inside a character, which the library then cannot make text of: its beginning is dropped."""
    try:
        return matcher.find_jump_forward_string()
    except UnicodeDecodeError as error:
        return error.object[: error.start].decode()

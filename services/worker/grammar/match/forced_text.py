"""The text that a grammar leaves no choice about, as tokens."""

from __future__ import annotations

from services.shared.hf_tokenizer import HfTokenizer

MIN_CHARS = 2  # shorter texts are one token, nearly always


class ForcedText:
    """Tokenizers that write a space into a text's first word get an anchor token before it, which is cut off again."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_id = tokenizer.anchor_id
        self._anchor = "" if tokenizer.anchor_id is None else tokenizer.decode([tokenizer.anchor_id], False)

    def tokens(self, data: bytes) -> list[int]:
        """Of the bytes that must come next, as the tokenizer would cut them if the text ended there. Empty where little or
        nothing is forced."""
        text = _whole_characters(data)
        if len(text) < MIN_CHARS:
            return []
        (ids,) = self._tokenizer.encode_batch([self._anchor + text], False)
        if self._anchor_id is None:
            return ids
        return ids[1:] if ids and ids[0] == self._anchor_id else []


def _whole_characters(data: bytes) -> str:
    """The bytes may end inside a character, whose beginning is dropped, or go on with one that a token has begun."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()

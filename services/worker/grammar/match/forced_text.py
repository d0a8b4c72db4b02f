"""Converts text that a grammar determines into tokens."""

from __future__ import annotations

from services.shared.hf_tokenizer import HfTokenizer

MIN_CHARS = 2  # a shorter text is nearly always one token, for which a jump does not pay


class ForcedText:
    """Tokenizes forced text.

    If the tokenizer adds a space to the first word of a text, the text gets an anchor token before it, which is then removed.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_id = tokenizer.anchor_id
        self._anchor = "" if tokenizer.anchor_id is None else tokenizer.decode([tokenizer.anchor_id], False)

    def tokens(self, data: bytes) -> list[int]:
        """Returns the tokens of bytes that must come next, as if the text ended after them. Empty below MIN_CHARS characters."""
        text = _whole_characters(data)
        if len(text) < MIN_CHARS:
            return []
        (ids,) = self._tokenizer.encode_batch([self._anchor + text], False)
        if self._anchor_id is None:
            return ids
        return ids[1:] if ids and ids[0] == self._anchor_id else []


def _whole_characters(data: bytes) -> str:
    """Returns the text up to the first incomplete character.

    The bytes may end inside a character. They may also begin inside one, if the last token ended there; the result is then "".
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()

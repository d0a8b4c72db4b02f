"""What a single token adds to a text, as bytes: for log probabilities, where a token stands by itself."""

from __future__ import annotations

from services.shared.hf_tokenizer import HfTokenizer


class TokenTexts:
    """One per process; any thread."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop a leading space at the start of a text, so text tokens are decoded behind this one.
        self._anchor = tokenizer.encode_batch(["a"], False)[0][-1:]
        self._anchor_chars = len(tokenizer.decode(self._anchor, False))

    def of(self, token_id: int) -> bytes:
        """UTF-8, or a part of a character's. Special tokens give their names, ids outside the vocabulary nothing."""
        raw = self._tokenizer.token_bytes(token_id)
        if raw is not None:
            return raw
        return self._tokenizer.decode([*self._anchor, token_id], False)[self._anchor_chars :].encode()

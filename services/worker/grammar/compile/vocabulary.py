"""Derives the bytes of each token of the model, the vocabulary of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer

if TYPE_CHECKING:
    import xgrammar


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model."""

    tokens: tuple[bytes, ...]  # bytes by id; b"" for padding, stop tokens, and special tokens that no grammar may contain
    stop_ids: tuple[int, ...]  # ids that end an output, ascending; may be empty

    @property
    def num_words(self) -> int:
        """Number of uint32 words of a mask."""
        return -(-len(self.tokens) // 32)

    def info(self) -> xgrammar.TokenizerInfo:
        import xgrammar  # imported at first use, because it takes seconds

        stop_ids = list(self.stop_ids)
        return xgrammar.TokenizerInfo(
            list(self.tokens), xgrammar.VocabType.RAW, vocab_size=len(self.tokens), stop_token_ids=stop_ids
        )


def vocabulary_of(tokenizer: HfTokenizer, vocab_size: int, stop_ids: Sequence[int], markers: Sequence[str] = ()) -> Vocabulary:
    """Returns the vocabulary of a model.

    Args:
        vocab_size: vocabulary size of the model, which may differ from the tokenizer's.
        stop_ids: the model's EOS ids.
        markers: texts of special tokens that a grammar may contain, such as the tokens around a tool call. Stop tokens among
            them are ignored.
    """
    anchor = [] if tokenizer.anchor_id is None else [tokenizer.anchor_id]
    anchor_chars = len(tokenizer.decode(anchor, False))
    stops = tuple(sorted({token for token in stop_ids if 0 <= token < vocab_size}))
    marker_bytes = {tokenizer.token_id(text): text.encode() for text in markers}
    textless = tokenizer.special_ids | set(stops)

    def text_of(token: int) -> bytes:
        if token in marker_bytes and token not in stops:
            return marker_bytes[token]
        if token in textless or token >= tokenizer.vocab_size:
            return b""
        found = tokenizer.token_bytes(token)
        return found if found is not None else tokenizer.decode([*anchor, token], False)[anchor_chars:].encode()

    return Vocabulary(tuple(text_of(token) for token in range(vocab_size)), stops)

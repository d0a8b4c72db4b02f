"""Sets of tokens as bits over the vocabulary: bit i of word w represents token 32 w + i."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
WORD_BITS = 32


def inside(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """Returns the tokens that are inside the vocabulary, int64, in their order."""
    ids = np.array(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def token_words(allowed: Sequence[int], banned: Sequence[int], vocab_size: int) -> Words:
    """Returns the set of allowed tokens without the banned ones, uint32[ceil(V / 32)]. An empty `allowed` means all tokens."""
    bits = np.full(-(-vocab_size // WORD_BITS) * WORD_BITS, not allowed, dtype=np.uint8)
    bits[inside(allowed, vocab_size)] = 1
    bits[inside(banned, vocab_size)] = 0
    assert len(bits) % WORD_BITS == 0 and len(bits) >= vocab_size, "whole words, and a bit for each token"
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

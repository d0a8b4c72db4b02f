"""Sets of tokens as bits over the vocabulary: bit i of word w stands for token 32 w + i."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]
WORD_BITS = 32


def inside(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """int64[<= n]: those of the tokens that the vocabulary has, in order."""
    ids = np.array(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def token_words(allowed: Sequence[int], banned: Sequence[int], vocab_size: int) -> Words:
    """uint32[ceil(V / 32)]: the allowed tokens (all, where none is named) but for the banned ones."""
    bits = np.full(-(-vocab_size // WORD_BITS) * WORD_BITS, not allowed, dtype=np.uint8)
    bits[inside(allowed, vocab_size)] = 1
    bits[inside(banned, vocab_size)] = 0
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def forbid_others(logits: Tensor, words: Words) -> Tensor:
    """Sets float32[n, V] in place to -inf wherever words, uint32[n, ceil(V / 32)], have no bit set; returns it."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)

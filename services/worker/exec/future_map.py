"""The relay of sampled tokens from one step to the next, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = -1


class UnwrittenToken(RuntimeError):
    """A decode row read a slot that no step has written."""


class FutureMap:
    """int64[slots]: the last token sampled for each slot. Written and read by the forward thread alone.

    check: raise UnwrittenToken on reading a slot that was not written since its admission; else such a read gives
    token 0, because a row that is dropped at commit may run once more on stale data.
    """

    def __init__(self, max_slots: int, check: bool = False) -> None:
        self._tokens = torch.full((max_slots,), POISON, dtype=torch.int64)
        self._check = check

    def poison(self, slots: Tensor) -> None:
        self._tokens[slots] = POISON

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        self._tokens[slots] = tokens

    def gather(self, slots: Tensor) -> Tensor:
        """int64[n]. Raises UnwrittenToken in check mode."""
        tokens = self._tokens[slots]
        if self._check and bool((tokens == POISON).any()):
            raise UnwrittenToken(f"no token was written for slots {slots[tokens == POISON].tolist()}")
        return tokens.clamp(min=0)

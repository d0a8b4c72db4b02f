"""What the stages of select_tokens leave for one another, by row of the call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.select_keys import MAX_VOCAB

PEAK_TILE = 2048  # logits looked at in one go: by the first stage, by the tally, by the others
TALLY_TILE = 4096
TILE = 1024
GROUP = tl.constexpr(64)  # neighbours whose maximum is kept, to find the likeliest tokens without reading the row again
CANDIDATES = tl.constexpr(2048)  # tokens that a draw can be left with for it to be made without reading the row again
PIVOTS = tl.constexpr(8)  # keys up to which counts and masses are taken in one pass
ROUNDS = tl.constexpr(2)  # passes that all programs share before one program goes on alone


@dataclass(frozen=True, slots=True)
class SelectScratch:
    """n rows, V tokens. parts: up to ceil(V / PEAK_TILE) spans of a row, each the work of one program of the first stage.

    tops, raw_tops: float32[n, parts], maxima of what is sampled from and of the raw logits, infinite for a NaN; top_ids:
    int32[n, parts], the former's lowest ids. spreads: float64[n, 3, ceil(V / PEAK_TILE)], of rows with top-n-sigma, by tile:
    how many finite logits, their mean, the sum of their squared distances from it. group_tops: float32[n, ceil(V / GROUP)], of
    rows with top-k or top-p. tile_masses: int64[n, ceil(V / TALLY_TILE)], of rows without. counts: int32[n, ROUNDS, PIVOTS] and
    masses: int64, the same, of rows with top-p and no top-k; pivots: int32[n, PIVOTS], of their last round. near_groups,
    candidate_keys, candidate_ids: int32[n, CANDIDATES].
    """

    tops: Tensor
    raw_tops: Tensor
    top_ids: Tensor
    spreads: Tensor
    group_tops: Tensor
    tile_masses: Tensor
    counts: Tensor
    masses: Tensor
    pivots: Tensor
    near_groups: Tensor
    candidate_keys: Tensor
    candidate_ids: Tensor

    @classmethod
    def of(cls, max_rows: int, vocab_size: int, device: torch.device) -> SelectScratch:
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size} tokens; 1 to {MAX_VOCAB} can be sampled from")

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        parts, rounds = triton.cdiv(vocab_size, PEAK_TILE), (ROUNDS.value, PIVOTS.value)
        return cls(
            tops=make(torch.float32, parts),
            raw_tops=make(torch.float32, parts),
            top_ids=make(torch.int32, parts),
            spreads=make(torch.float64, 3, parts),
            group_tops=make(torch.float32, triton.cdiv(vocab_size, GROUP.value)),
            tile_masses=make(torch.int64, triton.cdiv(vocab_size, TALLY_TILE)),
            counts=make(torch.int32, *rounds),
            masses=make(torch.int64, *rounds),
            pivots=make(torch.int32, PIVOTS.value),
            near_groups=make(torch.int32, CANDIDATES.value),
            candidate_keys=make(torch.int32, CANDIDATES.value),
            candidate_ids=make(torch.int32, CANDIDATES.value),
        )

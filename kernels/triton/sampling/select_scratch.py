"""Allocates the memory in which the stages of select_tokens() pass results to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.triton.sampling.select_keys import MAX_VOCAB

PEAK_TILE = 2048  # logits per tile of the first stage
TALLY_TILE = 4096  # logits per tile of the tally
TILE = 1024  # logits per tile of the other stages
GROUP = tl.constexpr(64)  # number of adjacent tokens in a group; only groups with large maxima are searched for likely tokens
CANDIDATES = tl.constexpr(2048)  # largest number of tokens among which one program draws without reading the whole row
PIVOTS = tl.constexpr(8)  # number of keys for which one pass measures counts and masses
ROUNDS = tl.constexpr(2)  # passes of all programs before a single program ends the search


@dataclass(frozen=True, slots=True)
class SelectScratch:
    """Results of the stages, for n rows and V tokens. A part is the span of a row that one program of the first stage reads."""

    tops: Tensor  # float32[n, parts]: maxima of the logits, raw or edited, from which the row is sampled; infinite for a NaN
    raw_tops: Tensor  # float32[n, parts]: maxima of the raw logits; infinite for a NaN
    top_ids: Tensor  # int32[n, parts]: lowest id of a token that has the maximum in `tops`
    # float64[n, 3, ceil(V / PEAK_TILE)]: number, mean and sum of squared deviations of a tile's finite logits (top-n-sigma)
    spreads: Tensor
    group_tops: Tensor  # float32[n, ceil(V / GROUP)]: maxima of groups (top-k or top-p)
    tile_masses: Tensor  # int64[n, ceil(V / TALLY_TILE)]: masses of tiles (neither top-k nor top-p)
    counts: Tensor  # int32[n, ROUNDS, PIVOTS]: tokens up to each pivot (top-p without top-k)
    masses: Tensor  # int64[n, ROUNDS, PIVOTS]: masses of these tokens
    pivots: Tensor  # int32[n, PIVOTS]: pivots of the last round
    near_groups: Tensor  # int32[n, CANDIDATES]: indices of the groups that have candidates
    candidate_keys: Tensor  # int32[n, CANDIDATES]: keys of the candidates (select_keys)
    candidate_ids: Tensor  # int32[n, CANDIDATES]: token ids of the candidates

    @classmethod
    def of(cls, max_rows: int, vocab_size: int, device: torch.device) -> SelectScratch:
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"the vocabulary has {vocab_size} tokens; sampling supports 1 to {MAX_VOCAB}")

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

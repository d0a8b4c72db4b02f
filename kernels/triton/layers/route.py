"""Implements routers in Triton: a program chooses the experts of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Routing, misfit, require_contiguous
from rootstock_llm.kernels.triton.launch import block_of, chained, take_turn, warps_for


@triton.jit
def _route_kernel(
    weights,  # float32[T, CHOICES]
    ids,  # int32[T, CHOICES]
    logits,  # float32[T, EXPERTS]
    bias,  # float32[EXPERTS]; without HAS_BIAS, any pointer
    scale,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    TWO_BEST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    take_turn(CHAINED)
    LOWEST: tl.constexpr = float("-inf")
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    is_open = lanes < EXPERTS
    x = tl.load(logits + row * EXPERTS + lanes, mask=is_open, other=LOWEST)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    selection = scores
    if HAS_BIAS:
        selection += tl.load(bias + lanes, mask=is_open, other=0.0)
    selection = tl.where(selection == selection, selection, LOWEST)
    if TOP_GROUPS < GROUPS:
        groups = tl.arange(0, GROUP_BLOCK)
        group_scores = tl.full([GROUP_BLOCK], LOWEST, tl.float32)
        for group in tl.static_range(GROUPS):
            of_group = tl.where(is_open & (lanes // SIZE == group), selection, LOWEST)
            score = tl.max(of_group, 0)
            if TWO_BEST and SIZE > 1:
                first = tl.min(tl.where(of_group == score, tl.where(lanes // SIZE == group, lanes, BLOCK), BLOCK), 0)
                score += tl.max(tl.where(lanes == first, LOWEST, of_group), 0)
            group_scores = tl.where(groups == group, score, group_scores)
        group_scores = tl.where(group_scores == group_scores, group_scores, LOWEST)
        open_groups = groups < GROUPS
        is_open = lanes < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(open_groups, group_scores, LOWEST), 0)
            chosen = tl.min(tl.where(open_groups & (group_scores == best), groups, GROUP_BLOCK), 0)
            open_groups = open_groups & (groups != chosen)
            is_open = is_open | ((lanes // SIZE == chosen) & (lanes < EXPERTS))
    choices = tl.arange(0, CHOICE_BLOCK)
    chosen_scores = tl.zeros([CHOICE_BLOCK], dtype=tl.float32)
    total = tl.sum(tl.zeros([CHOICE_BLOCK], dtype=tl.float32), 0)
    for choice in tl.static_range(CHOICES):
        best = tl.max(tl.where(is_open, selection, LOWEST), 0)
        expert = tl.min(tl.where(is_open & (selection == best), lanes, BLOCK), 0)
        is_open = is_open & (lanes != expert)
        score = tl.sum(tl.where(lanes == expert, scores, 0.0), 0)
        total += score
        chosen_scores = tl.where(choices == choice, score, chosen_scores)
        tl.store(ids + row * CHOICES + choice, expert)
    if RENORMALIZE:
        chosen_scores /= total + 1e-20
    tl.store(weights + row * CHOICES + choices, chosen_scores * scale, mask=choices < CHOICES)


def route(weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, routing: Routing) -> None:
    """Implements Kernels.route(). Raises ValueError if the shapes or the rules do not fit."""
    require_contiguous(weights, ids, logits)
    rows, experts = logits.shape
    fits = weights.shape == ids.shape == (rows, routing.top_k) and (bias is None or bias.shape == (experts,))
    if not fits or not routing.fits(experts) or logits.dtype != torch.float32 or weights.dtype != torch.float32:
        raise misfit(weights, ids, logits)
    if not rows:
        return
    block = block_of(experts)
    _route_kernel[rows,](
        weights,
        ids,
        logits,
        logits if bias is None else bias,
        routing.scale,
        EXPERTS=experts,
        CHOICES=routing.top_k,
        GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        SIGMOID=routing.scoring == "sigmoid",
        TWO_BEST=routing.group_score == "two_best",
        RENORMALIZE=routing.renormalize,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        GROUP_BLOCK=block_of(routing.num_groups),
        CHOICE_BLOCK=block_of(routing.top_k),
        num_warps=warps_for(block),
        **chained(logits.device),
    )

"""Rotary embedding and writes to the paged pools. One program does some heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.triton.chaining import chained, take_turn
from kernels.triton.launch import block_of, misfit, require_contiguous, warps_for

FEW_TOKENS = 64  # up to so many, small tiles: they fill more of the device


@triton.jit
def _turned(source, norm, eps, angles, low_places, halves, inside, shown, DIM: tl.constexpr, NORMED: tl.constexpr):
    """float32 [TILE, HALF_BLOCK] twice: the lower and the upper half of each head, normed and turned."""
    half: tl.constexpr = DIM // 2
    low = tl.load(source + low_places, mask=shown, other=0.0).to(tl.float32)
    high = tl.load(source + low_places + half, mask=shown, other=0.0).to(tl.float32)
    cos = tl.load(angles + halves, mask=inside, other=0.0)[None, :]
    sin = tl.load(angles + half + halves, mask=inside, other=0.0)[None, :]
    if NORMED:
        low_gain = tl.load(norm + halves, mask=inside, other=0.0).to(tl.float32)
        high_gain = tl.load(norm + half + halves, mask=inside, other=0.0).to(tl.float32)
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        low = low * scale * low_gain[None, :]
        high = high * scale * high_gain[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _copy_values(pool, source, heads, limit, first_cell, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    shown = (heads < limit)[:, None] & (columns < DIM)[None, :]
    values = tl.load(source + heads[:, None] * DIM + columns[None, :], mask=shown, other=0.0)
    kept = (first_cell + heads * PAGE_SIZE)[:, None] * DIM + columns[None, :]
    tl.store(pool + kept, values.to(pool.dtype.element_ty), mask=shown)


@triton.jit(do_not_specialize_on_alignment=["positions", "locations"])
def _rope_write_kernel(
    qkv,
    q_norm,
    k_norm,
    eps,
    cos_sin,
    num_positions,
    positions,
    locations,
    k_pool,
    v_pool,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Tiles of query heads come first, then of key heads, then of value heads."""
    take_turn(CHAINED)
    token, tile = tl.program_id(0), tl.program_id(1)
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    k_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    half: tl.constexpr = DIM // 2
    location = tl.load(locations + token)
    page = location // PAGE_SIZE
    first_cell = page * (KV_HEADS * PAGE_SIZE) + (location - page * PAGE_SIZE)  # of the first head, in cells of DIM
    written_heads = tl.where(location >= 0, KV_HEADS, 0)
    # A token that is written nowhere may stand past the table.
    position = tl.minimum(tl.maximum(tl.load(positions + token), 0), num_positions - 1)
    angles = cos_sin + position.to(tl.int64) * DIM
    halves = tl.arange(0, HALF_BLOCK)
    inside = halves < half
    steps = tl.arange(0, TILE)
    q = qkv + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    k = q + HEADS * DIM
    if tile < q_tiles:
        heads = tile * TILE + steps
        shown = (heads < HEADS)[:, None] & inside[None, :]
        low_places = heads[:, None] * DIM + halves[None, :]
        low, high = _turned(q, q_norm, eps, angles, low_places, halves, inside, shown, DIM, NORMED)
        tl.store(q + low_places, low.to(qkv.dtype.element_ty), mask=shown)
        tl.store(q + low_places + half, high.to(qkv.dtype.element_ty), mask=shown)
    elif tile < q_tiles + k_tiles:
        heads = (tile - q_tiles) * TILE + steps
        shown = (heads < written_heads)[:, None] & inside[None, :]
        low_places = heads[:, None] * DIM + halves[None, :]
        low, high = _turned(k, k_norm, eps, angles, low_places, halves, inside, shown, DIM, NORMED)
        kept = (first_cell + heads * PAGE_SIZE)[:, None] * DIM + halves[None, :]
        tl.store(k_pool + kept, low.to(k_pool.dtype.element_ty), mask=shown)
        tl.store(k_pool + kept + half, high.to(k_pool.dtype.element_ty), mask=shown)
    else:
        heads = (tile - q_tiles - k_tiles) * TILE + steps
        _copy_values(v_pool, k + KV_HEADS * DIM, heads, written_heads, first_cell, PAGE_SIZE, DIM, 2 * HALF_BLOCK)


def rope_write_kv(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_sin: Tensor,
    rows: RaggedRows,
    k_pool: Tensor,
    v_pool: Tensor,
    fixed: bool = False,
) -> None:
    """See Kernels; one launch. A position outside cos_sin takes its nearest row. fixed: in the same way whatever the number of
    tokens, so that norms add in one order. Raises ValueError for shapes that do not fit."""
    require_contiguous(qkv, cos_sin, k_pool, v_pool, rows.positions, rows.locations)
    _, kv_heads, page_size, dim = k_pool.shape
    tokens, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    if heads < 1 or (heads + 2 * kv_heads) * dim != width or dim % 2 or k_pool.shape != v_pool.shape:
        raise misfit(qkv, k_pool, v_pool)
    if cos_sin.shape[1] != dim or len(rows.positions) != tokens or len(rows.locations) != tokens:
        raise misfit(qkv, cos_sin, rows.positions, rows.locations)
    if tokens == 0:
        return
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    if norms is not None and (q_norm.shape != (dim,) or k_norm.shape != (dim,)):
        raise misfit(qkv, q_norm, k_norm)
    tile = 4 if fixed or tokens <= FEW_TOKENS else min(max(triton.next_power_of_2(kv_heads), 4), 16)
    half_block = block_of(dim // 2)
    tiles = triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile)
    _rope_write_kernel[(tokens, tiles)](
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        cos_sin.shape[0],
        rows.positions,
        rows.locations,
        k_pool,
        v_pool,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        TILE=tile,
        HALF_BLOCK=half_block,
        NORMED=norms is not None,
        num_warps=warps_for(tile * half_block),
        **chained(qkv.device),
    )

"""Writes keys and values to the paged pools, with and without rotary embedding. One program writes some heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, misfit, require_contiguous
from rootstock_llm.kernels.triton.launch import block_of, chained, take_turn, warps_for

FEW_TOKENS = 64  # up to this number of tokens, tiles have only 4 heads, so that there are enough programs for the device


@triton.jit
def _rotated(source, norm, eps, angles, low_offsets, halves, inside, shown, DIM: tl.constexpr, NORMED: tl.constexpr):
    """Returns the lower and the upper half of each head after norm and rotation, as float32[TILE, HALF_BLOCK] each."""
    half: tl.constexpr = DIM // 2
    low = tl.load(source + low_offsets, mask=shown, other=0.0).to(tl.float32)
    high = tl.load(source + low_offsets + half, mask=shown, other=0.0).to(tl.float32)
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
    cells = (first_cell + heads * PAGE_SIZE)[:, None] * DIM + columns[None, :]
    tl.store(pool + cells, values.to(pool.dtype.element_ty), mask=shown)


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
    """Rotates one tile of heads of one token.

    Tiles of query heads come first, then those of key heads, then those of value heads.
    """
    take_turn(CHAINED)
    token, tile = tl.program_id(0), tl.program_id(1)
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    k_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    half: tl.constexpr = DIM // 2
    location = tl.load(locations + token)
    page = location // PAGE_SIZE
    first_cell = page * (KV_HEADS * PAGE_SIZE) + (location - page * PAGE_SIZE)  # index of the first head, in units of DIM
    written_heads = tl.where(location >= 0, KV_HEADS, 0)
    # A padding token, which is not written, may have a position outside of cos_sin.
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
        low_offsets = heads[:, None] * DIM + halves[None, :]
        low, high = _rotated(q, q_norm, eps, angles, low_offsets, halves, inside, shown, DIM, NORMED)
        tl.store(q + low_offsets, low.to(qkv.dtype.element_ty), mask=shown)
        tl.store(q + low_offsets + half, high.to(qkv.dtype.element_ty), mask=shown)
    elif tile < q_tiles + k_tiles:
        heads = (tile - q_tiles) * TILE + steps
        shown = (heads < written_heads)[:, None] & inside[None, :]
        low_offsets = heads[:, None] * DIM + halves[None, :]
        low, high = _rotated(k, k_norm, eps, angles, low_offsets, halves, inside, shown, DIM, NORMED)
        cells = (first_cell + heads * PAGE_SIZE)[:, None] * DIM + halves[None, :]
        tl.store(k_pool + cells, low.to(k_pool.dtype.element_ty), mask=shown)
        tl.store(k_pool + cells + half, high.to(k_pool.dtype.element_ty), mask=shown)
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
    """Implements Kernels.rope_write_kv() in one launch. A position outside of cos_sin uses the nearest row of cos_sin.

    With `fixed`, the size of the tiles does not depend on the number of tokens, so that norms always add in the same order.
    Raises ValueError if the shapes do not fit.
    """
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


TILE_ELEMENTS = 1024  # approximate number of elements of a program


@triton.jit
def _copy_heads(
    pool,
    source,
    base,
    head_stride,
    column_stride,
    heads,
    shown,
    first_cell,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    wanted = shown[:, None] & (columns < DIM)[None, :]
    offsets = base + heads.to(tl.int64)[:, None] * head_stride + columns.to(tl.int64)[None, :] * column_stride
    values = tl.load(source + offsets, mask=wanted, other=0.0)
    cells = (first_cell + heads * PAGE_SIZE)[:, None] * DIM + columns[None, :]
    tl.store(pool + cells, values.to(pool.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize_on_alignment=["locations"])
def _write_kv_kernel(
    keys,
    key_token_stride,
    key_head_stride,
    key_stride,
    values,
    value_token_stride,
    value_head_stride,
    value_stride,
    locations,
    k_pool,
    v_pool,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    location = tl.load(locations + token)
    page = location // PAGE_SIZE
    first_cell = page * (KV_HEADS * PAGE_SIZE) + (location - page * PAGE_SIZE)  # index of the first head, in units of vectors
    shown = heads < tl.where(location >= 0, KV_HEADS, 0)
    _copy_heads(
        k_pool,
        keys,
        token * key_token_stride,
        key_head_stride,
        key_stride,
        heads,
        shown,
        first_cell,
        PAGE_SIZE,
        KEY_DIM,
        KEY_BLOCK,
    )
    _copy_heads(
        v_pool,
        values,
        token * value_token_stride,
        value_head_stride,
        value_stride,
        heads,
        shown,
        first_cell,
        PAGE_SIZE,
        VALUE_DIM,
        VALUE_BLOCK,
    )


def write_kv(keys: Tensor, values: Tensor, rows: RaggedRows, k_pool: Tensor, v_pool: Tensor) -> None:
    """Implements Kernels.write_kv(). keys and values may have any strides. Raises ValueError if the shapes do not fit."""
    require_contiguous(k_pool, v_pool, rows.locations)
    pages, kv_heads, page_size, key_dim = k_pool.shape
    tokens, value_dim = keys.shape[0], v_pool.shape[3]
    if keys.shape != (tokens, kv_heads, key_dim) or v_pool.shape != (pages, kv_heads, page_size, value_dim):
        raise misfit(keys, k_pool, v_pool)
    if values.shape != (tokens, kv_heads, value_dim) or len(rows.locations) != tokens:
        raise misfit(keys, values, v_pool, rows.locations)
    if tokens == 0:
        return
    key_block, value_block = block_of(key_dim), block_of(value_dim)
    widest = max(key_block, value_block)
    tile = max(min(TILE_ELEMENTS // widest, triton.next_power_of_2(kv_heads)), 1)
    _write_kv_kernel[(tokens, triton.cdiv(kv_heads, tile))](
        keys,
        *keys.stride(),
        values,
        *values.stride(),
        rows.locations,
        k_pool,
        v_pool,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILE=tile,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=value_block,
        num_warps=warps_for(tile * widest),
    )

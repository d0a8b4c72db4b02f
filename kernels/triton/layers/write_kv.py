"""Writes of keys and values, strided and of unequal sizes, to the paged pools."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.triton.launch import block_of, misfit, require_contiguous, warps_for

TILE_ELEMENTS = 1024  # of a program, about


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
    places = base + heads.to(tl.int64)[:, None] * head_stride + columns.to(tl.int64)[None, :] * column_stride
    taken = tl.load(source + places, mask=wanted, other=0.0)
    kept = (first_cell + heads * PAGE_SIZE)[:, None] * DIM + columns[None, :]
    tl.store(pool + kept, taken.to(pool.dtype.element_ty), mask=wanted)


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
    first_cell = page * (KV_HEADS * PAGE_SIZE) + (location - page * PAGE_SIZE)  # of the first head, in cells
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
    """See Kernels. keys and values may have any strides. Raises ValueError for shapes that do not fit."""
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

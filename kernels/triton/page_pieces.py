"""Copies pieces of pages from host memory into a device's pools, one group of layers per launch.

The kernel reads host memory over the bus, which limits the speed of the copy. It uses few programs, so that most of the device is
free for concurrent steps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import misfit, require_contiguous

# 2048 elements of 8 bytes are 16 KiB per program. The 512 KiB of all programs in flight hide the latency of the bus.
PROGRAMS, BLOCK, WARPS = 32, 2048, 8


@triton.jit(
    do_not_specialize=["num_rows", "num_pieces"],
    do_not_specialize_on_alignment=["rows", "pages", "parts"],
)
def _bring_pieces_kernel(rows, pages, parts, num_rows, num_pieces, BLOCK: tl.constexpr):
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        part, at = piece // num_rows, piece % num_rows
        base = tl.load(parts + 3 * part)
        size = tl.load(parts + 3 * part + 1)
        offset = tl.load(parts + 3 * part + 2)
        source = (tl.load(rows + at) + offset).to(tl.pointer_type(tl.int64))
        target = (base + tl.load(pages + at) * size).to(tl.pointer_type(tl.int64))
        words = size // 8
        for begin in range(0, words, BLOCK):
            steps = begin + tl.arange(0, BLOCK)
            tl.store(target + steps, tl.load(source + steps, mask=steps < words), mask=steps < words)


def bring_pieces(rows: Tensor, pages: Tensor, parts: Tensor) -> None:
    """Copies pages from memory that the device can read to the pools.

    A row is the memory of one page in all pools. Part j of row i is copied to page pages[i] of pool j.

    All tensors are on the device. No address is checked. Addresses, sizes and offsets are multiples of 8 bytes.

    Args:
        rows: int64[n], address of each row.
        pages: int64[n], the page of the pools to which each row is copied.
        parts: int64[p, 3], for each part of a row: address of its pool, bytes of a page there, offset of the part in the row.

    Raises:
        ValueError: the shapes do not fit.
    """
    require_contiguous(rows, pages, parts)
    if rows.shape != pages.shape or rows.dim() != 1 or parts.dim() != 2 or parts.shape[1] != 3:
        raise misfit(rows, pages, parts)
    count = len(rows) * len(parts)
    if count:
        _bring_pieces_kernel[(min(PROGRAMS, count),)](rows, pages, parts, len(rows), count, BLOCK=BLOCK, num_warps=WARPS)

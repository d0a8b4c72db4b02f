"""Computes the workspace of a FlashInfer plan like FlashInfer's scheduler (scheduler.cuh, 0.6.4).

The functions whose names end with _bytes return (float bytes, int bytes). Their arguments are:

| argument | meaning |
|---|---|
| shape | query heads, key/value heads, head size, page size |
| qo, kv | indptr columns of query tokens and of pages |
| graph | whether the plan is for a CUDA graph |
| sms | number of multiprocessors |
"""

from __future__ import annotations

from itertools import pairwise

Shape = tuple[int, int, int, int]


# Returns the number of pieces of at most `size` that `total` is divided into.
def cuts(total: int, size: int) -> int:
    return -(-total // size)


# Returns the sum of the sizes in bytes, each rounded up to a multiple of 16.
def aligned(sizes: list[int]) -> int:
    return sum(cuts(size, 16) * 16 for size in sizes)


def tile_rows(rows: int, dim: int) -> int:
    if rows > 64 and dim < 256:
        return 128
    return 64 if rows > 16 else 16


def fa2_bytes(qo: list[int], kv: list[int], shape: Shape, window_left: int, graph: bool, sms: int) -> tuple[int, int]:
    heads, kv_heads, dim, page_size = shape
    group, rows, tokens = heads // kv_heads, len(qo) - 1, qo[-1]
    packed = [(end - start) * group for start, end in pairwise(qo)]
    pages = [end - start for start, end in pairwise(kv)]
    tile = tile_rows((tokens - rows + 1) * group if graph else sum(packed) // rows, dim)
    if window_left >= 0:
        pages = [min(cuts(window_left + tile, page_size), count) for count in pages]
    most = 2 * sms // kv_heads
    low, high = max(128 // page_size, 1), max([1, *pages])
    longest = high
    while low < high:
        middle = (low + high) // 2
        if sum(cuts(length, tile) * cuts(max(count, 1), middle) for length, count in zip(packed, pages, strict=True)) > most:
            low = middle + 1
        else:
            high = middle
    split = graph or low < longest
    blocks = sum(cuts(length, tile) * cuts(max(count, 1), low) for length, count in zip(packed, pages, strict=True))
    if graph:
        padded = max(most, cuts(tokens * group, tile) + rows - 1)
        assert blocks <= padded
        blocks = padded
    ints = [4 * blocks] * 3 + [4 * (rows + 1), 4] + ([4] if graph else [])
    if not split:
        return 0, aligned(ints)
    floats = [heads * blocks * tile * dim * 4, heads * blocks * tile * 4]
    return aligned(floats), aligned([*ints, 4 * (tokens + 1), blocks])


def fa3_bytes(qo: list[int], shape: Shape, sms: int) -> tuple[int, int]:
    heads, _, dim, _ = shape
    tile, rows = 192 if dim == 64 else 128, len(qo) - 1
    works = sum(cuts(end - start, tile) for start, end in pairwise(qo))
    if cuts(qo[-1], tile) + rows - 1 <= 4096:
        works *= heads
    return 0, aligned([4 * works] * 7 + [4 * (sms + 1)])


def decode_bytes(kv: list[int], shape: Shape, graph: bool, sms: int, blocks_per_sm: int = 16) -> tuple[int, int]:
    """Returns the bytes of a decode plan.

    Args:
        kv: indptr of pages.
        shape: query heads, key/value heads, head size, page size.
        graph: whether the plan is for a CUDA graph.
        sms: number of multiprocessors.
        blocks_per_sm: largest number of thread blocks that fit on a multiprocessor. The library gets it from the device.
    """
    heads, kv_heads, dim, page_size = shape
    most, rows = blocks_per_sm * sms, len(kv) - 1
    pages = [end - start for start, end in pairwise(kv)]
    blocks, split = rows, False
    if rows * kv_heads < most:
        low, high = max(128 // page_size, 1), max(pages)
        while low < high:
            middle = (low + high) // 2
            if sum(cuts(count, middle) for count in pages) * kv_heads > most:
                low = middle + 1
            else:
                high = middle
        blocks = sum(cuts(count, low) for count in pages)
        split = graph or blocks > rows
    padded = most // kv_heads if graph and split else blocks
    ints = [4 * padded, 4 * padded, 4 * (padded + 1), 4]
    if not split:
        return 0, aligned(ints)
    return aligned([heads * padded * dim * 4, heads * padded * 4]), aligned([*ints, padded])

"""The numbers of rows for which decode graphs are captured."""

from __future__ import annotations


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns rising sizes up to max_rows. Small sizes are close together, because padding is a large share of a small batch."""
    steps = [1, 2, 4, *range(8, 32, 4), *range(32, 64, 8), *range(64, 256, 16), *range(256, max(257, max_rows), 64)]
    sizes = tuple(dict.fromkeys(size for size in (*steps, max_rows) if 0 < size <= max_rows))
    assert sizes == tuple(sorted(sizes)) and (not sizes or sizes[-1] == max_rows), "rising, up to all rows"
    return sizes

"""How sure a median is."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Of the median, by order statistics: the narrowest pair of values, as far from either end, that holds it so surely. Of too
    few values their least and largest."""
    ordered, count = sorted(values), len(values)
    outside, depth = 0.0, 0
    while depth < count // 2:
        outside += 2 * comb(count, depth) / 2**count
        if outside > 1 - confidence:
            break
        depth += 1
    edge = max(0, depth - 1)
    return ordered[edge], ordered[count - 1 - edge]

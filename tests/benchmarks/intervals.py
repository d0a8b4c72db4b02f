"""Confidence interval of a median."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns a confidence interval of the median by order statistics.

    The bounds are the k-th smallest and the k-th largest value, for the largest k that the confidence allows. With too few values
    for the confidence, the bounds are the smallest and the largest value.
    """
    ordered, count = sorted(values), len(values)
    outside, depth = 0.0, 0
    while depth < count // 2:
        outside += 2 * comb(count, depth) / 2**count
        if outside > 1 - confidence:
            break
        depth += 1
    edge = max(0, depth - 1)
    return ordered[edge], ordered[count - 1 - edge]

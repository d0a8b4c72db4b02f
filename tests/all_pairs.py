"""Cases that hold every pair of values of any two axes, in place of all combinations of all axes.

Greedy (Cohen, Dalal, Fredman, Patton: The AETG System, 1997), over the whole product: the next case is the one with most pairs
that no case holds yet, the first of them in the product's order. The same axes give the same cases everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Case = tuple[int, ...]  # of each axis, which value
Pair = tuple[int, int, int, int]  # an axis and its value, another and its value


def pairs_of(case: Case) -> set[Pair]:
    return {(first, case[first], second, case[second]) for first, second in itertools.combinations(range(len(case)), 2)}


def covering(sizes: Sequence[int]) -> list[Case]:
    """Cases that together hold every pair. sizes: how many values each axis has, of two axes at least."""
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes {list(sizes)}: two axes or more, each with a value")
    left = {case: pairs_of(case) for case in itertools.product(*map(range, sizes))}
    chosen: list[Case] = []
    while left:
        best = max(left, key=lambda case: len(left[case]))
        chosen.append(best)
        held = left[best]
        left = {case: rest for case, pairs in left.items() if (rest := pairs - held)}
    return sorted(chosen)


def each_pair(*, indirect: Sequence[str] = (), **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by its axes. An axis is a list of values, or a mapping of what they are called to what they are.

    indirect: axes that are the parameters of fixtures.
    """
    return _parametrized(axes, covering([len(axis) for axis in axes.values()]), indirect)


def each_value(*, indirect: Sequence[str] = (), **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """As each_pair, but only each value is in a case: for axes that meet nowhere in what is tested."""
    sizes = [len(axis) for axis in axes.values()]
    return _parametrized(axes, [tuple(index % size for size in sizes) for index in range(max(sizes))], indirect)


def _parametrized(
    axes: Mapping[str, Sequence[Any] | Mapping[str, Any]], cases: Sequence[Case], indirect: Sequence[str]
) -> pytest.MarkDecorator:
    values = [_named(axis) for axis in axes.values()]
    chosen = [[values[axis][index] for axis, index in enumerate(case)] for case in cases]
    return pytest.mark.parametrize(
        list(axes),
        [[value for _, value in case] for case in chosen],
        ids=["-".join(called for called, _ in case) for case in chosen],
        indirect=indirect,
    )


def _named(axis: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(axis.items()) if isinstance(axis, Mapping) else [(_called(value), value) for value in axis]


def _called(value: Any) -> str:
    return "x".join(map(_called, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")

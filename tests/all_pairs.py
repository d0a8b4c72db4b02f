"""Parametrizes a test with a few cases, which together contain every pair of values of any two axes, instead of the product.

The choice is greedy over the whole product (Cohen, Dalal, Fredman, Patton: The AETG System, 1997). Each step takes the case with
the most pairs that no earlier case has. On a tie, it takes the first such case in the product's order. Equal axes always give
equal cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Case = tuple[int, ...]  # for each axis, the index of its value
Pair = tuple[int, int, int, int]  # an axis, the index of its value, another axis, the index of its value


def pairs_of(case: Case) -> set[Pair]:
    return {(first, case[first], second, case[second]) for first, second in itertools.combinations(range(len(case)), 2)}


def covering(sizes: Sequence[int]) -> list[Case]:
    """Returns cases that together contain every pair of values of any two axes. `sizes` has the number of values of each axis."""
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes is {list(sizes)}; it needs two or more axes with at least one value each")
    left = {case: pairs_of(case) for case in itertools.product(*map(range, sizes))}
    chosen: list[Case] = []
    while left:
        best = max(left, key=lambda case: len(left[case]))
        chosen.append(best)
        held = left[best]
        left = {case: rest for case, pairs in left.items() if (rest := pairs - held)}
    return sorted(chosen)


def each_pair(*, indirect: Sequence[str] = (), **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with cases that together contain every pair of values of any two axes.

    An axis is a list of values, or a mapping of names to values.

    Args:
        indirect: names of the axes whose values are parameters of a fixture.
        axes: values of each axis, by the axis's name.
    """
    return _parametrized(axes, covering([len(axis) for axis in axes.values()]), indirect)


def each_value(*, indirect: Sequence[str] = (), **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with cases that together have each value of each axis. Use it for axes that the code never combines."""
    sizes = [len(axis) for axis in axes.values()]
    return _parametrized(axes, [tuple(index % size for size in sizes) for index in range(max(sizes))], indirect)


def _parametrized(
    axes: Mapping[str, Sequence[Any] | Mapping[str, Any]], cases: Sequence[Case], indirect: Sequence[str]
) -> pytest.MarkDecorator:
    values = [_ids_and_values(axis) for axis in axes.values()]
    chosen = [[values[axis][index] for axis, index in enumerate(case)] for case in cases]
    return pytest.mark.parametrize(
        list(axes),
        [[value for _, value in case] for case in chosen],
        ids=["-".join(called for called, _ in case) for case in chosen],
        indirect=indirect,
    )


def _ids_and_values(axis: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(axis.items()) if isinstance(axis, Mapping) else [(_value_id(value), value) for value in axis]


def _value_id(value: Any) -> str:
    return "x".join(map(_value_id, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")

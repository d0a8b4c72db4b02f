"""Parametrization by cases that contain every pair of values of any two axes, instead of all combinations of all axes.

The choice is greedy over the whole product (Cohen, Dalal, Fredman, Patton: The AETG System, 1997): the next case is the one with
most pairs that no earlier case has, and of several such cases the first in the product's order. Equal axes always give equal
cases.
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
    """Returns cases that together have every pair. `sizes` has the number of values of each of two or more axes."""
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
    """Parametrizes a test with cases that have every pair of values.

    An axis is a list of values, or a mapping of names to values.

    Args:
        indirect: axes that are the parameters of fixtures.
        axes: values of each axis by its name.
    """
    return _parametrized(axes, covering([len(axis) for axis in axes.values()]), indirect)


def each_value(*, indirect: Sequence[str] = (), **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes like each_pair, but only with each value in a case: for axes that the code never combines."""
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

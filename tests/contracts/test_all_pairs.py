"""covering() returns few cases that contain every pair of values, and the same cases each time."""

from __future__ import annotations

import itertools

import pytest

from tests.all_pairs import covering, each_pair, each_value, pairs_of

SIZES = [(2, 2), (1, 5), (2, 9, 5, 2), (3, 1, 1, 2)]


@pytest.mark.by_day(one_in=4)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_generated_cases_contain_every_pair_of_values(sizes: tuple[int, ...]) -> None:
    wanted = {
        (first, one, second, other)
        for first, second in itertools.combinations(range(len(sizes)), 2)
        for one, other in itertools.product(range(sizes[first]), range(sizes[second]))
    }
    assert set().union(*map(pairs_of, covering(sizes))) == wanted


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize(("sizes", "most"), [((3, 7), 21), ((2, 6, 6, 6), 42), ((4, 4, 4, 4, 4), 28)], ids=str)
def test_generated_cases_are_few_and_always_the_same(sizes: tuple[int, ...], most: int) -> None:
    cases = covering(sizes)
    assert len(set(cases)) == len(cases) <= most
    assert cases == covering(sizes)


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize("sizes", [(), (3,), (3, 0)], ids=str)
def test_axes_without_pairs_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two or more axes"):
        covering(sizes)


def test_id_of_a_pair_case_consists_of_the_values() -> None:
    mark = each_pair(rows=[1, 40], shape=[(64, 32), (16, 2)], bias={"plain": False, "bias": True})
    assert mark.args[0] == ["rows", "shape", "bias"]
    assert dict(zip(mark.kwargs["ids"], mark.args[1], strict=True)) == {
        "1-64x32-plain": [1, (64, 32), False],
        "1-16x2-bias": [1, (16, 2), True],
        "40-64x32-bias": [40, (64, 32), True],
        "40-16x2-plain": [40, (16, 2), False],
    }


def test_cases_of_each_value_contain_every_value_of_every_axis() -> None:
    mark = each_value(dtype=["a", "b"], shape=[(1, 2), (3, 4), (5, 6)])
    assert mark.kwargs["ids"] == ["a-1x2", "b-3x4", "a-5x6"]
    assert mark.args[1] == [["a", (1, 2)], ["b", (3, 4)], ["a", (5, 6)]]

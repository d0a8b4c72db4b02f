"""The gateway's pure parts, one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from services.gateway.metrics import UnlockedHistogram
from services.gateway.routing import WorkerLoad, least_requests

LOADS = st.builds(WorkerLoad, st.integers(0, 9), st.integers(0, 9))


@pytest.mark.parametrize(
    ("loads", "picked"),
    [([], None), ([(3, 0)], 0), ([(3, 0), (1, 9)], 1), ([(1, 5), (1, 2), (1, 7)], 1), ([(0, 1), (0, 1)], 0)],
    ids=["none", "only one", "fewest", "longest ago", "first of equals"],
)
def test_least_requests(loads: list[tuple[int, int]], picked: int | None) -> None:
    assert least_requests([WorkerLoad(*load) for load in loads]) == picked


@given(st.lists(LOADS, min_size=1))
def test_nobody_has_fewer_than_the_picked(loads: list[WorkerLoad]) -> None:
    index = least_requests(loads)
    assert index is not None
    assert loads[index].open_requests == min(load.open_requests for load in loads)


def test_histogram_counts_up_to_and_including_its_bounds() -> None:
    registry = CollectorRegistry()
    histogram = UnlockedHistogram("latency_seconds", "x", registry, (0.1, 1.0))
    for value, times in ((0.1, 2), (0.5, 1), (7.0, 1)):
        histogram.observe(value, times)
    lines = generate_latest(registry).decode().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines if "bucket" in line] == ["2.0", "3.0", "4.0"]
    assert "latency_seconds_count 4.0" in lines and "latency_seconds_sum 7.7" in lines

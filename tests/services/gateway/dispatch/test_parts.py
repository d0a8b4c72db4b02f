"""The gateway's pure parts, one at a time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from services.gateway.observe.histogram import UnlockedHistogram


def test_histogram_counts_up_to_and_including_its_bounds() -> None:
    registry = CollectorRegistry()
    histogram = UnlockedHistogram("latency_seconds", "x", registry, (0.1, 1.0), ("model",))
    for value, times in ((0.1, 2), (0.5, 1), (7.0, 1)):
        histogram.labels("a").observe(value, times)
    histogram.labels("b").observe(0.5)
    lines = generate_latest(registry).decode().splitlines()
    of_a = [line for line in lines if 'model="a"' in line]
    assert [line.rsplit(" ", 1)[1] for line in of_a if "bucket" in line] == ["2.0", "3.0", "4.0"]
    assert 'latency_seconds_count{model="a"} 4.0' in lines and 'latency_seconds_sum{model="a"} 7.7' in lines
    assert 'latency_seconds_count{model="b"} 1.0' in lines

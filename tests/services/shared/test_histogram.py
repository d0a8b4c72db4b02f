"""Tests of Prometheus histograms for single values and arrays."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily

from rootstock_llm.services.shared.observe.histogram import Histogram, LabelledHistogram

BOUNDS = (0.1, 1.0, 1_000_000)


def samples(histogram: Histogram) -> dict[tuple[str, str], float]:
    family = HistogramMetricFamily("x", "x", labels=("model",))
    histogram.add_to(family, ("a",))
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in family.samples}


def test_value_equal_to_an_upper_bound_counts_in_the_bucket_of_the_bound() -> None:
    registry = CollectorRegistry()
    histogram = LabelledHistogram("latency_seconds", "x", registry, (0.1, 1.0), ("model",))
    for value, times in ((0.1, 2), (0.5, 1), (7.0, 1)):
        histogram.labels("a").observe(value, times)
    histogram.labels("b").observe(0.5)
    lines = generate_latest(registry).decode().splitlines()
    of_a = [line for line in lines if 'model="a"' in line]
    assert [line.rsplit(" ", 1)[1] for line in of_a if "bucket" in line] == ["2.0", "3.0", "4.0"]
    assert 'latency_seconds_count{model="a"} 4.0' in lines and 'latency_seconds_sum{model="a"} 7.7' in lines
    assert 'latency_seconds_count{model="b"} 1.0' in lines


def test_histogram_counts_the_values_of_a_list_like_single_values() -> None:
    single, whole = Histogram(BOUNDS), Histogram(BOUNDS)
    values = [0.0, 0.1, 0.5, 1.0, 1.5, 2e6]
    for value in values:
        single.observe(value)
    whole.observe_all(values)
    whole.observe_all([])
    assert samples(single) == samples(whole)
    assert samples(whole)["x_bucket", "1000000.0"] == 5 and samples(whole)["x_bucket", "+Inf"] == 6

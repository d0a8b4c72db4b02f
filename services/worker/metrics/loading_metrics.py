"""Metrics of a model's size and loading times."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import GaugeMetricFamily as Gauge

from rootstock_llm.services.shared.observe.readings import Reading, Readings, Value
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo


def _seconds(info: LoadedInfo) -> dict[tuple[str, ...], float]:
    return {(phase,): seconds for phase, seconds in info.load_seconds}


class LoadMetrics(Readings[LoadedInfo]):
    """Metrics of one model. The label is the served model name. A model without weights and KV pool reports zeros."""

    labels = ("model_name",)
    rows = (
        Reading(
            Gauge,
            "rootstock_worker_load_seconds",
            "Seconds of each phase of loading, and of all phases.",
            _seconds,
            ("phase",),
        ),
        Reading(
            Gauge,
            "rootstock_worker_weight_bytes",
            "Bytes of the resident weights, including packed copies.",
            lambda info: info.weight_bytes,
        ),
        Reading(
            Gauge,
            "sglang:context_len",
            "Largest number of tokens of a request, prompt and output together.",
            lambda info: info.context_len,
        ),
        Reading(
            Gauge,
            "rootstock_worker_kv_pool_bytes",
            "Bytes of the KV pool: all pages, and the units of windows and states.",
            lambda info: info.pool_bytes,
        ),
    )


def _reload_seconds(reload_s: Callable[[], float | None]) -> Value:
    seconds = reload_s()
    return None if seconds is None else {("disk",): seconds}


class ReloadMetrics(Readings[Callable[[], float | None]]):
    """Metrics of weights that were released and loaded again. The label is the served model name."""

    labels = ("model_name",)
    rows = (
        Reading(
            Gauge,
            "sglang:weight_load_duration_seconds",
            "Seconds of the last reload of released weights.",
            _reload_seconds,
            ("source",),
        ),
    )

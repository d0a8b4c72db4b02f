"""What loading the model took and what it holds: figures that are fixed once the engine is built."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.exec.contracts.model_info import ModelInfo

LABELS = ("model_name",)


class LoadMetrics(Collector):
    """model: the name that clients use. A model without weights and without a KV pool tells zeros."""

    def __init__(self, model: str, info: ModelInfo) -> None:
        self._model = model
        self._seconds = info.load_seconds
        self._weight_bytes = info.weight_bytes
        self._kv_pool_bytes = info.num_pages * info.page_size * info.kv_bytes_per_token

    def collect(self) -> Iterator[Metric]:
        text = "Time that each phase of loading took, and the total, in seconds."
        phases = GaugeMetricFamily("rootstock_worker_load_seconds", text, labels=(*LABELS, "phase"))
        for phase, seconds in self._seconds:
            phases.add_metric((self._model, phase), seconds)
        yield phases
        for name, help_text, value in (
            ("rootstock_worker_weight_bytes", "Resident weights, packed copies included.", self._weight_bytes),
            ("rootstock_worker_kv_pool_bytes", "Size of the KV pool, keys and values of all layers.", self._kv_pool_bytes),
        ):
            family = GaugeMetricFamily(name, help_text, labels=LABELS)
            family.add_metric((self._model,), value)
            yield family

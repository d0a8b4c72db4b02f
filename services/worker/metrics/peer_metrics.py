"""KV that goes from worker to worker: what others have read here."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from services.shared.observe.readings import Reading, Readings, Value
from services.worker.exec.contracts.peer_pages import RoomServer


def _refused(server: RoomServer) -> Value:
    return {(reason,): count for reason, count in server.counts().refused.items()}


class PeerMetrics(Readings[RoomServer]):
    """The label: the name that clients use."""

    labels = ("model_name",)
    rows = (
        Reading(
            Counter,
            "rootstock_worker_kv_served_bytes",
            "Bytes of KV that decode workers have read here.",
            lambda server: server.counts().served_bytes,
        ),
        Reading(
            Counter,
            "rootstock_worker_kv_refused_reads",
            "What others have asked of the KV port and did not get, by why.",
            _refused,
            ("reason",),
        ),
        Reading(Gauge, "rootstock_worker_kv_connections", "Open at the KV port.", lambda server: server.counts().num_connections),
    )

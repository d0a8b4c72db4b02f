"""Metrics of KV transfers: PeerMetrics of a prefill worker, whose KV is read, and PeerReadMetrics of a decode worker."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from rootstock_llm.services.shared.observe.readings import Reading, Readings, Value
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer, PeerReader


def _refused(server: KvServer) -> Value:
    return {(reason,): count for reason, count in server.counts().refused.items()}


class PeerMetrics(Readings[KvServer]):
    """Metrics of a prefill worker's KV port. The label is the served model name."""

    labels = ("model_name",)
    rows = (
        Reading(
            Counter,
            "rootstock_worker_kv_served_bytes",
            "Bytes of KV that decode workers have read from this worker.",
            lambda server: server.counts().served_bytes,
        ),
        Reading(
            Counter,
            "rootstock_worker_kv_refused_reads",
            "Refused reads at the KV port, by reason.",
            _refused,
            ("reason",),
        ),
        Reading(
            Gauge,
            "rootstock_worker_kv_connections",
            "Open connections at the KV port.",
            lambda server: server.counts().num_connections,
        ),
    )


def _read_bytes(reader: PeerReader) -> Value:
    return {(transport,): count for transport, count in reader.read_bytes().items()}


def _slowest(reader: PeerReader) -> Value:
    slowest: dict[tuple[str, ...], float] = {}
    for rate in reader.rates():
        slowest[rate.transport,] = min(slowest.get((rate.transport,), rate.bytes_s), rate.bytes_s)
    return slowest


class PeerReadMetrics(Readings[PeerReader]):
    """Metrics of reads from prefill workers. The label `transport` is tcp, tls, nixl, or shm for shared memory."""

    labels = ("model_name",)
    rows = (
        Reading(
            Counter,
            "rootstock_worker_kv_read_bytes",
            "Bytes of KV that this worker has read from prefill workers.",
            _read_bytes,
            ("transport",),
        ),
        Reading(
            Gauge,
            "rootstock_worker_kv_read_bytes_per_second",
            "Bytes per second of the slowest prefill worker in its last read of at least 8 MiB; /server_info lists all workers.",
            _slowest,
            ("transport",),
        ),
    )

"""Metrics of KV transfers between workers: reads of this worker's pages, and this worker's reads from prefill workers."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from services.shared.observe.readings import Reading, Readings, Value
from services.worker.exec.contracts.peer_pages import PeerReader, RoomServer


def _refused(server: RoomServer) -> Value:
    return {(reason,): count for reason, count in server.counts().refused.items()}


class PeerMetrics(Readings[RoomServer]):
    """Metrics of the KV port. The label is the served model name."""

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
            "Bytes of KV that were read from prefill workers.",
            _read_bytes,
            ("transport",),
        ),
        Reading(
            Gauge,
            "rootstock_worker_kv_read_bytes_per_second",
            "Of the slowest prefill worker, in its last read of 8 MiB or more; /server_info on the admin port tells each.",
            _slowest,
            ("transport",),
        ),
    )

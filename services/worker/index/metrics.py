"""The prefix index's publisher as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.index.publisher import IndexPublisher


class PublisherMetrics(Collector):
    def __init__(self, publisher: IndexPublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        publisher, counts = self._publisher, self._publisher.counts
        for name, help_text, value in (
            ("rootstock_worker_redis_up", "Whether Redis took this worker's lease lately.", publisher.lease_held),
            (
                "rootstock_worker_index_pending_blocks",
                "Changes of blocks that Redis has yet to be told.",
                publisher.blocks.num_pending,
            ),
            ("rootstock_worker_index_held_blocks", "Blocks that this worker holds.", publisher.blocks.num_held),
        ):
            yield GaugeMetricFamily(name, help_text, value=float(value))
        for name, help_text, value in (
            ("rootstock_worker_index_stored_blocks", "Blocks that Redis was told are held here.", counts.stored),
            ("rootstock_worker_index_removed_blocks", "Blocks that Redis was told are gone.", counts.removed),
            ("rootstock_worker_index_events", "Events that Redis took.", counts.events),
            (
                "rootstock_worker_index_generations",
                "Times that the index began anew: start, flush, loss in Redis.",
                counts.generations,
            ),
            ("rootstock_worker_index_republished_blocks", "Blocks that had to be published again.", counts.republished),
            ("rootstock_worker_index_dropped_changes", "Changes whose publication failed.", counts.dropped),
            ("rootstock_worker_index_failures", "Times that Redis was away or refused.", counts.failures),
            (
                "rootstock_worker_index_swept_blocks",
                "Blocks of dead generations that were cleared from Redis.",
                publisher.num_swept,
            ),
        ):
            yield CounterMetricFamily(name, help_text, value=float(value))

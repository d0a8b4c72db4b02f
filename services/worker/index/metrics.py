"""Metrics of the publisher of the prefix index."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from rootstock_llm.services.shared.index.prefix_index import BlockTier
from rootstock_llm.services.shared.observe.readings import Reading, Readings
from rootstock_llm.services.worker.index.publisher import IndexPublisher

P = "rootstock_worker_index_"


class PublisherMetrics(Readings[IndexPublisher]):
    rows = (
        Reading(
            Gauge,
            "rootstock_worker_redis_up",
            "1 while this worker's lease in Redis is valid, otherwise 0.",
            lambda p: p.lease_held,
        ),
        Reading(Gauge, P + "pending_blocks", "Blocks whose last change is not in Redis yet.", lambda p: p.blocks.num_pending),
        Reading(Gauge, P + "held_blocks", "Blocks that this worker has cached in any tier.", lambda p: p.blocks.num_cached),
        Reading(
            Gauge,
            P + "host_blocks",
            "Blocks that are in the host tier and not on the device.",
            lambda p: p.blocks.num_in(BlockTier.HOST),
        ),
        Reading(
            Gauge, P + "storage_blocks", "Blocks that are only in the storage tier.", lambda p: p.blocks.num_in(BlockTier.STORAGE)
        ),
        Reading(Counter, P + "stored_blocks", "Blocks that were published to Redis.", lambda p: p.counts.stored),
        Reading(Counter, P + "removed_blocks", "Blocks that were removed from Redis.", lambda p: p.counts.removed),
        Reading(Counter, P + "events", "Batches of changes that were published to Redis.", lambda p: p.counts.events),
        Reading(
            Counter,
            P + "generations",
            "Begun generations of this worker's index: at the start, and after a reset, a failed write or a loss in Redis.",
            lambda p: p.counts.generations,
        ),
        Reading(
            Counter,
            P + "republished_blocks",
            "Blocks that were published again under a new generation.",
            lambda p: p.counts.republished,
        ),
        Reading(
            Counter,
            P + "dropped_changes",
            "Changed blocks whose publication failed; they are published again under a new generation.",
            lambda p: p.counts.dropped,
        ),
        Reading(
            Counter,
            P + "failures",
            "Failed attempts to renew the lease or to publish blocks.",
            lambda p: p.counts.failures,
        ),
        Reading(Counter, P + "swept_blocks", "Blocks of dead generations that were removed from Redis.", lambda p: p.num_swept),
    )

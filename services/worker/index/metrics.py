"""The metrics of the prefix index's publisher."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from services.shared.index.block_tier import BlockTier
from services.shared.observe.readings import Reading, Readings
from services.worker.index.publisher import IndexPublisher

P = "rootstock_worker_index_"


class PublisherMetrics(Readings[IndexPublisher]):
    rows = (
        Reading(Gauge, "rootstock_worker_redis_up", "Whether Redis took this worker's lease lately.", lambda p: p.lease_held),
        Reading(Gauge, P + "pending_blocks", "Changes of blocks that Redis has yet to be told.", lambda p: p.blocks.num_pending),
        Reading(Gauge, P + "held_blocks", "Blocks that this worker holds, in any tier.", lambda p: p.blocks.num_held),
        Reading(Gauge, P + "host_blocks", "Of these, those in the host tier.", lambda p: p.blocks.num_in(BlockTier.HOST)),
        Reading(Gauge, P + "storage_blocks", "Of these, those in the storage.", lambda p: p.blocks.num_in(BlockTier.STORAGE)),
        Reading(Counter, P + "stored_blocks", "Blocks that Redis was told are held here.", lambda p: p.counts.stored),
        Reading(Counter, P + "removed_blocks", "Blocks that Redis was told are gone.", lambda p: p.counts.removed),
        Reading(Counter, P + "events", "Events that Redis took.", lambda p: p.counts.events),
        Reading(
            Counter,
            P + "generations",
            "Times that the index began anew: start, flush, loss in Redis.",
            lambda p: p.counts.generations,
        ),
        Reading(Counter, P + "republished_blocks", "Blocks that had to be published again.", lambda p: p.counts.republished),
        Reading(Counter, P + "dropped_changes", "Changes whose publication failed.", lambda p: p.counts.dropped),
        Reading(Counter, P + "failures", "Times that Redis was away or refused.", lambda p: p.counts.failures),
        Reading(Counter, P + "swept_blocks", "Blocks of dead generations that were cleared from Redis.", lambda p: p.num_swept),
    )

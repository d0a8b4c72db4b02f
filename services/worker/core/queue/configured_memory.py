"""The KV memory that a configuration asks for."""

from __future__ import annotations

from services.worker.core.contracts.config import EvictionPolicy, SchedulerConfig
from services.worker.core.contracts.tree_name import is_retired
from services.worker.core.kv import eviction
from services.worker.core.kv.backup_queue import BackupQueue
from services.worker.core.kv.cache_events import CacheEventLog
from services.worker.core.kv.eviction import EvictionOrder
from services.worker.core.kv.memory import KVMemory, KVShape

ORDERS: dict[EvictionPolicy, EvictionOrder] = {
    EvictionPolicy.LRU: eviction.lru,
    EvictionPolicy.LFU: eviction.lfu,
    EvictionPolicy.FIFO: eviction.fifo,
    EvictionPolicy.PRIORITY: eviction.priority,
}


def configured_memory(
    config: SchedulerConfig, events: CacheEventLog | None = None, backups: BackupQueue | None = None
) -> KVMemory:
    shape = KVShape(config.num_pages, config.page_size, config.max_running_requests, config.max_pages_per_request)
    return KVMemory(shape, ORDERS[config.eviction_policy], config.enable_radix_cache, events, backups, is_retired)

"""Which cached pages go first: a node's place in the order of eviction, per policy. Lower goes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.worker.core.contracts.config import EvictionPolicy

if TYPE_CHECKING:
    from services.worker.core.kv.radix_cache import TreeNode

EvictionKey = tuple[int, int, int]


def _lru(node: TreeNode) -> EvictionKey:
    return node.holds > 0, 0, node.stamp


def _lfu(node: TreeNode) -> EvictionKey:
    return node.holds > 0, node.hits, node.stamp


def _fifo(node: TreeNode) -> EvictionKey:
    return node.holds > 0, 0, node.born


def _priority(node: TreeNode) -> EvictionKey:
    return node.holds > 0, -node.rank, node.stamp


KEYS: dict[EvictionPolicy, Callable[[TreeNode], EvictionKey]] = {
    EvictionPolicy.LRU: _lru,
    EvictionPolicy.LFU: _lfu,
    EvictionPolicy.FIFO: _fifo,
    EvictionPolicy.PRIORITY: _priority,
}

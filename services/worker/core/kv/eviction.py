"""The orders of eviction, one per policy. The node with the lowest key is evicted first.

Nodes that sessions hold come last, unless a lower tier has their pages.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.core.kv.tree_node import TreeNode

EvictionKey = tuple[int, int, int]
EvictionOrder = Callable[[TreeNode], EvictionKey]


def lru(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, 0, node.stamp


def lfu(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, node.hits, node.stamp


def fifo(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, 0, node.born


def priority(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, -node.rank, node.stamp

"""The orders of eviction, one per policy. A node with a lower key is evicted first.

Nodes that sessions hold are last, unless another tier has them.
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

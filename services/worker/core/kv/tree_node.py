"""A node of the radix tree. RadixCache writes it; the event log, the cache units and the backups write only their own fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node of the radix tree, with the edge that leads to it."""

    parent: TreeNode | None  # None for a root. It stays set after the node's eviction, so that unhold() can follow the path.
    key: bytes  # tokens of the edge as bytes; the tree's name for a root
    pages: I32  # int32[n], one for each page of tokens in `key`
    depth: int  # pages from the root to the end of this node
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0  # locks on this node and its descendants
    holds: int = 0  # holds of sessions on this node and its descendants
    hits: int = 0  # admissions on a path through this node
    born: int = 0  # the tree's clock when the node was created
    stamp: int = 0  # the tree's clock when the node was last matched or inserted
    rank: int = 0  # lowest, most urgent rank of the requests that inserted this path
    blocks: tuple[bytes, ...] = ()  # hashes of the blocks whose last token is in this edge
    page_keys: tuple[bytes, ...] = ()  # page keys of the node's first pages; the other page keys are computed when needed
    units: list[I32] = field(default_factory=list)  # units of each page by cache group, NO_UNIT for none; see CacheUnits
    offered: bool = False  # whether the node is in the backup queue
    backed: bool = False  # whether a lower tier has the whole node
    entry: int = 0  # number of the node's valid entry in the eviction queue; 0: the queue has no valid entry for the node
    gone: bool = False  # whether the node has left the tree


def backwards(end: TreeNode, first: int, stop: int | None = None) -> list[tuple[TreeNode, int, int]]:
    """Returns (node, index of the page in the node, index in the sequence) of the pages from `first` to `stop`, last first.

    Args:
        end: node at the end of the pages, or after it.
        first: first page.
        stop: index after the last page; None for all pages up to the end of the node.
    """
    found = []
    node = end
    last = end.depth if stop is None else stop
    while node.parent is not None and node.depth > first:
        begin = node.parent.depth
        found += [(node, at - begin, at) for at in range(min(node.depth, last) - 1, max(begin, first) - 1, -1)]
        node = node.parent
    return found


def page_of(end: TreeNode, page: int) -> tuple[TreeNode, int]:
    """Returns the node that has page `page` of the sequence that ends with the node `end`, and the page's index in the node."""
    node = end
    while node.parent is not None and node.parent.depth > page:
        node = node.parent
    assert node.parent is not None and node.parent.depth <= page < node.depth, "the page is on the path"
    return node, page - node.parent.depth

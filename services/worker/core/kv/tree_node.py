"""An edge of the radix tree and its state. RadixCache writes it; CacheEventLog writes `blocks`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node with the edge that leads to it."""

    parent: TreeNode | None  # None for a root; stays after the eviction, so that holds can be taken back
    key: bytes  # the edge's tokens; of a root, the namespace
    pages: I32  # int32[len(key) / bytes of a page]
    depth: int  # pages from the root to the end of this node
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0  # locks on this node or below it
    holds: int = 0  # holds of sessions on this node or below it
    hits: int = 0  # admissions on a path through this node
    born: int = 0  # clock of the tree when the node was made
    stamp: int = 0  # clock of the tree at the last use
    rank: int = 0  # lowest, and so most urgent, rank of the requests that brought it
    blocks: tuple[bytes, ...] = ()  # hashes of the blocks whose last token is in this edge
    page_keys: tuple[bytes, ...] = ()  # of the first pages; of all pages once they were needed
    offered: bool = False  # it is in the backup queue
    backed: bool = False  # another tier has the whole node
    entry: int = 0  # number of its valid entry in the eviction queue; 0 for none
    gone: bool = False  # it was evicted

"""An edge of the radix tree, and what is known of it. Written by RadixCache; `blocks` by CacheEventLog."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class TreeNode:
    """key: the tokens of this edge (a root's: its namespace); pages: int32[len(key) / page bytes]; depth: pages from the
    root to this node's end. hits: admissions that went through. born, stamp: when made and when last used. rank: of the most
    urgent request that brought it, lower is more urgent. blocks: hashes of the blocks whose last token lies in this edge.
    page_keys: of its first pages, all of them where they were asked for. offered: it waits to be copied down the tiers; backed:
    it was, as a whole. entry: number of its entry in the eviction queue, 0 for none. gone: evicted; `parent` stays, for holds to
    be taken back.
    """

    parent: TreeNode | None
    key: bytes
    pages: I32
    depth: int
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    holds: int = 0
    hits: int = 0
    born: int = 0
    stamp: int = 0
    rank: int = 0
    blocks: tuple[bytes, ...] = ()
    page_keys: tuple[bytes, ...] = ()
    offered: bool = False
    backed: bool = False
    entry: int = 0
    gone: bool = False

"""The events for the prefix index: newly cached blocks, blocks that moved to another tier or were evicted, and resets.

A block has BLOCK_TOKENS tokens. Its name is a hash over its tokens and the name of the previous block, so that no token ids leave
the worker. On the device, a block belongs to the tree edge with its last token, and is removed with this edge. Eviction removes
suffixes first, so that the tree has the block's other tokens until then. TierBlocks reports the blocks of the lower tiers.

With cache groups, a prefix hit ends only at page ends that have the units of all groups. HitEnds reports such page ends as
marks of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from rootstock_llm.services.shared.index.prefix_index import END_MARK, BlockTier
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode

BLOCK_TOKENS = 64
MOST_CHANGES = 4096  # largest number of changed blocks in one CacheEvents
_TOKEN_BYTES = 4

BlockHasher = Callable[[bytes, bytes], bytes]
"""Makes a block's hash from the previous block's hash (or the root hash) and the block's tokens as little-endian int32."""

RootHasher = Callable[[str], bytes]
"""Makes the root hash, which precedes the first block of a prompt, from the namespace (cache salt, adapter)."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Changes of the cached blocks. No block hash is in two of the tuples."""

    cleared: bool  # whether the reader drops all blocks of this worker before it applies the other fields
    stored: tuple[bytes, ...]  # blocks that are now on the device
    removed: tuple[bytes, ...]  # blocks that are now in no tier
    host: tuple[bytes, ...] = ()  # blocks that are now in the host tier and not on the device
    storage: tuple[bytes, ...] = ()  # blocks that are now in the storage tier, and neither in the host tier nor on the device


class CacheEventLog:
    """The changes that were not sent to the prefix index yet. RadixCache and TierBlocks record them; the publisher takes them."""

    def __init__(self, page_size: int, block_hash: BlockHasher, root_hash: RootHasher, reports_storage: bool = True) -> None:
        # Whether blocks in the storage are reported. False if other workers read the same storage, because these blocks then do
        # not favour this worker.
        self.reports_storage = reports_storage
        self._page_size = page_size
        self._block_hash = block_hash
        self._root_hash = root_hash
        self._cleared = False
        # For a device block: number of tree edges with the block, which can exceed 1 if pages are larger than blocks.
        # For a mark: number of hit ends with the mark.
        self._num_edges: Counter[bytes] = Counter()
        self._below: dict[bytes, BlockTier] = {}  # slowest tier of each block that the lower tiers have completely
        # Changed blocks, each with the tier that the last message reported, or None if it reported no tier.
        self._changed: dict[bytes, BlockTier | None] = {}

    @property
    def has_more(self) -> bool:
        """Whether take() has changes to return."""
        return self._cleared or bool(self._changed)

    def stored(self, node: TreeNode) -> None:
        """Computes the names of the blocks that end in a new edge, and records the blocks as cached on the device."""
        parent = node.parent
        assert parent is not None
        begin = parent.depth * self._page_size
        inside = begin % BLOCK_TOKENS
        tokens = self._tokens_before(parent, inside) + node.key
        assert len(tokens) == inside * _TOKEN_BYTES + len(node.key), "a path has `depth` pages of tokens"
        link, names = self._last_hash(parent), []
        size = BLOCK_TOKENS * _TOKEN_BYTES
        for at in range(0, len(tokens) - size + 1, size):
            link = self._block_hash(link, tokens[at : at + size])
            names.append(link)
            self._add(link)
        node.blocks = tuple(names)

    def removed(self, node: TreeNode) -> None:
        for name in node.blocks:
            self._drop(name)

    def mark_of(self, node: TreeNode, end: int) -> bytes | None:
        """Returns the mark of the last block before the page end `end`, or None if no block ends before it.

        `node` is at the page end or after it, and `end` is a number of pages.
        """
        num_blocks = end * self._page_size // BLOCK_TOKENS
        if not num_blocks:
            return None
        walk = node
        while walk.parent is not None and walk.parent.depth * self._page_size >= num_blocks * BLOCK_TOKENS:
            walk = walk.parent
        assert walk.parent is not None, "the block ends in an edge"
        block = walk.blocks[num_blocks - 1 - walk.parent.depth * self._page_size // BLOCK_TOKENS]
        return self._block_hash(block, END_MARK)

    def end_kept(self, mark: bytes) -> None:
        """Records a page end at which a prefix hit can end now, by its mark."""
        self._add(mark)

    def end_lost(self, mark: bytes) -> None:
        """Undoes one end_kept()."""
        self._drop(mark)

    def _add(self, name: bytes) -> None:
        if name not in self._num_edges:
            self._record_change(name)
        self._num_edges[name] += 1

    def _drop(self, name: bytes) -> None:
        assert self._num_edges[name] > 0, "only blocks of an edge are removed"
        if self._num_edges[name] > 1:
            self._num_edges[name] -= 1
            return
        self._record_change(name)
        del self._num_edges[name]

    def below(self, name: bytes, tier: BlockTier | None) -> None:
        """Records where the tiers below the device have a block.

        Args:
            name: hash of the block.
            tier: the slowest tier with a page of the block, or None if the lower tiers do not have all of its pages.
        """
        if self._below.get(name) is tier:
            return
        self._record_change(name)
        if tier is None:
            del self._below[name]
        else:
            self._below[name] = tier

    def tier_below(self, name: bytes) -> BlockTier | None:
        """Returns the tier that the last call of below() recorded for the block, or None."""
        return self._below.get(name)

    def cleared(self) -> None:
        """Records that the device has lost all blocks. The blocks of the lower tiers are reported again."""
        self._num_edges.clear()
        self._report_anew()

    def flushed(self) -> None:
        """Shortens the pending events after a flush.

        If the flush removed more blocks than are left, the events become a reset and the list of the blocks that are left.
        """
        gone = sum(before is not None and self._tier(name) is None for name, before in self._changed.items())
        if gone > len(self._num_edges.keys() | self._below.keys()):
            self._report_anew()

    def split(self, names: tuple[bytes, ...], upper_depth: int, lower_depth: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Divides the blocks of an edge that is split.

        Args:
            names: blocks that end in the edge.
            upper_depth: number of pages from the root to the end of the upper part.
            lower_depth: number of pages from the root to the end of the lower part.

        Returns:
            The blocks that end in the upper part, and the blocks that end in the lower part.
        """
        size = self._page_size
        below = lower_depth * size // BLOCK_TOKENS - upper_depth * size // BLOCK_TOKENS
        cut = len(names) - below
        assert 0 <= cut <= len(names), "an edge has the names of the blocks that end in it"
        return names[:cut], names[cut:]

    def take(self) -> CacheEvents | None:
        """Returns up to MOST_CHANGES changes that no earlier call has returned, or None."""
        by_tier: dict[BlockTier | None, list[bytes]] = {BlockTier.DEVICE: [], BlockTier.HOST: [], BlockTier.STORAGE: [], None: []}
        count = 0
        for name in list(islice(self._changed, MOST_CHANGES)):
            tier = self._tier(name)
            if self._changed.pop(name) is not tier:
                by_tier[tier].append(name)
                count += 1
        if not (self._cleared or count):
            return None
        cleared, self._cleared = self._cleared, False
        stored, removed, host, storage = (
            tuple(by_tier[tier]) for tier in (BlockTier.DEVICE, None, BlockTier.HOST, BlockTier.STORAGE)
        )
        return CacheEvents(cleared, stored, removed, host, storage)

    def _tier(self, name: bytes) -> BlockTier | None:
        return BlockTier.DEVICE if name in self._num_edges else self._below.get(name)

    def _record_change(self, name: bytes) -> None:
        """Records the present tier of a block that is about to move to another tier."""
        if name not in self._changed:
            self._changed[name] = self._tier(name)

    def _report_anew(self) -> None:
        self._cleared = True
        self._changed = dict.fromkeys([*self._num_edges, *self._below])

    def _tokens_before(self, node: TreeNode, count: int) -> bytes:
        """Returns the last `count` tokens of the path to `node`."""
        parts: list[bytes] = []
        need = count * _TOKEN_BYTES
        walk: TreeNode | None = node
        while need > 0 and walk is not None and walk.parent is not None:
            parts.append(walk.key[-need:])
            need -= len(parts[-1])
            walk = walk.parent
        return b"".join(reversed(parts))

    def _last_hash(self, node: TreeNode) -> bytes:
        while node.parent is not None:
            if node.blocks:
                return node.blocks[-1]
            node = node.parent
        return self._root_hash(node.key.decode())

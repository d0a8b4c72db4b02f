"""What the prefix index is told: blocks that became cached here, blocks that went to another tier or for good, everything gone.

A block is BLOCK_TOKENS tokens, full blocks only, named by a hash chained over its prefix; token ids leave the worker in
no form. On the device a block belongs to the tree edge that holds its last token, and goes with it: eviction takes suffixes
first. What the tiers below it have is said by KeptBlocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from services.shared.index.block_tier import BlockTier
from services.worker.core.kv.tree_node import TreeNode

BLOCK_TOKENS = 64
MOST_TOLD = 4096  # changes that are told at once
_TOKEN_BYTES = 4

BlockHasher = Callable[[bytes, bytes], bytes]
"""(hash of the block before, or a root's; the block's tokens as little-endian int32) -> the block's hash."""

RootHasher = Callable[[str], bytes]
"""A namespace (cache salt, adapter) -> what the first block of a prompt is chained to."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """`cleared` holds first. Then each hash stands in one of the others at most, by where the block is: stored on the device,
    host and storage in the tiers below it and not on the device any more, removed nowhere. A hash that came and went is in
    none."""

    cleared: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    host: tuple[bytes, ...] = ()
    storage: tuple[bytes, ...] = ()


class CacheEventLog:
    """Written by the radix tree and KeptBlocks, taken by the worker's publisher once per step. tells_storage: what the storage
    has is this worker's alone, so that it says something about where a request had best go."""

    def __init__(self, page_size: int, block_hash: BlockHasher, root_hash: RootHasher, tells_storage: bool = True) -> None:
        self.tells_storage = tells_storage
        self._page_size = page_size
        self._block_hash = block_hash
        self._root_hash = root_hash
        self._cleared = False
        self._held: Counter[bytes] = Counter()  # edges that hold a block: more than one where pages are larger than blocks
        self._below: dict[bytes, BlockTier] = {}  # blocks that are whole in the tiers below, and in which
        self._changed: dict[bytes, BlockTier | None] = {}  # what was told last of blocks that have changed since, None: nothing

    @property
    def has_more(self) -> bool:
        """There is more to be told than was taken."""
        return self._cleared or bool(self._changed)

    def stored(self, node: TreeNode) -> None:
        """Names the blocks that end in a new edge."""
        parent = node.parent
        assert parent is not None
        begin = parent.depth * self._page_size
        inside = begin % BLOCK_TOKENS
        tokens = self._tokens_before(parent, inside) + node.key
        assert len(tokens) == inside * _TOKEN_BYTES + len(node.key), "a path holds as many tokens as it is deep"
        link, names = self._last_hash(parent), []
        size = BLOCK_TOKENS * _TOKEN_BYTES
        for at in range(0, len(tokens) - size + 1, size):
            link = self._block_hash(link, tokens[at : at + size])
            names.append(link)
            if link not in self._held:
                self._changes(link)
            self._held[link] += 1
        node.blocks = tuple(names)

    def removed(self, node: TreeNode) -> None:
        for name in node.blocks:
            assert self._held[name] > 0, "a block goes that no edge holds"
            if self._held[name] > 1:
                self._held[name] -= 1
                continue
            self._changes(name)
            del self._held[name]

    def below(self, name: bytes, tier: BlockTier | None) -> None:
        """The slowest tier below the device that a page of the block lies in; None: they do not have all of it."""
        if self._below.get(name) is tier:
            return
        self._changes(name)
        if tier is None:
            del self._below[name]
        else:
            self._below[name] = tier

    def tier_below(self, name: bytes) -> BlockTier | None:
        """As below() was last told."""
        return self._below.get(name)

    def cleared(self) -> None:
        """The device has nothing any more. What is below it is told anew."""
        self._held.clear()
        self._begin_anew()

    def flushed(self) -> None:
        """Much may have gone at once. Where that is more than what is left, everything told is void and the rest told again."""
        gone = sum(before is not None and self._tier(name) is None for name, before in self._changed.items())
        if gone > len(self._held.keys() | self._below.keys()):
            self._begin_anew()

    def split(self, names: tuple[bytes, ...], upper_depth: int, lower_depth: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Which of an edge's blocks end in its upper part (down to page upper_depth) and which in its lower one."""
        size = self._page_size
        below = lower_depth * size // BLOCK_TOKENS - upper_depth * size // BLOCK_TOKENS
        cut = len(names) - below
        assert 0 <= cut <= len(names), "an edge names the blocks that end in it"
        return names[:cut], names[cut:]

    def take(self) -> CacheEvents | None:
        """What has happened since the last call: of very much the first part. None: nothing."""
        told: dict[BlockTier | None, list[bytes]] = {BlockTier.DEVICE: [], BlockTier.HOST: [], BlockTier.STORAGE: [], None: []}
        count = 0
        for name in list(islice(self._changed, MOST_TOLD)):
            tier = self._tier(name)
            if self._changed.pop(name) is not tier:
                told[tier].append(name)
                count += 1
        if not (self._cleared or count):
            return None
        cleared, self._cleared = self._cleared, False
        stored, removed, host, storage = (
            tuple(told[tier]) for tier in (BlockTier.DEVICE, None, BlockTier.HOST, BlockTier.STORAGE)
        )
        return CacheEvents(cleared, stored, removed, host, storage)

    def _tier(self, name: bytes) -> BlockTier | None:
        return BlockTier.DEVICE if name in self._held else self._below.get(name)

    def _changes(self, name: bytes) -> None:
        """Called before it does."""
        if name not in self._changed:
            self._changed[name] = self._tier(name)

    def _begin_anew(self) -> None:
        self._cleared = True
        self._changed = dict.fromkeys([*self._held, *self._below])

    def _tokens_before(self, node: TreeNode, count: int) -> bytes:
        """The last `count` tokens of the path to `node`."""
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

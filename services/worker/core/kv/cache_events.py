"""The events for the prefix index: blocks that became cached here, blocks that left for another tier or for good, and resets.

A block has BLOCK_TOKENS tokens and is named by a hash that is chained over its prefix, so no token ids leave the worker. Only
full blocks have names. On the device a block belongs to the tree edge that holds its last token, and leaves with it, because
eviction takes suffixes first. KeptBlocks reports the blocks of the tiers below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from services.shared.index.block_tier import BlockTier
from services.worker.core.kv.tree_node import TreeNode

BLOCK_TOKENS = 64
MOST_TOLD = 4096  # changes per message
_TOKEN_BYTES = 4

BlockHasher = Callable[[bytes, bytes], bytes]
"""Makes a block's hash from the hash of the block before (or of the root) and the block's tokens as little-endian int32."""

RootHasher = Callable[[str], bytes]
"""Makes the hash that the first block of a prompt is chained to, from the namespace (cache salt, adapter)."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Changes of the cached blocks. Each hash is in at most one of the tuples, by the present place of the block."""

    cleared: bool  # all earlier events are void; applies before the others
    stored: tuple[bytes, ...]  # on the device
    removed: tuple[bytes, ...]  # in no tier
    host: tuple[bytes, ...] = ()  # in the host tier and not on the device
    storage: tuple[bytes, ...] = ()  # in the storage tier and not above it


class CacheEventLog:
    """The changes that the index has not received. The radix tree and KeptBlocks write them, the publisher takes them."""

    def __init__(self, page_size: int, block_hash: BlockHasher, root_hash: RootHasher, tells_storage: bool = True) -> None:
        self.tells_storage = tells_storage  # the storage belongs to this worker alone, so its blocks matter for routing
        self._page_size = page_size
        self._block_hash = block_hash
        self._root_hash = root_hash
        self._cleared = False
        self._held: Counter[bytes] = Counter()  # edges that hold a block; more than one if pages are larger than blocks
        self._below: dict[bytes, BlockTier] = {}  # blocks that the tiers below have completely, with their slowest tier
        self._changed: dict[bytes, BlockTier | None] = {}  # changed blocks, with the tier in the last message; None: in no tier

    @property
    def has_more(self) -> bool:
        """Whether changes are left after take()."""
        return self._cleared or bool(self._changed)

    def stored(self, node: TreeNode) -> None:
        """Names the blocks that end in a new edge, and records them."""
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
        """Records the slowest tier below the device that has a page of the block; None if they do not have all pages."""
        if self._below.get(name) is tier:
            return
        self._changes(name)
        if tier is None:
            del self._below[name]
        else:
            self._below[name] = tier

    def tier_below(self, name: bytes) -> BlockTier | None:
        """Returns the tier in the last call of below() for the block."""
        return self._below.get(name)

    def cleared(self) -> None:
        """Records that the device has no blocks. The blocks of the tiers below are reported again."""
        self._held.clear()
        self._begin_anew()

    def flushed(self) -> None:
        """Reports a reset and the remaining blocks instead of the removed blocks, if more were removed than remain."""
        gone = sum(before is not None and self._tier(name) is None for name, before in self._changed.items())
        if gone > len(self._held.keys() | self._below.keys()):
            self._begin_anew()

    def split(self, names: tuple[bytes, ...], upper_depth: int, lower_depth: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the blocks that end in the upper part of an edge (down to page upper_depth), and those of the lower part."""
        size = self._page_size
        below = lower_depth * size // BLOCK_TOKENS - upper_depth * size // BLOCK_TOKENS
        cut = len(names) - below
        assert 0 <= cut <= len(names), "an edge names the blocks that end in it"
        return names[:cut], names[cut:]

    def take(self) -> CacheEvents | None:
        """Returns the changes since the last call, at most MOST_TOLD of them; None if there are none."""
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
        """Records the tier of a block that is about to change."""
        if name not in self._changed:
            self._changed[name] = self._tier(name)

    def _begin_anew(self) -> None:
        self._cleared = True
        self._changed = dict.fromkeys([*self._held, *self._below])

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

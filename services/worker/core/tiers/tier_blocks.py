"""The blocks of the prefix index in the tiers below the device, each with the slowest tier of its pages.

The name of a block is computed from tokens, which only the radix tree has; page keys do not reveal them. Each copy of pages to a
lower tier therefore carries the names of the pages' blocks, and a storage stores these names with the pages. A block is forgotten
when no lower tier has a page of it, so that the number of known blocks is bounded. With cache groups, the marks of page ends at
which hits can end are handled like blocks. Tiers is the owner.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from rootstock_llm.services.shared.index.prefix_index import BlockTier
from rootstock_llm.services.worker.core.contracts.transfers import TierBlock
from rootstock_llm.services.worker.core.kv.cache_events import BLOCK_TOKENS, CacheEventLog
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.tiers.stored_units import StoredEnd

WEIGHTS_BYTES = 8
MOST_CHECKED = 4096  # largest number of blocks that one call of violations() checks


class TierBlocks:
    """The known blocks of the lower tiers. Every change of a block's tier goes to the log of cache events."""

    def __init__(
        self, events: CacheEventLog, host: Container[bytes], stored: Container[bytes], page_size: int, revision: str
    ) -> None:
        """Starts without blocks.

        Args:
            events: log of cache events.
            host: page keys in the host tier. After each change of `host` or `stored`, the caller calls changed().
            stored: page keys in the storage.
            page_size: tokens of a page.
            revision: revision of the weights.
        """
        self._events, self._host, self._stored, self._page_size = events, host, stored, page_size
        self._weights = _weights(revision)
        self._keys: dict[bytes, tuple[bytes, ...]] = {}  # page keys of a block, by block name
        self._names: dict[bytes, tuple[bytes, ...]] = {}  # names of the blocks with tokens in a page, by page key

    def __len__(self) -> int:
        return len(self._keys)

    def unknown(self, path: Sequence[TreeNode], keys: Sequence[bytes], first: int, end: int) -> list[TierBlock]:
        """Returns the still unknown blocks with tokens in the pages [first, end) of a path.

        Args:
            path: the nodes of the path, without the root.
            keys: page keys of the path's first pages. Blocks that end after these pages are left out.
            first: index of the first page.
            end: index after the last page.
        """
        names = [name for node in path for name in node.blocks]
        size = self._page_size
        out: list[TierBlock] = []
        for at in range(first * size // BLOCK_TOKENS, min(-(-end * size // BLOCK_TOKENS), len(names))):
            begin, after = at * BLOCK_TOKENS // size, -(-(at + 1) * BLOCK_TOKENS // size)
            if after > len(keys):
                break
            if names[at] not in self._keys:
                out.append(TierBlock(names[at], self._weights, tuple(keys[begin:after])))
        return out

    def marks(self, node: TreeNode, ends: Iterable[StoredEnd]) -> list[TierBlock]:
        """Returns the marks of page ends at which hits can end, as blocks with the keys of the page ends.

        `node` is at the page ends or after them.
        """
        found = ((self._events.mark_of(node, each.end), each.keys) for each in ends)
        return [TierBlock(mark, self._weights, keys) for mark, keys in found if mark is not None]

    def ending(self, keys: Iterable[bytes]) -> tuple[TierBlock, ...]:
        """Returns the known blocks whose last page has one of the keys."""
        named = ((name, key) for key in keys for name in self._names.get(key, ()))
        return tuple(TierBlock(name, self._weights, self._keys[name]) for name, key in named if self._keys[name][-1] == key)

    def add(self, blocks: Iterable[TierBlock]) -> None:
        """Adds blocks of which a lower tier has a page. Ignores blocks that were computed with other weights."""
        for block in blocks:
            if block.weights != self._weights or not self._is_anywhere(block.keys):
                continue
            if block.name not in self._keys:
                self._add(block.name, block.keys)
            self._report(block.name)

    def changed(self, keys: Iterable[bytes]) -> None:
        """Updates the blocks of pages that a tier has gained or lost."""
        for key in keys:
            for name in self._names.get(key, ()):
                self._report(name)

    def replace_weights(self, revision: str) -> None:
        """Forgets all blocks, because requests do not use KV of other weights."""
        self._weights = _weights(revision)
        for name in list(self._keys):
            self._forget(name)

    def violations(self) -> list[str]:
        """Returns one sentence per broken invariant, for checks."""
        out = []
        for name, keys in islice(self._keys.items(), MOST_CHECKED):
            if self._events.tier_below(name) is not self._tier(keys):
                out.append("a block is reported in another tier than its pages")
            if not self._is_anywhere(keys):
                out.append("a block is known although no tier has a page of it")
        return out

    def _add(self, name: bytes, keys: tuple[bytes, ...]) -> None:
        self._keys[name] = keys
        for key in keys:
            self._names[key] = (*self._names.get(key, ()), name)

    def _report(self, name: bytes) -> None:
        """Reports the present tier of a block, and forgets the block if no tier has a page of it."""
        keys = self._keys[name]
        tier = self._tier(keys)
        self._events.below(name, tier)
        if tier is None and not self._is_anywhere(keys):
            self._forget(name)

    def _tier(self, keys: tuple[bytes, ...]) -> BlockTier | None:
        """Returns the slowest tier with one of the pages, or None if a page is in no tier."""
        tier = BlockTier.HOST
        for key in keys:
            if key not in self._host:
                if key not in self._stored:
                    return None
                tier = BlockTier.STORAGE
        return tier

    def _is_anywhere(self, keys: tuple[bytes, ...]) -> bool:
        return any(key in self._host or key in self._stored for key in keys)

    def _forget(self, name: bytes) -> None:
        self._events.below(name, None)
        for key in self._keys.pop(name):
            if others := tuple(other for other in self._names.pop(key, ()) if other != name):
                self._names[key] = others


def _weights(revision: str) -> bytes:
    return blake2b(revision.encode(), digest_size=WEIGHTS_BYTES).digest()

"""Blocks of the prefix index in the tiers below the device: which of them are whole there, and how slow their slowest page is.

Tiers know pages by keys that say nothing of tokens; a block's name is known only where it was on the device. So whoever copies
pages down names the blocks that they are of, and the names go into the storage with them. Bounded by what the tiers hold: a
block is known while they have one of its pages. Single owner: Tiers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from services.shared.index.block_tier import BlockTier
from services.worker.core.contracts.transfers import KeptBlock
from services.worker.core.kv.cache_events import BLOCK_TOKENS, CacheEventLog
from services.worker.core.kv.tree_node import TreeNode

WEIGHTS_BYTES = 8
MOST_CHECKED = 4096


class KeptBlocks:
    """events: told of every change. host, stored: keys of pages, as these tiers have them now; whoever changes them says so here
    at once. revision: of the weights."""

    def __init__(
        self, events: CacheEventLog, host: Container[bytes], stored: Container[bytes], page_size: int, revision: str
    ) -> None:
        self._events, self._host, self._stored, self._page_size = events, host, stored, page_size
        self._weights = _weights(revision)
        self._keys: dict[bytes, tuple[bytes, ...]] = {}  # of its pages, by a block's name
        self._names: dict[bytes, tuple[bytes, ...]] = {}  # of the blocks that it has tokens of, by a page's key

    def __len__(self) -> int:
        return len(self._keys)

    def unnamed(self, path: Sequence[TreeNode], keys: Sequence[bytes], first: int, end: int) -> list[KeptBlock]:
        """Those that are not known here, with tokens in pages [first, end) of a path from below a root on. keys: of the path's
        first pages: a block whose last page has none is left out."""
        names = [name for node in path for name in node.blocks]
        size = self._page_size
        out: list[KeptBlock] = []
        for at in range(first * size // BLOCK_TOKENS, min(-(-end * size // BLOCK_TOKENS), len(names))):
            begin, after = at * BLOCK_TOKENS // size, -(-(at + 1) * BLOCK_TOKENS // size)
            if after > len(keys):
                break
            if names[at] not in self._keys:
                out.append(KeptBlock(names[at], self._weights, tuple(keys[begin:after])))
        return out

    def ending(self, keys: Iterable[bytes]) -> tuple[KeptBlock, ...]:
        """Those whose last page is one of these."""
        named = ((name, key) for key in keys for name in self._names.get(key, ()))
        return tuple(KeptBlock(name, self._weights, self._keys[name]) for name, key in named if self._keys[name][-1] == key)

    def named(self, blocks: Iterable[KeptBlock]) -> None:
        """Some of their pages are in a tier. Those of other weights are nobody's."""
        for block in blocks:
            if block.weights != self._weights or not self._is_anywhere(block.keys):
                continue
            if block.name not in self._keys:
                self._add(block.name, block.keys)
            self._tell(block.name)

    def changed(self, keys: Iterable[bytes]) -> None:
        """A tier has got or lost these pages."""
        for key in keys:
            for name in self._names.get(key, ()):
                self._tell(name)

    def replace_weights(self, revision: str) -> None:
        """Nobody asks for what others have computed."""
        self._weights = _weights(revision)
        for name in list(self._keys):
            self._forget(name)

    def violations(self) -> list[str]:
        """For checks."""
        out = []
        for name, keys in islice(self._keys.items(), MOST_CHECKED):
            if self._events.tier_below(name) is not self._tier(keys):
                out.append("a block is told to be in another tier than its pages")
            if not self._is_anywhere(keys):
                out.append("a block is known that no tier has a page of")
        return out

    def _add(self, name: bytes, keys: tuple[bytes, ...]) -> None:
        self._keys[name] = keys
        for key in keys:
            self._names[key] = (*self._names.get(key, ()), name)

    def _tell(self, name: bytes) -> None:
        keys = self._keys[name]
        tier = self._tier(keys)
        self._events.below(name, tier)
        if tier is None and not self._is_anywhere(keys):
            self._forget(name)

    def _tier(self, keys: tuple[bytes, ...]) -> BlockTier | None:
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

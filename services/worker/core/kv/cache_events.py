"""What the prefix index is told of the radix tree: blocks that became cached here, blocks that went, everything gone.

A block is BLOCK_TOKENS tokens, full blocks only, named by a hash chained over its prefix; token ids leave the worker in
no form. A block belongs to the tree edge that holds its last token, and goes with it: eviction takes suffixes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.core.kv.tree_node import TreeNode

BLOCK_TOKENS = 64
_TOKEN_BYTES = 4

BlockHasher = Callable[[bytes, bytes], bytes]
"""(hash of the block before, or a root's; the block's tokens as little-endian int32) -> the block's hash."""

RootHasher = Callable[[str], bytes]
"""A namespace (cache salt, adapter) -> what the first block of a prompt is chained to."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """In the order in which they hold: `cleared` first, then stored, then removed; a hash that came and went is in neither."""

    cleared: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheEventLog:
    """Written by the radix tree, taken by the worker's publisher once per step."""

    def __init__(self, page_size: int, block_hash: BlockHasher, root_hash: RootHasher) -> None:
        self._page_size = page_size
        self._block_hash = block_hash
        self._root_hash = root_hash
        self._cleared = False
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._held: Counter[bytes] = Counter()  # edges that hold a block: more than one where pages are larger than blocks

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
            self._held[link] += 1
            if self._held[link] > 1:
                continue
            if link in self._removed:
                del self._removed[link]
            else:
                self._stored[link] = None
        node.blocks = tuple(names)

    def removed(self, node: TreeNode) -> None:
        for name in node.blocks:
            assert self._held[name] > 0, "a block goes that no edge holds"
            self._held[name] -= 1
            if self._held[name]:
                continue
            del self._held[name]
            if name in self._stored:
                del self._stored[name]
            else:
                self._removed[name] = None

    def cleared(self) -> None:
        self._cleared = True
        self._held.clear()
        self._stored.clear()
        self._removed.clear()

    def flushed(self) -> None:
        """Much may have gone at once. Where that is more than what is left, everything told is void and the rest stored again."""
        if len(self._removed) <= len(self._held):
            return
        self._cleared = True
        self._stored = dict.fromkeys(self._held)
        self._removed.clear()

    def split(self, names: tuple[bytes, ...], upper_depth: int, lower_depth: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Which of an edge's blocks end in its upper part (down to page upper_depth) and which in its lower one."""
        size = self._page_size
        below = lower_depth * size // BLOCK_TOKENS - upper_depth * size // BLOCK_TOKENS
        cut = len(names) - below
        assert 0 <= cut <= len(names), "an edge names the blocks that end in it"
        return names[:cut], names[cut:]

    def take(self) -> CacheEvents | None:
        """What has happened since the last call."""
        if not (self._cleared or self._stored or self._removed):
            return None
        events = CacheEvents(self._cleared, tuple(self._stored), tuple(self._removed))
        self._cleared = False
        self._stored.clear()
        self._removed.clear()
        return events

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

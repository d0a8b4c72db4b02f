"""The radix tree over pages of KV. It maps token prefixes to pages and shares them between requests (SGLang's RadixCache).

Token keys are int32 token ids as bytes, cut at page boundaries. A cached page is pinned while its node has a lock, and evictable
otherwise. Locks and holds are counted along the whole path to the root, so that an unlocked node has no locked descendant.
Unlocked leaves are evicted in the order of the policy. Recency is a counter, not a time. KVMemory is the owner.

Each namespace and revision of the weights has a separate tree, whose name consists of both. Arguments called `namespace` are such
names. After a replacement of the weights, requests therefore do not find pages of the old weights. When a salt is deleted, its
trees are retired. A retired tree gets a new name, so that later requests do not find it, and its pages are not copied to other
tiers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.shared.index.prefix_index import salt_of
from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy
from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.kv.cache_units import CacheUnits
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode

I32 = NDArray[np.int32]
# A tree's name is REVISION + _END + NAMESPACE, or NAMESPACE alone. A namespace begins with a length and _LENGTH. In the name of a
# retired tree, _RETIRED and a number replace the revision. No revision contains _END or _LENGTH, or begins with _RETIRED.
_END = "\n"
_LENGTH = ":"
_RETIRED = "retired-"
# Stale entries are removed from the eviction queue when it has more than this number of entries beyond two per node.
STALE_ENTRIES = 64
_NO_PAGES: I32 = np.empty(0, dtype=np.int32)

EvictionKey = tuple[int, int, int]


def _lru(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, 0, node.stamp


def _lfu(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, node.hits, node.stamp


def _fifo(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, 0, node.born


def _priority(node: TreeNode) -> EvictionKey:
    return node.holds > 0 and not node.backed, -node.rank, node.stamp


# The leaf with the lowest sort key is evicted first. Held nodes are evicted last, unless a lower tier has their pages.
_EVICTION_KEYS: dict[EvictionPolicy, Callable[[TreeNode], EvictionKey]] = {
    EvictionPolicy.LRU: _lru,
    EvictionPolicy.LFU: _lfu,
    EvictionPolicy.FIFO: _fifo,
    EvictionPolicy.PRIORITY: _priority,
}


class RadixCache:
    """The radix trees of all namespaces, and the queue of evictable leaves."""

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        events: CacheEventLog | None = None,
        backups: BackupQueue | None = None,
    ) -> None:
        """Starts empty.

        Args:
            page_size: tokens of a page.
            policy: eviction order of unlocked leaves.
            events: log of cached blocks; None: blocks are not hashed.
            backups: queue of nodes to copy to lower tiers; None if the worker has no lower tiers.
        """
        self._page_bytes = page_size * TOKEN_BYTES
        self._eviction_key = _EVICTION_KEYS[policy]
        self._events = events
        self._backups = backups
        self.units: CacheUnits | None = None  # windows and states of the pages; None if the model has no cache groups
        self._roots: dict[str, TreeNode] = {}
        self._empty_roots: list[TreeNode] = []  # roots that forget_empty() has to check
        self._retired: list[TreeNode] = []  # roots of retired trees
        self._clock = 0
        self._seq = 0
        self._leaves: list[tuple[EvictionKey, int, TreeNode]] = []
        self.num_nodes = 0
        self.num_pages = 0
        self.num_evictable = 0
        self.num_locks = 0  # calls of lock() that unlock() has not undone

    def root(self, namespace: str) -> TreeNode:
        """Returns the root of a tree, creating it if needed. A root has no pages and is never evicted."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = TreeNode(None, namespace.encode(), _NO_PAGES, 0)
            self._empty_roots.append(node)
            if is_retired(namespace):
                self._retired.append(node)
        return node

    def forget_empty(self) -> None:
        """Forgets empty trees, so that they do not accumulate.

        After this call, the caller must not use a root that it got before and has neither locked nor held. The tree may have
        another root by then, and pages that are inserted below the forgotten root would be lost.
        """
        for root in self._empty_roots:
            if _is_empty(root) and self._roots.get(name := root.key.decode()) is root:
                del self._roots[name]
        self._empty_roots.clear()

    def names(self) -> list[str]:
        """Returns the names of all trees."""
        return list(self._roots)

    def retire(self, namespace: str, name: str) -> None:
        """Renames the tree `namespace` to `name` (see retired_name), so that later requests find nothing in it.

        The next forget_retired() drops the unlocked nodes of the tree, including nodes with holds.
        """
        root = self._roots.pop(namespace, None)
        if root is None:
            return
        assert name not in self._roots, "the name of a retired tree is unique"
        root.key = name.encode()
        self._roots[name] = root
        self._retired.append(root)
        self._may_be_empty(root)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def forget_retired(self) -> list[I32]:
        """Drops the unlocked nodes of retired trees. Returns their pages."""
        freed: list[I32] = []
        for root in self._retired:
            for leaf in _leaves_below(root):
                freed += self.forget(leaf)
        self._retired = [root for root in self._retired if not _is_empty(root)]
        return freed

    def match(self, namespace: str, key: bytes, end: int | None = None) -> TreeNode:
        """Finds the longest cached prefix of `key`, or of its first `end` bytes, in whole pages.

        May split a node, and updates the recency of the path. Allocates no page.

        Returns:
            The node at the end of the prefix, whose depth is the number of pages. It is valid until the next call that may evict,
            or while it is locked.
        """
        return self._walk(self.root(namespace), key, len(key) if end is None else min(end, len(key)))[0]

    def pages_to(self, node: TreeNode) -> I32:
        """Returns the pages from the root to the end of a node, as int32[node.depth]. The array is read-only."""
        parts: list[I32] = []
        walk = node
        while walk.parent is not None:
            parts.append(walk.pages)
            walk = walk.parent
        pages = _joined(parts[::-1])
        assert len(pages) == node.depth, "a path has `depth` pages"
        return pages

    def count_hit(self, node: TreeNode) -> None:
        """Counts an admission on the nodes from the root to `node`."""
        if self._backups is not None:
            self._backups.hit(node)
        walk: TreeNode | None = node
        while walk is not None:
            walk.hits += 1
            walk = walk.parent

    def peek(self, namespace: str, key: bytes, end: int | None = None) -> tuple[TreeNode | None, int]:
        """Returns the node in which match() would end, and the number of matching pages. Changes nothing."""
        node, num_pages, at = self._roots.get(namespace), 0, 0
        end = len(key) if end is None else min(end, len(key))
        while node is not None and at + self._page_bytes <= end and (child := node.children.get(key[at : at + self._page_bytes])):
            if not key.startswith(child.key, at, end):
                return child, num_pages + self._common_pages(child.key, key, at, end)
            node = child
            num_pages += len(child.pages)
            at += len(child.key)
        return node, num_pages

    def path(self, namespace: str, key: bytes, end: int) -> list[tuple[TreeNode, int]]:
        """Returns the nodes with pages of the first `end` bytes of `key`, each with its number of such pages. Changes nothing."""
        node, at = self._roots.get(namespace), 0
        found: list[tuple[TreeNode, int]] = []
        while node is not None and at + self._page_bytes <= end and (child := node.children.get(key[at : at + self._page_bytes])):
            if not key.startswith(child.key, at, end):
                found.append((child, self._common_pages(child.key, key, at, end)))
                break
            found.append((child, len(child.pages)))
            node = child
            at += len(child.key)
        return found

    def insert(
        self, node: TreeNode, key: bytes, pages: I32, rank: int = 0, page_keys: tuple[bytes, ...] = ()
    ) -> tuple[TreeNode, I32]:
        """Inserts the tokens `key` with their pages below `node`, and updates the recency of the whole path.

        Args:
            node: the node before the tokens.
            key: the tokens as bytes, in whole pages.
            pages: int32[n], the pages of the tokens.
            rank: rank of the request.
            page_keys: known page keys of `pages`, from the first of them on.

        Returns:
            The node at the end of the tokens, and the tree's pages for the tokens as int32[n]. If the tree had some of the tokens
            already, the result has the tree's pages for these tokens, and the caller still owns their pages in `pages`.
        """
        assert len(key) == len(pages) * self._page_bytes, "each page of tokens has a page id"
        end = node.depth + len(pages)
        node, at, out = self._walk(node, key, len(key))
        if at < len(key):
            there = at // self._page_bytes
            node = self._append(node, key[at:], pages[there:], rank)
            node.page_keys = page_keys[there : len(pages)]
            out.append(node.pages)
            if self._backups is not None:
                self._backups.appended(node)
        assert node.depth == end, "the node ends after the inserted tokens"
        walk: TreeNode | None = node
        while walk is not None:
            walk.stamp = self._clock
            if walk.rank > rank:
                walk.rank = rank
            walk = walk.parent
        return node, _joined(out)

    def lock(self, node: TreeNode) -> None:
        self.num_locks += 1
        walk: TreeNode | None = node
        while walk is not None:
            if walk.lock_ref == 0:
                self.num_evictable -= len(walk.pages)
            walk.lock_ref += 1
            walk = walk.parent
        assert self.num_evictable >= 0, "num_evictable is not negative"

    def unlock(self, node: TreeNode, used: bool = True) -> None:
        """Undoes one lock(). If `used` is True, a request computed or read the pages, and they are offered for a backup."""
        self.num_locks -= 1
        if self._backups is not None and used and node.lock_ref == 1:
            self._backups.unlocked(node)
        walk: TreeNode | None = node
        while walk is not None:
            assert walk.lock_ref > 0, "unlock without lock"
            walk.lock_ref -= 1
            if walk.lock_ref == 0:
                self.num_evictable += len(walk.pages)
                self._queue(walk)
            if walk.parent is None:
                self._may_be_empty(walk)
            walk = walk.parent
        assert self.num_evictable <= self.num_pages, "at most all pages are evictable"

    def hold(self, node: TreeNode) -> None:
        """Makes eviction take the nodes of this path last, until unhold(). The caller calls unhold() even after an eviction."""
        walk: TreeNode | None = node
        while walk is not None:
            walk.holds += 1
            walk = walk.parent

    def unhold(self, node: TreeNode) -> None:
        walk: TreeNode | None = node
        while walk is not None:
            assert walk.holds > 0, "unhold without hold"
            walk.holds -= 1
            if walk.holds == 0:
                walk.entry = 0  # the queued entry has the sort key of a held node
                self._queue(walk)
            root, walk = walk, walk.parent
        self._may_be_empty(root)

    def mark_backed(self, node: TreeNode) -> None:
        """Records that a lower tier has the whole node."""
        if self._backups is not None:
            self._backups.marked(node)
        if not node.backed:
            node.backed = True
            if node.holds:
                node.entry = 0  # the sort key is lower now
                self._queue(node)

    def forget(self, node: TreeNode) -> list[I32]:
        """Drops a node, and then each ancestor that has become an unlocked leaf. Returns their pages."""
        freed: list[I32] = []
        while self._is_evictable(node):
            assert node.parent is not None
            freed.append(node.pages)
            self._remove(node, needed=False)
            node = node.parent
        return freed

    def evict(self, num_pages: int, needed: bool = True) -> list[I32]:
        """Drops unlocked leaves in the order of eviction, until `num_pages` pages are dropped or no unlocked leaf is left.

        Args:
            num_pages: number of pages to drop.
            needed: whether other data needs the pages. If so, evicted pages without a copy count as lost.

        Returns:
            The dropped pages.
        """
        freed: list[I32] = []
        count = 0
        while count < num_pages and self._leaves:
            key, entry, node = heapq.heappop(self._leaves)
            if node.entry != entry:
                continue
            node.entry = 0
            if not self._is_evictable(node):
                continue
            if self._sort_key(node) != key:
                self._queue(node)
                continue
            freed.append(node.pages)
            count += len(node.pages)
            self._remove(node, needed)
        return freed

    def nodes(self) -> list[TreeNode]:
        """Returns every node except the roots, parents first, for checks."""
        out: list[TreeNode] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                out.append(node)
            stack.extend(node.children.values())
        return out

    def _walk(self, node: TreeNode, key: bytes, end: int) -> tuple[TreeNode, int, list[I32]]:
        """Descends from `node` along the first `end` bytes of `key` while whole pages are equal.

        Splits the last edge if only its first pages are equal.

        Returns:
            The last node, the number of matched bytes, and the pages of the nodes below the start node.
        """
        self._clock += 1
        pages: list[I32] = []
        at = 0
        while at + self._page_bytes <= end and (child := node.children.get(key[at : at + self._page_bytes])):
            if not key.startswith(child.key, at, end):
                child = self._split(child, self._common_pages(child.key, key, at, end))
            child.stamp = self._clock
            pages.append(child.pages)
            node = child
            at += len(child.key)
        return node, at, pages

    def _common_pages(self, edge: bytes, key: bytes, at: int, end: int) -> int:
        """Returns the number of first pages of `edge` that equal key[at:end]: at least 1, and fewer than the edge has."""
        n = min(len(edge), end - at) // TOKEN_BYTES
        differ = np.frombuffer(edge, np.int32, n) != np.frombuffer(key, np.int32, n, at)
        first = int(differ.argmax()) if differ.any() else n
        return first * TOKEN_BYTES // self._page_bytes

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Cuts a node after `num_pages` pages, and returns the new node of the upper part. The node itself is the lower part."""
        cut = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None and 0 < num_pages < len(node.pages), "the cut is inside of the edge"
        upper = TreeNode(parent, node.key[:cut], node.pages[:num_pages], parent.depth + num_pages)
        upper.lock_ref, upper.holds, upper.hits = node.lock_ref, node.holds, node.hits
        upper.born, upper.stamp, upper.rank = node.born, node.stamp, node.rank
        upper.page_keys, node.page_keys = node.page_keys[:num_pages], node.page_keys[num_pages:]
        upper.backed = node.backed
        if self._backups is not None and upper.backed:
            self._backups.marked(upper)
        if self._events:
            upper.blocks, node.blocks = self._events.split(node.blocks, upper.depth, node.depth)
        if self.units is not None:
            self.units.split(upper, node, num_pages)
        parent.children[upper.key[: self._page_bytes]] = upper
        self.num_nodes += 1
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]
        upper.children[node.key[: self._page_bytes]] = node
        assert upper.depth + len(node.pages) == node.depth, "the depth of the lower part is unchanged"
        return upper

    def _append(self, parent: TreeNode, key: bytes, pages: I32, rank: int) -> TreeNode:
        node = TreeNode(parent, key, pages.copy(), parent.depth + len(pages), stamp=self._clock, born=self._clock, rank=rank)
        edge = key[: self._page_bytes]
        assert len(pages) and edge not in parent.children, "siblings differ in their first page"
        parent.children[edge] = node
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        if self.units is not None:
            self.units.appended(node)
        self._queue(node)
        if self._events:
            self._events.stored(node)
        return node

    def _remove(self, node: TreeNode, needed: bool) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.gone and not node.lock_ref and not node.children, "only unlocked leaves are removed"
        del parent.children[node.key[: self._page_bytes]]
        self.num_nodes -= 1
        self.num_pages -= len(node.pages)
        self.num_evictable -= len(node.pages)
        assert 0 <= self.num_evictable <= self.num_pages, "only evictable pages are removed"
        node.gone = True
        node.entry = 0  # the node's entry in the queue, which forget() does not remove, becomes stale
        if self.units is not None:
            self.units.removed(node)
        if self._events:
            self._events.removed(node)
        if self._backups is not None:
            self._backups.removed(node, needed)
        if parent.parent is not None:
            self._queue(parent)
        else:
            self._may_be_empty(parent)

    def lost_unit(self, node: TreeNode) -> None:
        """Puts a leaf that has lost a unit into the eviction queue again. If no hit can reach it now, its sort key is lower."""
        node.entry = 0
        self._queue(node)

    def _sort_key(self, node: TreeNode) -> EvictionKey:
        """Returns the sort key of the eviction queue. Leaves that no hit can reach are first."""
        if self.units is not None and not self.units.is_reachable(node):
            return -1, 0, node.stamp
        return self._eviction_key(node)

    def _may_be_empty(self, root: TreeNode) -> None:
        if _is_empty(root):
            self._empty_roots.append(root)

    def _is_evictable(self, node: TreeNode) -> bool:
        return node.parent is not None and not node.gone and node.lock_ref == 0 and not node.children

    def _queue(self, node: TreeNode) -> None:
        """Adds a leaf to the eviction queue if it is evictable and has no valid entry.

        Every evictable leaf has exactly one valid entry. If the leaf's sort key rises later, evict() corrects the entry. Code
        that lowers the sort key sets `entry` to 0 and calls this again.
        """
        if not node.entry and self._is_evictable(node):
            self._seq += 1
            node.entry = self._seq
            heapq.heappush(self._leaves, (self._sort_key(node), node.entry, node))
            if len(self._leaves) > 2 * self.num_nodes + STALE_ENTRIES:
                self._leaves = [entry for entry in self._leaves if entry[2].entry == entry[1]]
                heapq.heapify(self._leaves)
                assert len(self._leaves) <= self.num_nodes, "a node has two entries in the queue"


def _joined(parts: list[I32]) -> I32:
    """Returns the concatenation of the parts. If there is one part, returns this part itself."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NO_PAGES


def _leaves_below(root: TreeNode) -> list[TreeNode]:
    found, stack = [], [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if not node.children and node is not root:
            found.append(node)
    return found


def _is_empty(root: TreeNode) -> bool:
    return not root.children and root.lock_ref == 0 and root.holds == 0


def tree_name(revision: str, namespace: str) -> str:
    """Returns the name of a tree. If the revision is empty, the name is the namespace."""
    assert _END not in revision, "a revision has one line"
    return f"{revision}{_END}{namespace}" if revision else namespace


def parts_of(name: str) -> tuple[str, str]:
    """Returns (revision, namespace) of a name with a revision."""
    revision, _, namespace = name.partition(_END)
    return revision, namespace


def salt_of_tree(name: str) -> str:
    """Returns the cache salt of a tree, which may be retired; empty if it has no salt."""
    return salt_of(_namespace_of(name))


def retired_name(name: str, number: int) -> str:
    """Returns the unique name of a retired tree. `number` counts the deletions of salts (Scheduler.num_retirements)."""
    assert not is_retired(name), "a tree is retired at most once"
    return f"{_RETIRED}{number}{_END}{_namespace_of(name)}"


def is_retired(name: str) -> bool:
    return name.startswith(_RETIRED)


def _namespace_of(name: str) -> str:
    revision, end, namespace = name.partition(_END)
    return namespace if end and _LENGTH not in revision else name

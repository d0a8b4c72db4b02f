"""The KV memory of a worker: pages, slots, the radix tree, and the leases of running requests.

Every page is free, leased by one slot, cached in the tree, or quarantined while an operation writes it; free + leased + cached +
quarantined = total. A freed page may be allocated again immediately, because one forward stream orders all steps
(docs/design/scheduler.md#steps-and-streams), and an operation begins after all earlier steps. Each write to a page table is
recorded, and take_table_updates() returns the writes for the next plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup
from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy
from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.kv.cache_units import CacheUnits
from rootstock_llm.services.worker.core.kv.radix_cache import RadixCache
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.kv.unit_pins import UnitPins

I32 = NDArray[np.int32]
TableUpdates = tuple[I32, I32, I32, I32]
"""(slots, firsts, counts, pages) of page-table updates, as in BatchPlan."""

NO_UPDATES: TableUpdates = (np.empty(0, dtype=np.int32),) * 4


class TokenToKVPool:
    """A stack of the ids of free pages, named as in SGLang. The executor owns the tensors of the pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: I32 = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self.num_free = num_pages

    def alloc(self, count: int) -> I32:
        """Allocates pages and returns them as int32[count]. `count` is at most num_free."""
        assert 0 <= count <= self.num_free, "at most the free pages are allocated"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, pages: I32) -> None:
        end = self.num_free + len(pages)
        assert end <= self.num_pages, "a page was freed twice"
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def free_pages(self) -> I32:
        """Returns a copy of the free pages as int32[num_free], for checks."""
        return self._stack[: self.num_free].copy()


class ReqToTokenPool:
    """Slots and their page tables, named as in SGLang.

    In row s of page_table (int32[slots, pages per request]), the first num_pages[s] entries are valid. Of these pages, the first
    num_shared[s] belong to the radix tree, and the other pages belong to the slot's lease.
    """

    def __init__(self, num_slots: int, pages_per_request: int) -> None:
        self.page_table: I32 = np.full((num_slots, pages_per_request), -1, dtype=np.int32)
        self.num_pages: I32 = np.zeros(num_slots, dtype=np.int32)
        self.num_shared: I32 = np.zeros(num_slots, dtype=np.int32)
        self._free = list(range(num_slots))[::-1]
        self._is_free = [True] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self.num_pages) - len(self._free)

    def alloc(self) -> int:
        assert self._free, "a slot is free"
        slot = self._free.pop()
        assert self.num_pages[slot] == 0, "a free slot has no pages"
        self._is_free[slot] = False
        return slot

    def free(self, slot: int) -> None:
        assert not self._is_free[slot], "a slot was freed twice"
        self._is_free[slot] = True
        self.num_pages[slot] = self.num_shared[slot] = 0
        self._free.append(slot)


@dataclass(slots=True, eq=False)
class Lease:
    """The memory of a running request: a slot, the pages in its table row, and a lock on `node`."""

    slot: int
    node: TreeNode  # tree node at the end of the table's pages that belong to the tree
    rank: int = 0  # rank of the request; nodes that publish its pages get this rank, see TreeNode.rank
    page_keys: tuple[bytes, ...] = ()  # page keys of the first pages; keys of later pages are unknown


class TableWrites:
    """The writes to the page tables, or to the window tables, of all slots since the last plan."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._updates: list[TableUpdates] = []
        self._runs: list[tuple[int, int, int]] = []  # (slot, first entry, number of entries) of writes after those in _updates
        self._run_entries: list[I32] = []
        self._num_updates = 0  # number of writes in _updates and _runs; each write is to one slot's entries
        self._ended: dict[int, int] = {}  # slots that were freed since the last plan, with the number of writes at that time

    def add(self, slot: int, first: int, entries: I32) -> None:
        """Adds a write of consecutive entries of one slot, int32[n]."""
        if len(entries):
            self._runs.append((slot, first, len(entries)))
            self._run_entries.append(entries)
            self._num_updates += 1

    def add_each(self, slots: I32, firsts: I32, entries: I32) -> None:
        """Adds a write of one entry for each slot. All arguments are int32[n]."""
        self._gather_runs()
        self._updates.append((slots, firsts, np.ones(len(slots), dtype=np.int32), entries))
        self._num_updates += len(slots)

    def end(self, slot: int) -> None:
        """Drops the writes of a slot that is freed."""
        if self._num_updates:
            self._ended[slot] = self._num_updates

    def take(self) -> TableUpdates:
        """Returns the writes of leased slots since the last call.

        No two writes change the same entry, so that they may be applied in any order.
        """
        self._gather_runs()
        if not self._updates:
            return NO_UPDATES
        self._num_updates = 0
        if len(self._updates) == 1:
            updates = self._updates.pop()
        else:
            slots, firsts, counts, entries = (np.concatenate(part) for part in zip(*self._updates, strict=True))
            updates = slots, firsts, counts, entries
            self._updates.clear()
        return self._without_ended(updates) if self._ended else updates

    def _without_ended(self, updates: TableUpdates) -> TableUpdates:
        """Drops the writes of leases that have ended. A later lease of the same slot has its own, later writes."""
        slots, firsts, counts, entries = updates
        until = np.zeros(self._num_slots, dtype=np.int64)
        until[list(self._ended)] = list(self._ended.values())
        self._ended.clear()
        stays = np.arange(len(slots)) >= until[slots]
        return slots[stays], firsts[stays], counts[stays], entries[np.repeat(stays, counts)]

    def _gather_runs(self) -> None:
        if self._runs:
            slots, firsts, counts = (np.array(column, dtype=np.int32) for column in zip(*self._runs, strict=True))
            entries = np.concatenate(self._run_entries) if len(self._run_entries) > 1 else self._run_entries[0]
            self._updates.append((slots, firsts, counts, entries))
            self._runs.clear()
            self._run_entries.clear()


@dataclass(frozen=True, slots=True)
class KVShape:
    """The sizes of the pools of pages, slots and cache units."""

    num_pages: int
    page_size: int  # tokens
    num_slots: int
    pages_per_slot: int
    groups: tuple[CacheGroup, ...] = ()
    state_interval: int = 0  # see SchedulerConfig
    max_chunk: int = 0  # see SchedulerConfig
    max_drafts: int = 0  # see SchedulerConfig


class KVMemory:
    """The owner of the pages, the slots and the radix tree.

    RequestLifecycle and the planners allocate and free pages, and the committer publishes computed pages. Sessions hold paths of
    the tree, and reservations and operations pin them.
    """

    def __init__(
        self,
        shape: KVShape,
        policy: EvictionPolicy,
        enable_radix_cache: bool,
        events: CacheEventLog | None = None,
        backups: BackupQueue | None = None,
    ) -> None:
        self.page_size = shape.page_size
        self.evicted_pages_total = 0
        self._shape, self._enable_radix_cache, self._events = shape, enable_radix_cache, events
        self._new_tree: Callable[[], RadixCache] = partial(RadixCache, shape.page_size, policy, events, backups)
        self.reset()

    def reset(self) -> None:
        """Forgets all pages, slots, cached prefixes and pending page-table updates. No lease, pin or hold may exist."""
        shape = self._shape
        self.pages = TokenToKVPool(shape.num_pages)
        self.slots = ReqToTokenPool(shape.num_slots, shape.pages_per_slot)
        self.tree = self._new_tree()
        self.quarantined: set[int] = set()
        self.num_pins = 0  # calls of pin() that unpin() has not undone
        self._writes = TableWrites(shape.num_slots)
        self._window_writes = TableWrites(shape.num_slots)
        self.units = self.tree.units = self._new_units(shape) if shape.groups else None
        self.unit_pins = UnitPins(self.units) if self.units is not None else None

    def _new_units(self, shape: KVShape) -> CacheUnits:
        sizes = shape.page_size, shape.num_slots, shape.pages_per_slot, shape.state_interval, shape.max_chunk, shape.max_drafts
        return CacheUnits(shape.groups, *sizes, self._enable_radix_cache, self.tree.lost_unit, self._events)

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated now: free and evictable pages."""
        return self.pages.num_free + self.tree.num_evictable

    @property
    def num_leased(self) -> int:
        return self.pages.num_pages - self.pages.num_free - self.tree.num_pages - len(self.quarantined)

    def match(self, namespace: str, key: bytes, limit: int) -> TreeNode:
        """Returns the end of the longest prefix hit of at most `limit` tokens that does not cover the last token of `key`."""
        return self.tree.match(namespace, key, self._hit_bytes(namespace, key, self._usable(len(key), limit)))

    def peek(self, namespace: str, key: bytes, limit: int) -> tuple[TreeNode | None, int]:
        """Returns the node in which match() would end, and the number of tokens of the hit. Does not change recency."""
        node, num_pages = self.tree.peek(namespace, key, self._hit_bytes(namespace, key, self._usable(len(key), limit)))
        return node, num_pages * self.page_size

    def cached(self, namespace: str, key: bytes, limit: int) -> tuple[TreeNode | None, int]:
        """Returns the same as peek(), but as if no units of cache groups were missing."""
        node, num_pages = self.tree.peek(namespace, key, self._usable(len(key), limit))
        return node, num_pages * self.page_size

    def match_cached(self, namespace: str, key: bytes, limit: int) -> TreeNode:
        """Returns the same as match(), but as if no units of cache groups were missing."""
        return self.tree.match(namespace, key, self._usable(len(key), limit))

    def note_branch(self, namespace: str, key: bytes, limit: int) -> int:
        """Counts the cached pages of an admitted `key` that have to be computed again, because units are missing.

        Returns:
            The number of cached pages of `key` in its first `limit` tokens, including pages without units.
        """
        path = self.tree.path(namespace, key, self._usable(len(key), limit))
        if self.units is not None:
            self.units.count_misses(path)
        return sum(count for _, count in path)

    def _hit_bytes(self, namespace: str, key: bytes, end: int) -> int:
        """Returns the bytes of `key` that a hit of at most `end` bytes covers in all cache groups."""
        if self.units is None or not end:
            return end
        page_bytes = self.page_size * TOKEN_BYTES
        return self.units.hit_end(self.tree.path(namespace, key, end), end // page_bytes) * page_bytes

    def forget_empty(self) -> None:
        """Forgets empty trees, and frees the unused pages of retired trees.

        RadixCache.forget_empty() explains when it may be called.
        """
        if self.tree.has_retired:
            self.forget_retired()
        self.tree.forget_empty()

    def forget_retired(self) -> int:
        """Frees the unused pages of retired trees. Returns their number."""
        self.settle_units()
        freed = self.tree.forget_retired()
        for pages in freed:
            self.pages.free(pages)
        return sum(map(len, freed))

    def _usable(self, num_bytes: int, limit: int) -> int:
        """Returns the bytes of a token key of `num_bytes` that a hit of at most `limit` tokens may cover."""
        return self.usable_pages(num_bytes // TOKEN_BYTES, limit) * self.page_size * TOKEN_BYTES

    def usable_pages(self, num_tokens: int, limit: int) -> int:
        """Returns the whole pages of `num_tokens` tokens that a hit of at most `limit` tokens may cover."""
        return min(num_tokens - 1, limit) // self.page_size if self._enable_radix_cache else 0

    def lock(self, hit: TreeNode) -> None:
        self.tree.lock(hit)

    def unlock(self, hit: TreeNode) -> None:
        self.tree.unlock(hit)

    def lease(
        self, hit: TreeNode, rank: int = 0, page_keys: tuple[bytes, ...] = (), branch: int = 0, num_extend: int = 0
    ) -> Lease:
        """Allocates a slot whose table begins with the pages of the hit.

        Args:
            hit: the locked end of the hit. The lease takes over its lock.
            rank: rank of the request.
            page_keys: known page keys, from the first page on.
            branch: see note_branch(); ignored without cache groups.
            num_extend: number of tokens after the hit to which the request extends; ignored without cache groups.
        """
        assert hit.lock_ref > 0, "the caller has locked the hit"
        pages = self.tree.pages_to(hit)
        self.tree.count_hit(hit)
        slot = self.slots.alloc()
        self.slots.page_table[slot, : hit.depth] = pages
        self.slots.num_pages[slot] = self.slots.num_shared[slot] = hit.depth
        self._writes.add(slot, 0, pages)
        if self.units is not None:
            self._window_writes.add(slot, *self.units.begin(slot, hit, branch, num_extend))
        return Lease(slot, hit, rank, page_keys)

    def grow(self, lease: Lease, num_tokens: int) -> int:
        """Allocates pages until the lease's table covers `num_tokens` tokens, no page is available, or no window unit is left.

        Returns:
            The number of covered tokens, at most `num_tokens`.
        """
        slot = lease.slot
        have = int(self.slots.num_pages[slot])
        want = min(-(-num_tokens // self.page_size) - have, self.num_available)
        assert self.slots.num_shared[slot] <= have, "the shared pages of a slot are among its pages"
        if self.units is not None:
            want = min(want, self.units.num_spare_pages(slot, have))
        if want > 0:
            assert have + want <= self.slots.page_table.shape[1], "a slot has at most the pages of a context"
            pages = self._alloc(want)
            self.slots.page_table[slot, have : have + want] = pages
            self.slots.num_pages[slot] = have + want
            self._writes.add(slot, have, pages)
            if self.units is not None:
                self._window_writes.add(slot, have, self.units.grow(slot, have, want))
        return min(num_tokens, int(self.slots.num_pages[slot]) * self.page_size)

    def grow_each(self, slots: I32) -> None:
        """Allocates one more page for each of `slots` (int32[n], distinct). At least n pages must be available."""
        assert len(slots) <= self.num_available, "the caller has counted the available pages"
        pages = self._alloc(len(slots))
        firsts = self.slots.num_pages[slots]
        self.slots.page_table[slots, firsts] = pages
        self.slots.num_pages[slots] = firsts + 1
        self._writes.add_each(slots, firsts, pages)
        if self.units is not None and len(units := self.units.grow_each(slots, firsts)):
            self._window_writes.add_each(slots, firsts, units)

    def publish(self, lease: Lease, key: bytes) -> None:
        """Moves the whole pages of `key`, whose KV is computed, into the tree, where other requests can find them.

        If another request has published some of these tokens, this slot's pages for them are freed, and its table gets the tree's
        pages.
        """
        slot = lease.slot
        shared = int(self.slots.num_shared[slot])
        whole = len(key) // (self.page_size * TOKEN_BYTES)
        if whole <= shared or not self._enable_radix_cache:
            return
        assert shared == lease.node.depth, "the shared part of a slot ends at its lease's node"
        assert whole <= self.slots.num_pages[slot], "published tokens are in the slot's pages"
        mine = self.slots.page_table[slot, shared:whole].copy()
        cut = self.page_size * TOKEN_BYTES
        page_keys = lease.page_keys[shared:whole]
        node, theirs = self.tree.insert(lease.node, key[shared * cut : whole * cut], mine, lease.rank, page_keys)
        assert node.depth == whole and len(theirs) == len(mine), "the tree has all published pages"
        self.tree.lock(node)
        self.tree.unlock(lease.node)
        lease.node = node
        self.slots.num_shared[slot] = whole
        differ = np.flatnonzero(mine != theirs)
        if len(differ):
            self.pages.free(mine[differ])
            first = int(differ[0])
            self.slots.page_table[slot, shared + first : whole] = theirs[first:]
            self._writes.add(slot, shared + first, theirs[first:])
        if self.units is not None:
            self._window_writes.add(slot, *self.units.publish(slot, node, shared))

    def hold(self, node: TreeNode) -> None:
        """Marks the path to `node` as held, so that it is evicted after paths without a hold."""
        self.tree.hold(node)

    def unhold(self, node: TreeNode) -> None:
        self.tree.unhold(node)

    def release(self, lease: Lease, key: bytes) -> None:
        """Ends the lease: publishes `key`, which may be empty, and frees the other pages and the slot.

        Sets lease.node to the end of the published pages. The node is valid until the next call that may evict pages, or until
        unhold() if the caller holds it.
        """
        self.publish(lease, key)
        slot = lease.slot
        shared, have = int(self.slots.num_shared[slot]), int(self.slots.num_pages[slot])
        assert shared <= have, "the shared pages of a slot are among its pages"
        if self.units is not None:
            self.units.publish_last(slot, lease.node, len(key) // TOKEN_BYTES)
            self.units.end(slot, shared, have)
            self._window_writes.end(slot)
        self.pages.free(self.slots.page_table[slot, shared:have].copy())
        self.tree.unlock(lease.node)
        self.slots.free(slot)
        self._writes.end(slot)
        locks = self.tree.num_locks - self.num_pins - self.slots.num_leased
        assert locks in (0, 1), "each lease and each pin has a lock, and at most one match is locked"
        assert self.num_leased >= 0, "free + leased + cached + quarantined = total"

    # Operations outside of the forward stream

    def pin(self, node: TreeNode) -> None:
        """Locks the path to `node` for an operation that reads its pages, for a waiting request, or for a KV reservation."""
        self.num_pins += 1
        self.tree.lock(node)

    def unpin(self, node: TreeNode, used: bool = False) -> None:
        """Undoes one pin(). `used` has the meaning of RadixCache.unlock()."""
        assert self.num_pins > 0, "unpin without pin"
        self.num_pins -= 1
        self.tree.unlock(node, used=used)

    def quarantine(self, count: int) -> I32:
        """Allocates pages that an operation will write, as int32[count]. At least `count` pages must be available."""
        assert 0 < count <= self.num_available, "the caller has counted the available pages"
        pages = self._alloc(count)
        self.quarantined.update(pages.tolist())
        return pages

    def free_quarantined(self, pages: I32) -> None:
        """Frees quarantined pages whose operation has failed."""
        self._leave_quarantine(pages)
        self.pages.free(pages)

    def publish_quarantined(
        self, node: TreeNode, key: bytes, pages: I32, rank: int, page_keys: tuple[bytes, ...], backed: bool
    ) -> TreeNode:
        """Moves quarantined pages into the tree below `node`. Frees pages for whose tokens the tree has other pages already.

        Args:
            node: the pinned node before the tokens.
            key: the tokens as bytes.
            pages: the written pages, with the KV of these tokens.
            rank: rank of the request for which the pages were read.
            page_keys: page keys of the pages.
            backed: whether the pages were read from a lower tier of this worker, which still has them.

        Returns:
            The node at the end of the tokens.
        """
        self._leave_quarantine(pages)
        end, theirs = self.tree.insert(node, key, pages, rank, page_keys)
        if backed:
            self.tree.mark_backed(end)
        self.pages.free(pages[pages != theirs])
        return end

    def _leave_quarantine(self, pages: I32) -> None:
        assert self.quarantined.issuperset(pages.tolist()), "only quarantined pages leave the quarantine"
        self.quarantined.difference_update(pages.tolist())

    def num_lendable_units(self, index: int) -> int:
        """Returns the number of units of a cache group that operations may take now, see UnitPins."""
        return 0 if self.unit_pins is None else self.unit_pins.num_lendable(index)

    def pin_units(self, index: int, end: TreeNode, pages: range) -> I32:
        """Pins the units of cached pages in a cache group for an operation that reads them, as int32[n].

        `end` is a pinned node at the pages or after them. Each page has a unit, and at most num_lendable_units() are pinned.
        """
        assert self.units is not None and self.unit_pins is not None, "the model has cache groups"
        units = [self.units.unit_of(index, end, page) for page in pages]
        self.unit_pins.pin(index, units)
        return np.array(units, dtype=np.int32)

    def unpin_units(self, index: int, units: I32) -> None:
        """Undoes one pin_units()."""
        assert self.unit_pins is not None, "the model has cache groups"
        self.unit_pins.unpin(index, units.tolist())

    def settle_units(self) -> None:
        """Frees or unpins the states that the last plan read. Then unlocked pages have no pinned unit. Called between plans."""
        if self.units is not None:
            self.units.begin_plan()

    def flush(self) -> int:
        """Evicts every unlocked page of the radix tree. Returns the number of pages."""
        self.settle_units()
        return self._evict(self.tree.num_evictable, needed=False)

    def forget(self, node: TreeNode) -> None:
        """Drops a node, and then each ancestor that has become an unlocked leaf."""
        self.settle_units()
        for pages in self.tree.forget(node):
            self.pages.free(pages)

    def take_table_updates(self) -> TableUpdates:
        """Returns the writes to the page tables of leased slots since the last call, see TableWrites.take()."""
        return self._writes.take()

    def take_window_updates(self) -> TableUpdates:
        """Returns the writes to the window tables of leased slots since the last call, see TableWrites.take()."""
        return self._window_writes.take()

    def _alloc(self, count: int) -> I32:
        if count > self.pages.num_free:
            self._evict(count - self.pages.num_free)
        return self.pages.alloc(count)

    def _evict(self, count: int, needed: bool = True) -> int:
        evictable = self.tree.num_evictable
        freed = self.tree.evict(count, needed)
        for pages in freed:
            self.pages.free(pages)
        total = sum(map(len, freed))
        assert total >= min(count, evictable), "all evictable pages can be evicted"
        assert self.num_leased >= 0, "free + leased + cached + quarantined = total"
        self.evicted_pages_total += total
        return total

"""Copies of cached pages and units to lower tiers: from the device to the host, and from the host to the storage if there is one.

Pages are copied in the order of BackupQueue, if possible before their eviction. A page that is evicted before its copy began
counts as lost. A path is copied from its beginning, because a later request can only use a whole prefix. With cache groups, units
are copied after their pages, for the page ends at which hits can end (stored_units.py). Pages after the last such page end are
not copied. The number of running copies is limited. No step waits for a copy. Tiers is the owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.transfers import NO_PAGES, Fact, OperationKind, PageOperation, TierBlock
from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.radix_cache import is_retired
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT
from rootstock_llm.services.worker.core.tiers.host_index import HostIndex
from rootstock_llm.services.worker.core.tiers.page_keys import UNSALTED, PageKeys, tag_of
from rootstock_llm.services.worker.core.tiers.stored_units import PathCopy, StoredUnit, StoredUnits
from rootstock_llm.services.worker.core.tiers.tier_blocks import TierBlocks

MOST_EXAMINED = 16  # largest number of queued nodes that one call of plan() examines
# Largest number of running copies to the host. Several run at a time, because new copies begin once per loop iteration, and an
# iteration may take as long as a large step.
MOST_BACK_UPS = 8
MOST_PATH_SHARE = 2  # one prompt has at most 1/2 of all host pages
MOST_STORED_SHARE = 2  # at most 1/2 of all host pages wait for their write to the storage
MOST_QUOTA_SHARE = 2  # one prompt has at most 1/2 of its salt's quota in the storage
NOTHING = PathCopy(0, (), ())


@dataclass(slots=True)
class _BackUp:
    """A running copy of device pages to the host."""

    operation: PageOperation
    first: int  # index of the first copied page in the path from the tree's root to `offered`; 0 for units
    offered: TreeNode  # node of the queue whose path is copied
    node: TreeNode  # node of this path with the copied pages; pinned until the copy ends
    memory: KVMemory
    # Blocks with a token in the copied pages that TierBlocks does not know yet; for units, the marks of the path's page ends.
    blocks: list[TierBlock]
    path_keys: Sequence[bytes]  # PathCopy.keys: the copied pages' keys, each followed by the keys of the parts of its units
    counts: bool = True  # whether the host tier caches the copied pages when the copy ends; False: it frees them
    forgotten: bool = False  # whether the tree drops the device pages when the copy ends


class Backups:
    """The copies to the host, the writes to the storage, and the host pages that wait for the storage."""

    def __init__(
        self,
        queue: BackupQueue,
        keys: PageKeys,
        host: HostIndex,
        stored: set[bytes] | None,
        blocks: TierBlocks | None,
        at_once: int,
        ids: Iterator[int],
        units: StoredUnits,
        stored_salt_pages: int = 0,
    ) -> None:
        """Starts without copies.

        Args:
            queue: nodes to copy.
            keys: maker of page keys.
            host: index of the host tier.
            stored: page keys in the storage, or None if the worker has no storage.
            blocks: blocks of lower tiers, or None if no prefix index reads them.
            at_once: largest number of pages of an operation.
            ids: op_ids of new operations.
            units: maker of the keys of parts.
            stored_salt_pages: largest number of pages of one salt in the storage; 0: no limit.
        """
        self._queue, self._keys, self._host, self._stored, self._blocks = queue, keys, host, stored, blocks
        self._at_once, self._ids, self._units = at_once, ids, units
        self._most = max(host.num_pages // MOST_PATH_SHARE, 1)
        self._most_salted = max(stored_salt_pages // MOST_QUOTA_SHARE, 1) if stored_salt_pages else 0
        self._current: TreeNode | None = None  # queued node whose path _copy_next() copies
        # Number of first pages and of first units of this path that lower tiers have, and the page keys, pages and units to copy.
        self._num_copied, self._num_copied_units, self._current_keys = 0, 0, list[bytes]()
        self._path_copy, self._marks = NOTHING, list[TierBlock]()
        host.on_gone = self.gone
        self._copying: dict[int, _BackUp] = {}  # running copies to the host, by op_id
        self._storing: PageOperation | None = None  # running write to the storage
        self._storing_counts = True  # whether the keys of the running write are recorded as stored when it ends
        self._to_store: deque[PageOperation] = deque()  # writes that wait for the running one
        self._being_copied: set[bytes] = set()  # keys that are being copied to the host
        self._keys_to_store: set[bytes] = set()  # keys of the running and the waiting writes
        self._num_to_store = 0  # number of pages of the running and the waiting writes
        # Pages copied to the host; pages written to the storage; pages not written to the storage because too many waited or a
        # write failed; operations that did not move all of their pages.
        self.backed_up_pages_total = self.stored_pages_total = self.unstored_pages_total = self.failed_total = 0

    @property
    def num_copying(self) -> int:
        """Number of running operations that read device pages."""
        return len(self._copying)

    @property
    def num_storing(self) -> int:
        """Number of host pages that are written to the storage or wait for it."""
        return self._num_to_store

    @property
    def lost_pages_total(self) -> int:
        return self._queue.lost_pages_total

    def plan(self, memory: KVMemory) -> list[PageOperation]:
        """Begins copies and returns their operations."""
        operations: list[PageOperation] = []
        for _ in range(MOST_EXAMINED):
            node = self._queue.first()
            if node is None or len(self._copying) >= MOST_BACK_UPS:
                break
            operation = self._copy_next(node, memory)
            if operation is not None:
                operations.append(operation)
            elif self._queue.first() is node:
                break  # the host tier has no free page, or no unit may be lent
        if self._storing is None and self._to_store:
            self._storing, self._storing_counts = self._to_store.popleft(), True
            operations.append(self._storing)
        return operations

    def ended(self, fact: Fact) -> bool:
        """Applies the fact of a copy to the host or of a write to the storage. Returns False if the fact belongs to neither."""
        if self._storing is not None and fact.op_id == self._storing.op_id:
            operation, self._storing = self._storing, None
            self._record_write(operation, fact)
            return True
        copy = self._copying.pop(fact.op_id, None)
        if copy is None:
            return False
        operation = copy.operation
        count = fact.count - fact.count % operation.num_parts if copy.counts else 0
        self._being_copied.difference_update(operation.keys)
        self._host.put(operation.keys[:count], operation.host_pages[:count])
        if count and self._blocks is not None:
            self._blocks.changed(operation.keys[:count])
            self._blocks.add(copy.blocks)
        self._host.give_back(operation.host_pages[count:])
        # Touches the whole path, so that its beginning is evicted last.
        self._host.touch(copy.path_keys)
        copy.memory.unpin(copy.node)
        if operation.group:
            copy.memory.unpin_units(operation.group - 1, operation.pages)
        else:
            self.backed_up_pages_total += count
        if fact.count < len(operation.keys):
            self.failed_total += 1
            self._drop_first(copy.offered)
        if count < len(operation.keys):
            copy.node.backed = False
        if copy.forgotten:
            copy.memory.forget(copy.node)
        self._store(operation.keys[:count], copy.first, operation.group)
        return True

    def forget_copies(self, pages_too: bool, tag: bytes | None = None) -> None:
        """Discards the results of running copies to the host.

        Args:
            pages_too: whether the tree also drops the device pages when the copies end.
            tag: tag (digest) of the salt whose copies are discarded, or None for all copies.
        """
        self._current = None
        for copy in self._copying.values():
            if tag is None or tag_of(copy.operation.keys[0]) == tag:
                copy.counts = False
                copy.forgotten |= pages_too

    def is_void(self, fact: Fact) -> bool:
        """Returns whether the fact reports a write to the storage whose pages were forgotten while it ran."""
        return self._storing is not None and fact.op_id == self._storing.op_id and not self._storing_counts

    def forget_storing(self) -> None:
        """Discards the result of the running write to the storage, and drops the waiting writes."""
        self._storing_counts = False
        self.forget_waiting()

    def forget_waiting(self, tag: bytes | None = None) -> None:
        """Drops the waiting writes to the storage. If `tag` is set, drops only the writes of the salt with this tag."""
        waiting, self._to_store = self._to_store, deque()
        for operation in waiting:
            if tag is None or tag_of(operation.keys[0]) == tag:
                self._drop_write(operation)
            else:
                self._to_store.append(operation)

    def clear(self) -> None:
        """Forgets the queued nodes, because the tree is reset."""
        self._queue.clear()
        self._current = None

    def gone(self, key: bytes) -> None:
        """Records that a lower tier has lost a page. If no lower tier has the page, its node no longer counts as copied."""
        if self._blocks is not None:
            self._blocks.changed((key,))
        if not self._is_backed(key) and (node := self._queue.backed.pop(key, None)) is not None:
            node.backed = False

    def _drop_first(self, node: TreeNode) -> None:
        """Removes a node from the queue if it is the first node. The node's next use can offer it again."""
        if self._queue.first() is node:
            self._queue.drop(node)
        self._current = None

    def _copy_next(self, node: TreeNode, memory: KVMemory) -> PageOperation | None:
        """Begins a copy of the next pages on the path to `node` that no lower tier has.

        Returns:
            The operation, or None. If the host tier has no free page or no unit may be lent, the node stays in the queue. It
            leaves the queue if its tree is retired, if its salt is at its quota, or if lower tiers have all pages and units of
            the path that one prompt may have there.
        """
        path = _path(node)
        if is_retired(_tree_of(path)):
            self._drop_first(node)
            return None
        if self._current is not node:
            self._current, self._num_copied, self._num_copied_units = node, 0, 0
            self._path_copy = self._chosen(path, memory)
            self._current_keys = [key for part in path for key in part.page_keys][: self._path_copy.num_pages]
            self._marks = [] if self._blocks is None else self._blocks.marks(node, self._path_copy.ends)
            self._host.touch(self._path_copy.keys)  # so that a page of the path does not evict another one
        keys, at = self._current_keys, self._num_copied
        while at < len(keys) and self._is_backed(keys[at]):
            at += 1
        self._num_copied = at
        if at < len(keys):
            part = next(part for part in path if part.depth > at)
            begin = part.depth - len(part.pages)
            operation = self._copy(node, part, begin, at - begin, min(part.depth, len(keys)) - begin, memory)
            if operation is None and self._host.is_full(tag_of(keys[0])):
                self._drop_first(node)  # so that other salts do not wait until this salt has free pages
            if operation is not None and self._blocks is not None:
                names = self._blocks.unknown(path, keys, at, at + len(operation.keys))
                self._copying[operation.op_id].blocks = names
            return operation
        while self._num_copied_units < len(self._path_copy.units):
            unit = self._path_copy.units[self._num_copied_units]
            if not self._are_backed(unit.keys) and _present(unit, node, memory):
                operation = self._copy_units(node, memory)
                if operation is None and self._host.is_full(tag_of(unit.keys[0]), len(unit.keys)):
                    self._drop_first(node)
                return operation
            self._num_copied_units += 1
        units = self._path_copy.units
        self._current = None
        self._queue.drop(node)
        for part in path:
            if part.depth <= len(keys):
                memory.tree.mark_backed(part)
        self._name(path, keys)
        self._store(keys, 0)
        for unit in units:
            self._store(unit.keys, 0, 1 + unit.index)
        return None

    def _chosen(self, path: list[TreeNode], memory: KVMemory) -> PathCopy:
        """Returns the pages and units of a path that are copied. Makes the page keys of the path's nodes complete."""
        keys = self._path_keys(path)
        tag = tag_of(keys[0])
        most = min(self._most, self._host.most_pages(tag))
        if memory.units is None:
            return PathCopy(min(most, len(keys)), (), tuple(keys[:most]))
        if self._stored is not None and self._most_salted and tag != UNSALTED:
            most = min(most, self._most_salted)  # pages without their units would be of no use in the storage
        return self._units.path_copy(memory.units, path, keys, most)

    def _copy_units(self, offered: TreeNode, memory: KVMemory) -> PageOperation | None:
        """Begins a copy of the next units of the current path: units of one group on consecutive pages.

        Returns:
            The operation, or None if the host tier has no free pages or no unit may be lent.
        """
        first = self._path_copy.units[self._num_copied_units]
        index, size = first.index, len(first.keys)
        most = min(max(self._at_once // size, 1), memory.num_lendable_units(index))
        some = [first]
        for unit in self._path_copy.units[self._num_copied_units + 1 :]:
            follows = unit.index == index and unit.page == some[-1].page + 1
            if len(some) >= most or not follows or self._are_backed(unit.keys) or not _present(unit, offered, memory):
                break
            some.append(unit)
        if most < 1:
            return None
        host_pages = self._host.take(len(some) * size, tag_of(first.keys[0]))
        count = len(host_pages) // size
        self._host.give_back(host_pages[count * size :])
        if not count:
            return None
        some, host_pages = some[:count], host_pages[: count * size]
        keys = tuple(key for unit in some for key in unit.keys)
        node = next(part for part in _path(offered) if part.depth > some[-1].page)
        units = memory.pin_units(index, node, range(first.page, first.page + count))
        memory.pin(node)
        operation = PageOperation(next(self._ids), OperationKind.BACK_UP, keys, units, host_pages, group=1 + index)
        self._copying[operation.op_id] = _BackUp(operation, 0, offered, node, memory, self._marks, self._path_copy.keys)
        self._being_copied.update(keys)
        return operation

    def _are_backed(self, keys: Sequence[bytes]) -> bool:
        """Returns whether lower tiers have all of these keys, or running copies move them to the host."""
        return all(map(self._is_backed, keys))

    def _copy(
        self, offered: TreeNode, node: TreeNode, begin: int, first: int, limit: int, memory: KVMemory
    ) -> PageOperation | None:
        """Begins a copy of consecutive pages of one node, at most the pages of one operation.

        Args:
            offered: node of the queue.
            node: node with the pages.
            begin: index of the node's first page in the path from the tree's root to `offered`.
            first: index of the first page to copy, counted from the node's first page.
            limit: end of the pages that may be copied, counted from the node's first page; exclusive.
            memory: the owner of the device pages.

        Returns:
            The operation, or None if the host tier has no free page.
        """
        end = first + 1
        while end < limit and end - first < self._at_once and not self._is_backed(node.page_keys[end]):
            end += 1
        host_pages = self._host.take(end - first, tag_of(node.page_keys[first]))
        if not len(host_pages):
            return None
        end = first + len(host_pages)
        keys = node.page_keys[first:end]
        operation = PageOperation(next(self._ids), OperationKind.BACK_UP, keys, node.pages[first:end].copy(), host_pages)
        memory.pin(node)
        self._copying[operation.op_id] = _BackUp(operation, begin + first, offered, node, memory, [], self._path_copy.keys)
        self._being_copied.update(keys)
        return operation

    def _is_backed(self, key: bytes) -> bool:
        """Returns whether a lower tier has the page, or a running copy moves it to the host."""
        return key in self._host or key in self._being_copied or (self._stored is not None and key in self._stored)

    def _path_keys(self, path: list[TreeNode]) -> list[bytes]:
        """Returns the page keys of the whole path. Computes missing page keys and stores them in the nodes."""
        tree = _tree_of(path)
        keys: list[bytes] = []
        for node in path:
            if len(node.page_keys) < len(node.pages):
                link = keys[-1] if keys else self._keys.root(tree)
                node.page_keys = tuple(self._keys.after(link, node.key))
            keys += node.page_keys
        return keys

    def _name(self, path: list[TreeNode], keys: list[bytes]) -> None:
        """Records the blocks of a path of which lower tiers have all pages.

        These blocks may be unknown, because other workers copied some of the pages, or because they end in pages that were
        computed after the copy.
        """
        if self._blocks is not None:
            self._blocks.add(self._blocks.unknown(path, keys, 0, len(keys)))
            self._blocks.add(self._marks)

    def _store(self, keys: tuple[bytes, ...] | list[bytes], first: int, group: int = 0) -> None:
        """Queues writes of pages or parts that the host has and the storage lacks.

        Args:
            keys: page keys of consecutive pages of a path, or keys of the parts of units. Pages beyond the number that one prompt
                of the salt may have in the storage are not stored.
            first: index in the path of the first page; 0 for parts.
            group: PageOperation.group.
        """
        if self._stored is None:
            return
        if keys and self._most_salted and tag_of(keys[0]) != UNSALTED:
            keys = keys[: max(self._most_salted - first, 0)]
        lacking = [key for key in keys if key in self._host and key not in self._stored and key not in self._keys_to_store]
        for at in range(0, len(lacking), self._at_once):
            some = tuple(lacking[at : at + self._at_once])
            if (self._num_to_store + len(some)) * MOST_STORED_SHARE > self._host.num_pages:
                self.unstored_pages_total += 0 if group else len(lacking) - at
                return
            self._num_to_store += len(some)
            self._keys_to_store.update(some)
            blocks = () if self._blocks is None else self._blocks.ending(some)
            pages = self._host.pin(some)
            operation = PageOperation(next(self._ids), OperationKind.STORE, some, NO_PAGES, pages, group, blocks=blocks)
            self._to_store.append(operation)

    def _record_write(self, operation: PageOperation, fact: Fact) -> None:
        if not operation.group:
            self.stored_pages_total += len(fact.stored)
            self.unstored_pages_total += len(operation.keys) - fact.count
        self.failed_total += fact.count < len(operation.keys)
        self._end_write(operation)

    def _drop_write(self, operation: PageOperation) -> None:
        self.unstored_pages_total += 0 if operation.group else len(operation.keys)
        self._end_write(operation)

    def _end_write(self, operation: PageOperation) -> None:
        self._num_to_store -= len(operation.keys)
        self._keys_to_store.difference_update(operation.keys)
        self._host.unpin(operation.host_pages)


def _present(unit: StoredUnit, end: TreeNode, memory: KVMemory) -> bool:
    """Returns whether the tree has the unit. `end` is a node at the unit's page or after it."""
    return memory.units is not None and memory.units.unit_of(unit.index, end, unit.page) != NO_UNIT


def _tree_of(path: list[TreeNode]) -> str:
    """Returns the name of the path's tree."""
    root = path[0].parent
    assert root is not None and root.parent is None, "a path begins below a root"
    return root.key.decode()


def _path(node: TreeNode) -> list[TreeNode]:
    """Returns the nodes from below the root to `node`."""
    out: list[TreeNode] = []
    walk: TreeNode | None = node
    while walk is not None and walk.parent is not None:
        out.append(walk)
        walk = walk.parent
    return out[::-1]

"""Copies of cached pages on their way down: device to host, and host to storage where there is one.

Pages go ahead of their eviction, in the queue's order, a prefix before what is built on it, so that what is kept can be found
from its beginning. So many are under way at once and no more; what is evicted before its turn comes is lost and counted. No step
waits for a copy. Single owner: Tiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.worker.core.contracts.transfers import NO_PAGES, Fact, KeptBlock, OperationKind, PageOperation
from services.worker.core.contracts.tree_name import is_retired
from services.worker.core.kv.backup_queue import BackupQueue
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.tree_node import TreeNode
from services.worker.core.tiers.host_index import HostIndex
from services.worker.core.tiers.kept_blocks import KeptBlocks
from services.worker.core.tiers.page_keys import UNSALTED, PageKeys, tag_of

LOOKS = 16  # at nodes, in one plan
MOST_BACK_UPS = 8  # operations under way: a turn may take as long as a large step
MOST_PATH_SHARE = 2  # one part in so many of the host's pages may be one prompt's
MOST_STORED_SHARE = 2  # one part in so many of the host's pages may wait for the storage
MOST_QUOTA_SHARE = 2  # one part in so many of what a salt may have in the storage may be one prompt's


@dataclass(slots=True)
class _BackUp:
    """offered: the node of the queue whose path it is of; first: the page of the path that it begins with. counts: whether what
    it copies is kept. forgotten: the pages that it reads go with it. blocks: that its pages are of."""

    operation: PageOperation
    first: int
    offered: TreeNode
    node: TreeNode
    memory: KVMemory
    blocks: list[KeptBlock]
    counts: bool = True
    forgotten: bool = False


class Backups:
    """at_once: pages of one operation. stored: keys that the storage holds; None: there is no storage. blocks: of the prefix
    index, None where nobody asks for them. stored_salt_pages: that the storage holds of one salt at most; 0: there is no such
    limit. backed_up_pages_total: host pages written. stored_pages_total: of the storage.
    unstored_pages_total: that were not stored, for too many waited or the storage failed. failed_total: operations."""

    def __init__(
        self,
        queue: BackupQueue,
        keys: PageKeys,
        host: HostIndex,
        stored: set[bytes] | None,
        blocks: KeptBlocks | None,
        at_once: int,
        ids: Iterator[int],
        stored_salt_pages: int = 0,
    ) -> None:
        self._queue, self._keys, self._host, self._stored, self._blocks = queue, keys, host, stored, blocks
        self._at_once, self._ids = at_once, ids
        self._most = max(host.num_pages // MOST_PATH_SHARE, 1)
        self._most_salted = max(stored_salt_pages // MOST_QUOTA_SHARE, 1) if stored_salt_pages else 0
        self._looked_at: TreeNode | None = None
        self._looked, self._looked_keys = 0, list[bytes]()  # of its path's keys, so many are kept
        host.on_gone = self.gone
        self._copying: dict[int, _BackUp] = {}
        self._storing: PageOperation | None = None
        self._storing_counts = True
        self._to_store: deque[PageOperation] = deque()
        self._on_their_way: set[bytes] = set()  # to the host
        self._to_be_stored: set[bytes] = set()
        self._num_to_store = 0
        self.backed_up_pages_total = self.stored_pages_total = self.unstored_pages_total = self.failed_total = 0

    @property
    def num_copying(self) -> int:
        """Operations under way that read the device's pages."""
        return len(self._copying)

    @property
    def num_storing(self) -> int:
        """Pages."""
        return self._num_to_store

    @property
    def lost_pages_total(self) -> int:
        return self._queue.lost_pages_total

    def plan(self, memory: KVMemory) -> list[PageOperation]:
        """Operations that begin now."""
        operations: list[PageOperation] = []
        for _ in range(LOOKS):
            node = self._queue.first()
            if node is None or len(self._copying) >= MOST_BACK_UPS:
                break
            operation = self._look(node, memory)
            if operation is not None:
                operations.append(operation)
            elif self._queue.first() is node:
                break  # the host has no room
        if self._storing is None and self._to_store:
            self._storing, self._storing_counts = self._to_store.popleft(), True
            operations.append(self._storing)
        return operations

    def ended(self, fact: Fact) -> bool:
        """Takes in a fact. False: it is of no operation of these."""
        if self._storing is not None and fact.op_id == self._storing.op_id:
            operation, self._storing = self._storing, None
            self._stored_some(operation, fact)
            return True
        copy = self._copying.pop(fact.op_id, None)
        if copy is None:
            return False
        operation = copy.operation
        count = fact.count if copy.counts else 0
        self._on_their_way.difference_update(operation.keys)
        self._host.put(operation.keys[:count], operation.host_pages[:count])
        if count and self._blocks is not None:
            self._blocks.changed(operation.keys[:count])
            self._blocks.named(copy.blocks)
        self._host.give_back(operation.host_pages[count:])
        self._host.touch([key for part in _path(copy.node) for key in part.page_keys])  # what came first goes last
        copy.memory.unpin(copy.node)
        self.backed_up_pages_total += count
        if fact.count < len(operation.keys):
            self.failed_total += 1
            self._put_off(copy.offered)
        if count < len(operation.keys):
            copy.node.backed = False
        if copy.forgotten:
            copy.memory.forget(copy.node)
        self._store(operation.keys[:count], copy.first)
        return True

    def forget_copies(self, pages_too: bool, tag: bytes | None = None) -> None:
        """What is under way to the host counts for nothing when it ends. pages_too: those of the device are to be forgotten.
        tag: of the salt that is meant; None: any."""
        self._looked_at = None
        for copy in self._copying.values():
            if tag is None or tag_of(copy.operation.keys[0]) == tag:
                copy.counts = False
                copy.forgotten |= pages_too

    def is_void(self, fact: Fact) -> bool:
        """What it stored was to be forgotten meanwhile."""
        return self._storing is not None and fact.op_id == self._storing.op_id and not self._storing_counts

    def forget_storing(self) -> None:
        """What is stored just now, and what waits for it, is to be forgotten."""
        self._storing_counts = False
        self.forget_waiting()

    def forget_waiting(self, tag: bytes | None = None) -> None:
        """Nothing that waits for the storage is stored any more. tag: of the salt that is meant; None: any."""
        waiting, self._to_store = self._to_store, deque()
        for operation in waiting:
            if tag is None or tag_of(operation.keys[0]) == tag:
                self._leave_out(operation)
            else:
                self._to_store.append(operation)

    def clear(self) -> None:
        """The tree is given up."""
        self._queue.clear()
        self._looked_at = None

    def gone(self, key: bytes) -> None:
        """A tier does not hold it any more: whoever was backed by it is not, unless another one does."""
        if self._blocks is not None:
            self._blocks.changed((key,))
        if not self._is_kept(key) and (node := self._queue.backed.pop(key, None)) is not None:
            node.backed = False

    def _put_off(self, node: TreeNode) -> None:
        """A copy of it has failed: it is not tried again before its next use."""
        if self._queue.first() is node:
            self._queue.drop(node)
        self._looked_at = None

    def _look(self, node: TreeNode, memory: KVMemory) -> PageOperation | None:
        """The next pages of the path to `node` that are not kept elsewhere. None: there are none, and the node is dropped; or the
        host has no room just now."""
        path = _path(node)
        if is_retired(_tree_of(path)):
            self._put_off(node)
            return None
        if self._looked_at is not node:
            self._looked_at, self._looked = node, 0
            keys = self._path_keys(path)
            self._looked_keys = keys[: min(self._most, self._host.most_pages(tag_of(keys[0])))]
            self._host.touch(self._looked_keys)  # no page of the path is to make room for another one of it
        keys, at = self._looked_keys, self._looked
        while at < len(keys) and self._is_kept(keys[at]):
            at += 1
        self._looked = at
        if at < len(keys):
            part = next(part for part in path if part.depth > at)
            begin = part.depth - len(part.pages)
            operation = self._copy(node, part, begin, at - begin, min(part.depth, len(keys)) - begin, memory)
            if operation is None and self._host.is_full(tag_of(keys[0])):
                self._put_off(node)  # others do not wait until this salt has room
            if operation is not None and self._blocks is not None:
                names = self._blocks.unnamed(path, keys, at, at + len(operation.keys))
                self._copying[operation.op_id].blocks = names
            return operation
        self._looked_at = None
        self._queue.drop(node)
        for part in path:
            if part.depth <= len(keys):
                memory.tree.mark_backed(part)
        self._name(path, keys)
        self._store(keys, 0)
        return None

    def _copy(
        self, offered: TreeNode, node: TreeNode, begin: int, first: int, limit: int, memory: KVMemory
    ) -> PageOperation | None:
        """Of the node's pages from `first` up to `limit`, as many as one operation takes. begin: its first page's in the path."""
        end = first + 1
        while end < limit and end - first < self._at_once and not self._is_kept(node.page_keys[end]):
            end += 1
        host_pages = self._host.take(end - first, tag_of(node.page_keys[first]))
        if not len(host_pages):
            return None
        end = first + len(host_pages)
        keys = node.page_keys[first:end]
        operation = PageOperation(next(self._ids), OperationKind.BACK_UP, keys, node.pages[first:end].copy(), host_pages)
        memory.pin(node)
        self._copying[operation.op_id] = _BackUp(operation, begin + first, offered, node, memory, [])
        self._on_their_way.update(keys)
        return operation

    def _is_kept(self, key: bytes) -> bool:
        return key in self._host or key in self._on_their_way or (self._stored is not None and key in self._stored)

    def _path_keys(self, path: list[TreeNode]) -> list[bytes]:
        """Of all pages of the path, from its beginning; those that are not known yet are made."""
        tree = _tree_of(path)
        keys: list[bytes] = []
        for node in path:
            if len(node.page_keys) < len(node.pages):
                link = keys[-1] if keys else self._keys.root(tree)
                node.page_keys = tuple(self._keys.after(link, node.key))
            keys += node.page_keys
        return keys

    def _name(self, path: list[TreeNode], keys: list[bytes]) -> None:
        """All of these pages are kept: some perhaps since before their tokens were known, or by others."""
        if self._blocks is not None:
            self._blocks.named(self._blocks.unnamed(path, keys, 0, len(keys)))

    def _store(self, keys: tuple[bytes, ...] | list[bytes], first: int) -> None:
        """Lines up those that the host holds and the storage lacks. first: the page of the path that they begin with; of a prompt
        longer than its salt may have the beginning is kept."""
        if self._stored is None:
            return
        if keys and self._most_salted and tag_of(keys[0]) != UNSALTED:
            keys = keys[: max(self._most_salted - first, 0)]
        lacking = [key for key in keys if key in self._host and key not in self._stored and key not in self._to_be_stored]
        for at in range(0, len(lacking), self._at_once):
            some = tuple(lacking[at : at + self._at_once])
            if (self._num_to_store + len(some)) * MOST_STORED_SHARE > self._host.num_pages:
                self.unstored_pages_total += len(lacking) - at
                return
            self._num_to_store += len(some)
            self._to_be_stored.update(some)
            blocks = () if self._blocks is None else self._blocks.ending(some)
            pages = self._host.pin(some)
            self._to_store.append(PageOperation(next(self._ids), OperationKind.STORE, some, NO_PAGES, pages, blocks=blocks))

    def _stored_some(self, operation: PageOperation, fact: Fact) -> None:
        self.stored_pages_total += len(fact.stored)
        self.unstored_pages_total += len(operation.keys) - fact.count
        self.failed_total += fact.count < len(operation.keys)
        self._leave_line(operation)

    def _leave_out(self, operation: PageOperation) -> None:
        self.unstored_pages_total += len(operation.keys)
        self._leave_line(operation)

    def _leave_line(self, operation: PageOperation) -> None:
        self._num_to_store -= len(operation.keys)
        self._to_be_stored.difference_update(operation.keys)
        self._host.unpin(operation.host_pages)


def _tree_of(path: list[TreeNode]) -> str:
    """Its name."""
    root = path[0].parent
    assert root is not None and root.parent is None, "a path begins below a root"
    return root.key.decode()


def _path(node: TreeNode) -> list[TreeNode]:
    """From the first node below the root to `node`."""
    out: list[TreeNode] = []
    walk: TreeNode | None = node
    while walk is not None and walk.parent is not None:
        out.append(walk)
        walk = walk.parent
    return out[::-1]

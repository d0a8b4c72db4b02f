"""Nodes of the radix tree that wait to be copied down the tiers, in the order in which that was asked. Written by RadixCache;
read by Backups."""

from __future__ import annotations

from collections import deque

from services.worker.core.kv.tree_node import TreeNode


class BackupQueue:
    """What offers a node. unlocked: nobody uses it any more. appended: it is new. hits: so many admissions on its path, 0 for
    never. backed: nodes that are kept as a whole in another tier, by the key of their last page, which is the first to go there.
    lost_pages_total: pages that went before they were copied."""

    def __init__(self, unlocked: bool, appended: bool, hits: int) -> None:
        self._when_unlocked, self._when_appended, self._hits = unlocked, appended, hits
        self._nodes: deque[TreeNode] = deque()
        self.backed: dict[bytes, TreeNode] = {}
        self.lost_pages_total = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def unlocked(self, node: TreeNode) -> None:
        """Nobody uses it any more: whoever came first is the coldest. What was copied before is looked at again, for copies may
        have gone."""
        if self._when_unlocked or self._when_appended or node.backed:
            self._offer(node)

    def appended(self, node: TreeNode) -> None:
        if self._when_appended:
            self._offer(node)

    def hit(self, node: TreeNode) -> None:
        """A request is about to be counted among its hits."""
        if self._hits and node.hits + 1 >= self._hits:
            self._offer(node)

    def marked(self, node: TreeNode) -> None:
        """All of it is kept elsewhere."""
        if len(node.page_keys) == len(node.pages):
            self.backed[node.page_keys[-1]] = node

    def removed(self, node: TreeNode, needed: bool) -> None:
        """needed: its place was, by somebody."""
        if node.page_keys and self.backed.get(node.page_keys[-1]) is node:
            del self.backed[node.page_keys[-1]]
        if needed and not node.backed:
            self.lost_pages_total += len(node.pages)

    def first(self) -> TreeNode | None:
        while self._nodes:
            node = self._nodes[0]
            if not node.gone:
                return node
            self.drop(node)
        return None

    def drop(self, node: TreeNode) -> None:
        """The first one is done with, for now."""
        assert self._nodes[0] is node, "only the first is looked at"
        self._nodes.popleft()
        node.offered = False

    def clear(self) -> None:
        """The tree is given up."""
        self._nodes.clear()
        self.backed.clear()

    def _offer(self, node: TreeNode) -> None:
        if not node.offered and node.parent is not None:
            node.offered = True
            self._nodes.append(node)

"""The nodes of the radix tree that wait to be copied down the tiers, in the order in which they were offered.

RadixCache writes the queue, Backups reads it.
"""

from __future__ import annotations

from collections import deque

from services.worker.core.kv.tree_node import TreeNode


class BackupQueue:
    """The queue of nodes to copy, and the nodes that other tiers have completely."""

    def __init__(self, unlocked: bool, appended: bool, hits: int) -> None:
        """Starts empty.

        Args:
            unlocked: offer nodes that no request uses any more.
            appended: offer new nodes.
            hits: offer nodes with this number of admissions on their path; 0 for never.
        """
        self._when_unlocked, self._when_appended, self._hits = unlocked, appended, hits
        self._nodes: deque[TreeNode] = deque()
        # Nodes that another tier has completely, by the key of their last page, which leaves that tier first.
        self.backed: dict[bytes, TreeNode] = {}
        self.lost_pages_total = 0  # pages that were evicted before they were copied

    def __len__(self) -> int:
        return len(self._nodes)

    def unlocked(self, node: TreeNode) -> None:
        """Offers a node that no request uses any more. A copied node is offered again, because its copy may be gone."""
        if self._when_unlocked or self._when_appended or node.backed:
            self._offer(node)

    def appended(self, node: TreeNode) -> None:
        if self._when_appended:
            self._offer(node)

    def hit(self, node: TreeNode) -> None:
        """Offers a node whose hits are about to rise."""
        if self._hits and node.hits + 1 >= self._hits:
            self._offer(node)

    def marked(self, node: TreeNode) -> None:
        """Records that another tier has the whole node."""
        if len(node.page_keys) == len(node.pages):
            self.backed[node.page_keys[-1]] = node

    def removed(self, node: TreeNode, needed: bool) -> None:
        """Forgets a node that left the tree. needed: because its pages were needed, so that they count as lost."""
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
        """Removes the first node. A later use offers it again."""
        assert self._nodes[0] is node, "only the first is looked at"
        self._nodes.popleft()
        node.offered = False

    def clear(self) -> None:
        """Empties the queue, because the tree is reset."""
        self._nodes.clear()
        self.backed.clear()

    def _offer(self, node: TreeNode) -> None:
        if not node.offered and node.parent is not None:
            node.offered = True
            self._nodes.append(node)

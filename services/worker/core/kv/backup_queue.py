"""The nodes of the radix tree that wait to be copied to lower tiers, in the order in which RadixCache added them.

Backups takes nodes from the queue and copies their pages. To offer a node means to add it unless it is in the queue already.
"""

from __future__ import annotations

from collections import deque

from rootstock_llm.services.worker.core.kv.tree_node import TreeNode


class BackupQueue:
    """The queue of nodes to copy, and the record of completely copied nodes."""

    def __init__(self, unlocked: bool, appended: bool, hits: int) -> None:
        """Starts empty. The arguments follow from the WritePolicy.

        Args:
            unlocked: whether a node is offered when its last lock ends.
            appended: whether a new node is offered.
            hits: number of admissions on a node's path after which the node is offered; 0: admissions offer no nodes.
        """
        self._when_unlocked, self._when_appended, self._hits = unlocked, appended, hits
        self._nodes: deque[TreeNode] = deque()
        # Completely copied nodes by the key of their last page. A tier evicts a node's last page first.
        self.backed: dict[bytes, TreeNode] = {}
        self.lost_pages_total = 0  # pages that were evicted before they were copied

    def __len__(self) -> int:
        return len(self._nodes)

    def unlocked(self, node: TreeNode) -> None:
        """Offers a node that loses its last lock.

        With write_through_selective, only a copied node is offered, because its copy may have been evicted.
        """
        if self._when_unlocked or self._when_appended or node.backed:
            self._offer(node)

    def appended(self, node: TreeNode) -> None:
        if self._when_appended:
            self._offer(node)

    def hit(self, node: TreeNode) -> None:
        """Offers the node at the end of a request's hit, if the request's admission brings the node's hits to the limit.

        Called before node.hits counts the admission.
        """
        if self._hits and node.hits + 1 >= self._hits:
            self._offer(node)

    def marked(self, node: TreeNode) -> None:
        """Records that a lower tier has the whole node."""
        if len(node.page_keys) == len(node.pages):
            self.backed[node.page_keys[-1]] = node

    def removed(self, node: TreeNode, needed: bool) -> None:
        """Forgets a node that has left the tree.

        Args:
            node: the node.
            needed: whether the node was evicted because other data needs its pages. Pages without a copy then count as lost.
        """
        if node.page_keys and self.backed.get(node.page_keys[-1]) is node:
            del self.backed[node.page_keys[-1]]
        if needed and not node.backed:
            self.lost_pages_total += len(node.pages)

    def first(self) -> TreeNode | None:
        """Returns the first node that is still in the tree, and drops the nodes before it. None if the queue is empty."""
        while self._nodes:
            node = self._nodes[0]
            if not node.gone:
                return node
            self.drop(node)
        return None

    def drop(self, node: TreeNode) -> None:
        """Removes the first node, which must be `node`. The next use of the node can offer it again."""
        assert self._nodes[0] is node, "only the first node is dropped"
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

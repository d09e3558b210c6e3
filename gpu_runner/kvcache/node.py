"""The radix tree's node, and the list that keeps nodes by recency of use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.pages import Int32, IntegrityError, require

REMOVED = -1
"""The lock count of a node that left its tree."""


class Node:
    """A run of cached pages. Opaque to users of the tree, except for being passed back to it."""

    __slots__ = (
        "children",
        "epoch",
        "last_use",
        "lock_count",
        "namespace",
        "next",
        "pages",
        "parent",
        "pins",
        "prev",
        "tokens",
    )

    def __init__(self, namespace: str, parent: Node | None, tokens: Int32, pages: Int32) -> None:
        self.namespace = namespace
        self.parent = parent  # None: a root, whose run is empty
        self.tokens = tokens  # [len(pages) * PAGE_SIZE]
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.pins: dict[str, int] = {}  # by owner, how many pins are held here or below
        self.epoch = 0  # the last step that may read the pages on behalf of a lock that is gone
        self.last_use = 0  # the tree's count of uses at the latest one
        self.prev: Node | None = None
        self.next: Node | None = None

    @classmethod
    def root(cls, namespace: str) -> Node:
        return cls(namespace, None, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))

    @property
    def key(self) -> bytes:
        """What the parent finds this node by."""
        return self.tokens[:PAGE_SIZE].tobytes()

    def up(self) -> Iterator[Node]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        return list(self.up())[::-1]

    def descendants(self) -> Iterator[Node]:
        """All nodes below, parents before children; no recursion, since a chain may be long."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Compare the node's run and children with what it says of them; raises `IntegrityError`."""
        num_tokens, num_pages = len(self.tokens), len(self.pages)
        require(num_tokens == num_pages * PAGE_SIZE, f"a node has {num_tokens} tokens in {num_pages} pages")
        locks = 0
        pins: Counter[str] = Counter()
        for key, child in self.children.items():
            require(child.parent is self, "a child names another parent")
            require(len(child.pages) > 0, "a node has no pages")
            require(child.key == key, "a child stands under another page's key")
            require(child.lock_count >= 0, "a node in the tree is marked as removed")
            require(child.epoch <= self.epoch, f"a child's epoch {child.epoch} is after its parent's {self.epoch}")
            used_before = self.parent is None or child.last_use <= self.last_use
            require(used_before, f"a child's last use {child.last_use} is after its parent's {self.last_use}")
            locks += child.lock_count
            pins.update(child.pins)
        require(self.lock_count >= locks, f"lock count {self.lock_count} is under the children's sum {locks}")
        require(
            sum(self.pins.values()) <= self.lock_count and min(self.pins.values(), default=1) > 0, "a pin locks not"
        )
        require(all(self.pins.get(owner, 0) >= count for owner, count in pins.items()), "a child has more pins")


class RecencyList:
    """Nodes in a doubly linked list through their own fields, least recently used first; all changes are O(1)."""

    def __init__(self) -> None:
        self._end = Node.root("")
        self._end.prev = self._end.next = self._end

    def append(self, node: Node) -> None:
        """Add a node as the most recently used."""
        self._link(node, _linked(self._end.prev), self._end)

    def insert_after(self, node: Node, before: Node) -> None:
        self._link(node, before, _linked(before.next))

    def remove(self, node: Node) -> None:
        before, following = _linked(node.prev), _linked(node.next)
        before.next, following.prev = following, before
        node.prev = node.next = None

    def __iter__(self) -> Iterator[Node]:
        """From the least recently used; the node at hand may be removed meanwhile."""
        node = _linked(self._end.next)
        while node is not self._end:
            following = _linked(node.next)
            yield node
            node = following

    def check_integrity(self) -> set[Node]:
        """Check links and order, children before parents; returns the nodes. Raises `IntegrityError`."""
        seen: set[Node] = set()
        before = self._end
        for node in self:
            require(node not in seen and node.prev is before, "the recency list's links contradict each other")
            in_order = before is self._end or before.last_use <= node.last_use
            require(in_order, f"last use {before.last_use} stands before {node.last_use}")
            require(seen.issuperset(node.children.values()), "a node stands before its child")
            seen.add(node)
            before = node
        require(self._end.prev is before, "the recency list's links contradict each other")
        return seen

    @staticmethod
    def _link(node: Node, before: Node, following: Node) -> None:
        node.prev, node.next = before, following
        before.next = following.prev = node


def _linked(node: Node | None) -> Node:
    if node is None:
        raise IntegrityError("a node was taken to be in the recency list, but is not")
    return node

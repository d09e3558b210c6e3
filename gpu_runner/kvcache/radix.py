"""The prefix cache: which runs of tokens have their KV pages computed, as a tree of page runs.

Page-granular: a node is a run of whole pages with the tokens in them, a child is found by the bytes of its first page's
tokens, and the rest of its run is compared token by token, so nothing can collide. A namespace has a root of its own.

Lock counts: `lock(node)` counts on the node and all its ancestors, so a node's count is at least the sum of its
children's; the difference is the handles held on the node itself. A handle (a `Node`) means "everything up to here" and
stays valid while it is locked: a split leaves the lower part, and a merge the lower node, the same object; `extend`
takes a handle and returns the one in its place.

Recency: all unlocked nodes are in one doubly linked list, least recently used first. Whatever is touched is touched
as a path, deepest node first, and an unlocked node has only unlocked descendants, so a node always stands behind its
descendants: the head of the list is a leaf, and a parent whose last child is evicted already stands where its own last
use puts it. Hence eviction is exact LRU and costs what it evicts.

A removed node is part of no reference cycle, since nothing in the tree or the list refers to it any more: its memory
returns at once although the collector is off in the loop.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.node import REMOVED, Node, RecencyList
from gpu_runner.kvcache.pages import Int32, PagePool, require

__all__ = ["Match", "Node", "RadixTree", "common_length"]


_NO_PAGES: Int32 = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


class Match(NamedTuple):
    """The longest cached prefix: `node` ends it, `pages` [m] are its page ids from the start."""

    node: Node
    pages: Int32


class RadixTree:
    """Cached prefixes over the pages of `pool`; the tree holds one reference to each page it names."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._clock = 0
        self.start_over()

    def start_over(self) -> None:
        """Forget everything, the pool's references too: it has to start over with the tree."""
        self.num_pages = 0
        self.num_evictable = 0  # pages of unlocked nodes
        self._roots: dict[str, Node] = {}  # only roots that have children
        self._lru = RecencyList()  # the unlocked nodes

    def match(self, namespace: str, tokens: Int32) -> Match:
        """Find the longest run of whole cached pages that is a prefix of `tokens` [n]; touches it.

        The result is valid until the next call unless `lock(node)` is that call; no page references are taken. Cap
        `tokens` at prompt - 1, so that at least one token is left to compute.
        """
        end, _ = self._walk(namespace, _int32(tokens))
        if end.parent is None:
            return Match(end, _NO_PAGES)
        self._touch(end)
        return Match(end, _joined([node.pages for node in end.path()]))

    def content(self, node: Node) -> tuple[Int32, Int32]:
        """What a handle, locked or not, stands for: tokens [k * PAGE_SIZE] and pages [k] from the start to the node's
        end; none of either once it has left the tree."""
        path = [] if node.lock_count == REMOVED else node.path()
        return _joined([part.tokens for part in path]), _joined([part.pages for part in path])

    def lock(self, node: Node) -> None:
        """Keep the node and its ancestors from eviction. Raises `IntegrityError` if it has been evicted already."""
        require(node.lock_count != REMOVED, "a node was locked after it had left the tree")
        at: Node | None = node
        while at is not None:
            if at.lock_count == 0 and at.parent is not None:
                self._lru.remove(at)
                self.num_evictable -= len(at.pages)
            at.lock_count += 1
            at = at.parent

    def unlock(self, node: Node, epoch: int) -> Node:
        """Undo one `lock(node)`; steps up to `epoch`, the last launched, may still read the pages. Touches the path.
        Returns the node that has its pages then.

        A node that nobody holds any more and that was last used together with its only child is merged into it, so
        that a prompt cached chunk by chunk does not stay a chain of small nodes.
        """
        require(node.lock_count > 0, "a node was unlocked more often than locked")
        used_as_one = len(node.children) == 1 and next(iter(node.children.values())).last_use == node.last_use
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.lock_count -= 1
            at.epoch = max(at.epoch, epoch)
            at.last_use = self._clock
            if at.lock_count == 0 and at.parent is not None:
                self._lru.append(at)
                self.num_evictable += len(at.pages)
            at = at.parent
        return self._merge_into_only_child(node) if used_as_one else node

    def pin(self, node: Node, owner: str) -> int:
        """Lock the node for longer than a row runs. Returns how many more pages `owner` has pinned now."""
        num_new = self.num_unpinned(node, owner)
        self.lock(node)
        for at in node.up():
            at.pins[owner] = at.pins.get(owner, 0) + 1
        return num_new

    def unpin(self, node: Node, owner: str) -> int:
        """Undo one `pin(node, owner)`. Returns how many fewer pages `owner` has pinned now."""
        num_gone = 0
        for at in node.up():
            at.pins[owner] -= 1
            if not at.pins[owner]:
                del at.pins[owner]
                num_gone += len(at.pages)
        self.unlock(node, 0)  # no step has read the pages for the pin's sake
        return num_gone

    def num_unpinned(self, node: Node, owner: str) -> int:
        """How many pages up to the node's end `owner` has not pinned."""
        return sum(len(at.pages) for at in takewhile(lambda at: owner not in at.pins, node.up()))

    def insert(self, namespace: str, tokens: Int32, pages: Int32) -> Node:
        """Make `tokens` [k * PAGE_SIZE] cached and return the node that ends with them, unlocked where it is new.

        Parts that are cached already keep the tree's pages; for the others the tree takes a reference of its own to
        the caller's `pages` [k]. Release the caller's references with the epoch of the last step that touches them.
        """
        tokens = _int32(tokens)
        if len(tokens) != len(pages) * PAGE_SIZE:
            raise ValueError(f"{len(pages)} pages hold {len(pages) * PAGE_SIZE} tokens, got {len(tokens)}")
        node, depth = self._walk(namespace, tokens)
        if depth < len(pages):
            fresh = np.array(pages[depth:], dtype=np.int32)
            self._pool.incref(fresh)
            node = self._append(node, tokens[depth * PAGE_SIZE :].copy(), fresh)
        self._touch(node)
        return node

    def extend(self, node: Node, tokens: Int32, pages: Int32) -> Node | None:
        """Make `tokens` [k * PAGE_SIZE], k > 0, cached behind a node that the caller has locked: its references to
        `pages` [k] become the tree's. Returns the node that ends with them, to which the lock has moved; None, with
        nothing changed, where something that begins with the same page is cached there already.

        A node that nobody else holds and nothing follows becomes part of the new one, so that a prompt cached chunk by
        chunk is no chain of small nodes. Nothing is touched: that is done when the lock ends.
        """
        key, parent = tokens[:PAGE_SIZE].tobytes(), node
        if node.parent is None:
            parent = self._roots.setdefault(node.namespace, node)
        if key in parent.children:
            return None
        self.num_pages += len(pages)
        if node.parent is None or node.lock_count > 1 or node.children:
            leaf = Node(node.namespace, parent, tokens.copy(), pages.copy())
            node.lock_count -= 1  # the same one, unless it is a root from when nothing of the namespace was cached
            parent.lock_count += 1
        else:
            parent, key = node.parent, node.key
            leaf = Node(
                node.namespace, parent, np.concatenate((node.tokens, tokens)), np.concatenate((node.pages, pages))
            )
            leaf.epoch = node.epoch
            node.lock_count = REMOVED
        parent.children[key] = leaf
        leaf.lock_count = 1
        leaf.last_use = node.last_use
        return leaf

    def evict(self, count: int) -> int:
        """Drop least recently used unlocked pages, last page of a leaf first, until `count` became free at once.

        Returns how many did. Pages that somebody outside references are dropped without counting. Leaves that a step
        in flight may still read stay: dropping them would free nothing before that step completes.
        """
        freed = 0
        while freed < count and (dropped := self._cut_tails(count - freed)):
            freed += self._pool.decref(_joined(dropped), 0)  # no step in flight may read them
        return freed

    def drop_namespace(self, namespace: str) -> int:
        """Forget everything unlocked of a namespace. Returns how many pages became free at once."""
        root = self._roots.get(namespace)
        freed = 0
        for node in reversed(list(root.descendants()) if root else []):
            if node.lock_count == 0:
                freed += self._pool.decref(self._cut_tail(node, len(node.pages)), node.epoch)
        return freed

    def pages_held(self) -> Int32:
        """Every page reference the tree holds: [num_pages], a page once per reference."""
        return _joined([node.pages for root in self._roots.values() for node in root.descendants()])

    def check_at_rest(self) -> None:
        """Compare the counts with the nodes, and all pages with the pool's, where nobody but the tree has any and only
        pins lock; raises `IntegrityError`. Takes a moment: O(nodes + pages)."""
        num_pages = num_evictable = 0
        for root in self._roots.values():
            for node in root.descendants():
                require(node.lock_count == sum(node.pins.values()), "a prefix is locked for nobody")
                num_pages += len(node.pages)
                num_evictable += 0 if node.lock_count else len(node.pages)
        require(num_pages == self.num_pages, f"num_pages is {self.num_pages}, the nodes have {num_pages}")
        require(num_evictable == self.num_evictable, f"num_evictable {self.num_evictable}, should be {num_evictable}")
        require(not self._pool.num_deferred, f"{self._pool.num_deferred} pages wait for a step that nobody launched")
        self._pool.check_integrity(self.pages_held())

    def check_integrity(self) -> None:
        """Recompute every invariant; raises `IntegrityError`."""
        listed = self._lru.check_integrity()
        num_pages = num_evictable = num_unlocked = 0
        for namespace, root in self._roots.items():
            require(root.parent is None and len(root.pages) == 0, "a root has a parent or a run")
            require(len(root.children) > 0, f"namespace {namespace!r} has a root without children")
            for node in (root, *root.descendants()):
                require(node.namespace == namespace, f"a node of {node.namespace!r} is in {namespace!r}")
                node.check_integrity()
                if node is not root:
                    num_pages += len(node.pages)
                    unlocked = node.lock_count == 0
                    num_evictable += len(node.pages) if unlocked else 0
                    num_unlocked += unlocked
                    require((node in listed) == unlocked, f"lock count {node.lock_count}, wrongly (not) in the list")
        require(len(listed) == num_unlocked, f"{len(listed)} nodes listed, {num_unlocked} unlocked ones in the tree")
        require(num_pages == self.num_pages, f"num_pages is {self.num_pages}, the nodes have {num_pages}")
        require(num_evictable == self.num_evictable, f"num_evictable {self.num_evictable}, should be {num_evictable}")
        require(bool((self._pool.refcount(self.pages_held()) >= 1).all()), "the tree holds a page that is not its own")

    def _walk(self, namespace: str, tokens: Int32) -> tuple[Node, int]:
        """The node that ends the longest cached prefix, split off if need be, and the prefix's length in pages.

        A root that is not in the tree yet is returned where nothing of the namespace is cached.
        """
        node = self._roots.get(namespace) or Node.root(namespace)
        depth = 0
        num_pages = len(tokens) // PAGE_SIZE
        while depth < num_pages:
            rest = tokens[depth * PAGE_SIZE : num_pages * PAGE_SIZE]
            child = node.children.get(rest[:PAGE_SIZE].tobytes())
            if child is None:
                break
            common = common_length(child.tokens, rest) // PAGE_SIZE
            depth += common
            if common < len(child.pages):
                return self._split(child, common), depth
            node = child
        return node, depth

    def _append(self, node: Node, tokens: Int32, pages: Int32) -> Node:
        """Make a leaf of a run behind `node`, where none begins as it does; the references to its pages are the
        tree's."""
        if node.parent is None:
            self._roots[node.namespace] = node
        leaf = Node(node.namespace, node, tokens, pages)
        node.children[leaf.key] = leaf
        self._lru.append(leaf)
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        return leaf

    def _split(self, lower: Node, num_upper: int) -> Node:
        """Give the first `num_upper` pages of a node to a new parent of it, which is returned."""
        parent = lower.parent
        assert parent is not None
        cut = num_upper * PAGE_SIZE
        upper = Node(lower.namespace, parent, lower.tokens[:cut].copy(), lower.pages[:num_upper].copy())
        upper.lock_count, upper.epoch, upper.last_use = lower.lock_count, lower.epoch, lower.last_use
        upper.pins = dict(lower.pins)
        lower.tokens, lower.pages, lower.parent = lower.tokens[cut:].copy(), lower.pages[num_upper:].copy(), upper
        upper.children[lower.key] = lower
        parent.children[upper.key] = upper
        if upper.lock_count == 0:
            self._lru.insert_after(upper, lower)
        return upper

    def _merge_into_only_child(self, node: Node) -> Node:
        (child,) = node.children.values()
        parent = node.parent
        if parent is None or child.lock_count != node.lock_count:
            return node
        parent.children[node.key] = child
        child.parent = parent
        child.tokens = np.concatenate((node.tokens, child.tokens))
        child.pages = np.concatenate((node.pages, child.pages))
        child.epoch = node.epoch
        self._forget(node)
        return child

    def _cut_tails(self, count: int) -> list[Int32]:
        """Drop up to `count` pages of leaves that no step in flight may read; the references to them are the
        caller's."""
        dropped = []
        for node in self._lru:
            if count <= 0:
                break
            if not node.children and node.epoch <= self._pool.completed_epoch:
                dropped.append(self._cut_tail(node, count))
                count -= len(dropped[-1])
        return dropped

    def _cut_tail(self, leaf: Node, count: int) -> Int32:
        """Drop up to `count` pages from the end of an unlocked leaf, the references to which are the caller's."""
        keep = max(len(leaf.pages) - count, 0)
        dropped = leaf.pages[keep:]
        self.num_pages -= len(dropped)
        self.num_evictable -= len(dropped)
        if keep:
            leaf.pages = _shortened(leaf.pages, keep)
            leaf.tokens = _shortened(leaf.tokens, keep * PAGE_SIZE)
        else:
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key]
            if parent.parent is None and not parent.children:
                del self._roots[leaf.namespace]
            self._forget(leaf)
        return dropped

    def _touch(self, node: Node) -> None:
        self._clock += 1
        while node.parent is not None:
            node.last_use = self._clock
            if node.lock_count == 0:
                self._lru.remove(node)
                self._lru.append(node)
            node = node.parent

    def _forget(self, node: Node) -> None:
        if node.lock_count == 0:
            self._lru.remove(node)
        node.lock_count = REMOVED


def _int32(tokens: Int32) -> Int32:
    """A child's key is the bytes of its tokens, which only means something in one dtype."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _joined(runs: list[Int32]) -> Int32:
    return np.concatenate(runs) if runs else _NO_PAGES


def common_length(a: Int32, b: Int32) -> int:
    """How many tokens both begin with."""
    shorter = min(len(a), len(b))
    equal = a[:shorter] == b[:shorter]
    return shorter if equal.all() else int(equal.argmin())


def _shortened(run: Int32, length: int) -> Int32:
    """The run's start as a view, copied once half is gone: cutting costs what is cut, and memory follows."""
    base = run if run.base is None else run.base
    return run[:length].copy() if 2 * length <= len(base) else run[:length]

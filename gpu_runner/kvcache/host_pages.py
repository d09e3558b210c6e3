"""KV pages in host memory: who may be given which, what is in them, and which prefixes those are."""

from __future__ import annotations

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.pages import DUMMY_PAGE, Int32, PagePool, require
from gpu_runner.kvcache.radix import Match, Node, RadixTree


class HostPool(PagePool):
    """A `PagePool` whose epochs are tickets of copies: a page that a copy reads or fills is not given to anybody else
    before that copy is done. What a page holds may be read once the copy that fills it is done.

    Page ids are 1 .. num_pages; page `id` is the memory's page `id - 1`.
    """

    def __init__(self, num_pages: int) -> None:
        """num_pages: pages of host memory; at least 1."""
        super().__init__(num_pages + 1)

    def start_over(self) -> None:
        super().start_over()
        self._filled_by = np.zeros(self.num_pages, np.int64)  # [num_pages + 1], ticket of the latest copy into the page

    def fill(self, pages: Int32, ticket: int) -> None:
        """The copy `ticket` fills these pages."""
        self._filled_by[pages] = ticket

    def filled(self, pages: Int32) -> Int32:
        """The first of `pages` [n], up to one that is still being filled."""
        late = self._filled_by[pages] > self.completed_epoch
        return pages[: int(late.argmax())] if late.any() else pages

    def check_integrity(self, held: Int32 | None = None) -> None:
        super().check_integrity(held)
        require(not self._filled_by[DUMMY_PAGE], "a copy fills the dummy page")


class HostTree(RadixTree):
    """The prefixes of which there are copies in host memory, beside the device's tree and independent of it.

    Every prefix here is whole, from its first page on, whether the device has it as well or not. So neither tree's
    evictions concern the other, and the longest cached prefix is the device's part, and then this tree's pages behind
    it. Nobody runs on pages of the host: a lock keeps a prefix from eviction and means nothing else, and a node's epoch
    is the ticket of the last copy that reads or fills its pages.
    """

    def __init__(self, pool: HostPool) -> None:
        super().__init__(pool)
        self.pool = pool

    def find(self, namespace: str, tokens: Int32) -> Match:
        """As `match`, but only pages that may be read; `node` may end further on."""
        node, pages = self.match(namespace, tokens)
        return Match(node, self.pool.filled(pages))

    def add(self, namespace: str, tokens: Int32, limit: int, ticket: int) -> tuple[int, Int32]:
        """Take pages for the first `limit` of the pages of `tokens` [n] that are not here, evicting older ones as far
        as needed; the copy `ticket` is to fill them. Returns how many are here already, before them, and the new ones
        [up to `limit`]."""
        node, held = self.match(namespace, tokens)
        count = min(len(tokens) // PAGE_SIZE - len(held), limit)
        if count <= 0:
            return len(held), held[:0]
        self.lock(node)
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)
        new = self.pool.allocate(min(count, self.pool.num_free))
        if len(new):
            self.pool.fill(new, ticket)
            begin, end = len(held) * PAGE_SIZE, (len(held) + len(new)) * PAGE_SIZE
            leaf = self._append(node, tokens[begin:end].copy(), new)
            self._touch(leaf)
            self.hold(leaf, ticket)
        self.unlock(node, 0)
        return len(held), new

    def hold(self, node: Node, ticket: int) -> None:
        """Keep the pages from the start to the node's end until the copy `ticket` is done."""
        for at in node.up():
            at.epoch = max(at.epoch, ticket)

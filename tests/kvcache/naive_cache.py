"""The page pool and radix tree beside a naive model of both: dicts of tuples, one entry a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.pages import Int32, OutOfPages, PagePool
from gpu_runner.kvcache.radix import Node, RadixTree

Letters = tuple[int, ...]  # a prompt, one letter a page
Path = tuple[str, Letters]


def page_of_tokens(letter: int) -> Int32:
    """Letters 2i and 2i + 1 differ in the page's last token only."""
    tokens = np.arange(PAGE_SIZE, dtype=np.int32) + 1000 * (letter // 2)
    tokens[-1] += letter % 2
    return tokens


LETTER_TOKENS = [page_of_tokens(letter) for letter in range(8)]
LETTER_OF = {tokens.tobytes(): letter for letter, tokens in enumerate(LETTER_TOKENS)}


def tokens_of(letters: Letters) -> Int32:
    return np.concatenate([np.empty(0, dtype=np.int32), *(LETTER_TOKENS[letter] for letter in letters)])


@dataclass
class CachedPage:
    page: int
    last_use: int = 0
    epoch: int = 0  # the last step named by a lock that is gone


@dataclass
class Row:
    """A running request: a locked prefix of the tree, and pages of its own for the rest."""

    path: Path
    node: Node
    held: Path  # what `node` ends
    pages: list[int]  # of the whole path
    own: list[int]  # those the row has a reference to


@dataclass
class NaiveCache:
    """Drives both sides with the same operations and compares them after each."""

    pool: PagePool
    step: int = 0  # launched; at least the pool's completed epoch
    cached: dict[Path, CachedPage] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    outside: list[list[int]] = field(default_factory=list)  # page references taken by somebody else
    references: Counter[int] = field(default_factory=Counter)
    last_epoch: Counter[int] = field(default_factory=Counter)
    free: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    clock: int = 0
    done: Counter[str] = field(default_factory=Counter)  # what happened how often, so that tests see their own coverage

    def __post_init__(self) -> None:
        self.tree = RadixTree(self.pool)
        self.free = set(range(1, self.pool.num_pages))

    # Operations.

    def launch(self) -> None:
        self.step += 1

    def complete(self, behind: int) -> None:
        epoch = max(self.step - behind, self.pool.completed_epoch)
        self.pool.complete(epoch)
        ready = {page for page in self.deferred if self.last_epoch[page] <= epoch}
        self.deferred -= ready
        self.free |= ready
        self.done["deferred page freed"] += len(ready)

    def look(self, namespace: str, letters: Letters, extra_tokens: int) -> None:
        self._match(namespace, letters, extra_tokens)

    def start(self, namespace: str, letters: Letters) -> None:
        """Begin a row: match, lock, allocate the rest, evicting if need be."""
        node, pages = self._match(namespace, letters, 0)
        held = (namespace, letters[: len(pages)])
        self.tree.lock(node)
        row = Row((namespace, letters), node, held, pages, [])
        self.rows.append(row)
        need = len(letters) - len(pages)
        if need > self.pool.num_free:
            self._evict(need - self.pool.num_free)
        try:
            own = self.pool.allocate(need).tolist()
        except OutOfPages:
            assert need > len(self.free)
            self.done["out of pages"] += 1
            self._unlock(row)
            self.rows.remove(row)
            return
        assert self.free.issuperset(own)
        assert len(set(own)) == need
        self.free -= set(own)
        self.references.update(own)
        row.own = own
        row.pages = pages + own

    def cache_chunk(self, which: int, length: int, lock_first: bool) -> None:
        """Cache the start of a row, as prefill does chunk by chunk, and move its lock there."""
        if not self.rows:
            return
        row = self.rows[which % len(self.rows)]
        namespace, letters = row.path
        length = max(min(length, len(letters)), len(row.held[1]))
        node = self._insert(namespace, letters[:length], row.pages[:length])
        if lock_first:
            self.tree.lock(node)
            self.rows.append(Row(row.path, node, (namespace, letters[:length]), [], []))
            self._unlock(row)
            self.rows.pop()
        else:
            self._unlock(row)
            self.tree.lock(node)
        row.node, row.held = node, (namespace, letters[:length])

    def extend(self, which: int, length: int) -> None:
        """Cache more of a row behind what it holds; the tree takes its references over."""
        if not self.rows:
            return
        row = self.rows[which % len(self.rows)]
        namespace, letters = row.path
        held = len(row.held[1])
        if not held < length <= len(letters):
            return
        pages = row.pages[held:length]
        node = self.tree.extend(row.node, tokens_of(letters[held:length]), np.array(pages, dtype=np.int32))
        if (namespace, letters[: held + 1]) in self.cached:
            assert node is None
            return
        assert node is not None
        self.done["extended"] += 1
        for end in range(held + 1, length + 1):
            self.cached[namespace, letters[:end]] = CachedPage(row.pages[end - 1])
        row.node, row.held = node, (namespace, letters[:length])
        row.own = [page for page in row.own if page not in pages]

    def finish(self, which: int, keep: bool) -> None:
        """End a row, caching what it computed or not; the last launched step may still read it."""
        if not self.rows:
            return
        row = self.rows[which % len(self.rows)]
        if keep:
            self._insert(*row.path, row.pages)
        self._unlock(row)
        self.rows.remove(row)
        self._decref(row.own, self.step)

    def hold(self, namespace: str, letters: Letters) -> None:
        """Take references to cached pages from outside the tree."""
        _, pages = self._match(namespace, letters, 0)
        self.pool.incref(np.array(pages, dtype=np.int32))
        self.references.update(pages)
        self.outside.append(pages)

    def release(self, which: int) -> None:
        if self.outside:
            self._decref(self.outside.pop(which % len(self.outside)), self.step)

    def evict(self, count: int) -> None:
        self._evict(count)

    def drop_namespace(self, namespace: str) -> None:
        unlocked = [path for path in self.cached if path[0] == namespace and not self._num_locks(path)]
        epochs = self._tree_epochs()
        freed = self.tree.drop_namespace(namespace)
        assert freed == sum(self._model_decref(self.cached.pop(path).page, epochs[path]) for path in unlocked)

    # The parts operations are made of, done on both sides.

    def _match(self, namespace: str, letters: Letters, extra_tokens: int) -> tuple[Node, list[int]]:
        following = LETTER_TOKENS[0][:extra_tokens]  # less than a page: never matched
        node, pages = self.tree.match(namespace, np.concatenate((tokens_of(letters), following)))
        expected = []
        for length in range(1, len(letters) + 1):
            entry = self.cached.get((namespace, letters[:length]))
            if entry is None:
                break
            expected.append(entry.page)
        assert pages.tolist() == expected
        assert pages.dtype == np.int32
        self._touch((namespace, letters[: len(expected)]))
        self.done["page matched"] += len(expected)
        return node, expected

    def _insert(self, namespace: str, letters: Letters, pages: list[int]) -> Node:
        node = self.tree.insert(namespace, tokens_of(letters), np.array(pages, dtype=np.int32))
        for length in range(1, len(letters) + 1):
            path = (namespace, letters[:length])
            if path not in self.cached:
                self.cached[path] = CachedPage(pages[length - 1])
                self.references[pages[length - 1]] += 1
            elif self.cached[path].page != pages[length - 1]:
                self.done["tree kept its own page"] += 1
        self._touch((namespace, letters))
        return node

    def _unlock(self, row: Row) -> None:
        namespace, letters = row.held
        own_run = len(row.node.pages)
        above = letters[: len(letters) - own_run]
        self.tree.unlock(row.node, self.step)
        merged = row.node.lock_count < 0
        self.done["merge"] += merged
        row.held = (namespace, ())
        for length in range(1, len(letters) + 1):
            self.cached[namespace, letters[:length]].epoch = self.step
        self._touch((namespace, above if merged else letters))

    def _evict(self, count: int) -> None:
        epochs = self._tree_epochs()
        freed = 0
        while freed < count:
            leaves = [path for path in self._leaves() if epochs[path] <= self.pool.completed_epoch]
            if not leaves:
                break
            oldest = min(leaves, key=lambda path: self.cached[path].last_use)
            freed += self._model_decref(self.cached.pop(oldest).page, epochs[oldest])
            self.done["page evicted"] += 1
        assert self.tree.evict(count) == freed

    def _decref(self, pages: list[int], epoch: int) -> None:
        freed = self.pool.decref(np.array(pages, dtype=np.int32), epoch)
        assert freed == sum(self._model_decref(page, epoch) for page in pages)

    def _model_decref(self, page: int, epoch: int) -> int:
        self.references[page] -= 1
        self.last_epoch[page] = max(self.last_epoch[page], epoch)
        if self.references[page]:
            return 0
        if self.last_epoch[page] > self.pool.completed_epoch:
            self.deferred.add(page)
            return 0
        self.free.add(page)
        return 1

    def _touch(self, path: Path) -> None:
        self.clock += 1
        for length in range(1, len(path[1]) + 1):
            self.cached[path[0], path[1][:length]].last_use = self.clock

    def _num_locks(self, path: Path) -> int:
        namespace, letters = path
        return sum(
            row.held[0] == namespace and row.held[1][: len(letters)] == letters for row in self.rows if row.held[1]
        )

    def _leaves(self) -> list[Path]:
        parents = {(namespace, letters[:-1]) for namespace, letters in self.cached}
        return [path for path in self.cached if path not in parents and not self._num_locks(path)]

    # Comparison.

    def _tree_pages(self) -> dict[Path, tuple[int, Node]]:
        found: dict[Path, tuple[int, Node]] = {}
        for namespace, root in self.tree._roots.items():
            above: list[tuple[Node, Letters]] = [(root, ())]
            while above:
                node, letters = above.pop()
                for child in node.children.values():
                    run = letters
                    for index, page in enumerate(child.pages.tolist()):
                        tokens = child.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
                        run = (*run, LETTER_OF[tokens.tobytes()])
                        found[namespace, run] = (page, child)
                    above.append((child, run))
        return found

    def _tree_epochs(self) -> dict[Path, int]:
        return {path: node.epoch for path, (_, node) in self._tree_pages().items()}

    def check(self) -> None:
        """Compare everything, and let both sides recompute their own invariants."""
        self.tree.check_integrity()
        in_tree = self._tree_pages()
        assert {path: page for path, (page, _) in in_tree.items()} == {p: e.page for p, e in self.cached.items()}
        locks = Counter(
            (row.held[0], row.held[1][:length]) for row in self.rows for length in range(1, len(row.held[1]) + 1)
        )
        for path, (_, node) in in_tree.items():
            assert node.lock_count == locks[path]
            assert self.cached[path].epoch <= node.epoch <= self.step
        assert self.tree.num_pages == len(self.cached)
        assert self.tree.num_evictable == sum(not locks[path] for path in self.cached)
        references = [*self.tree.pages_held().tolist()]
        for holder in (*(row.own for row in self.rows), *self.outside):
            references += holder
        self.pool.check_integrity(np.array(references, dtype=np.int32))
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_deferred == len(self.deferred)
        assert len(self.free) + len(self.deferred) + len(set(references)) == self.pool.num_pages - 1

    def end(self) -> None:
        """Let everybody go: every page must come back."""
        while self.rows:
            self.finish(0, keep=True)
        while self.outside:
            self.release(0)
        self.complete(0)
        self.check()
        self._evict(self.pool.num_pages)
        self.check()
        assert self.pool.num_free == self.pool.num_pages - 1
        assert not self.tree._roots

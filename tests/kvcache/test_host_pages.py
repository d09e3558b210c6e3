"""Pages in host memory: what may be read, what is given up first, and that neither disturbs a copy in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from naive_cache import LETTER_OF, Letters, Path, tokens_of

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.host_pages import HostPool, HostTree
from gpu_runner.kvcache.node import Node
from gpu_runner.kvcache.pages import Int32


class Host:
    """A tree and its pool; ticket 0 stands for a copy that is done at once."""

    def __init__(self, num_pages: int) -> None:
        self.tree = HostTree(HostPool(num_pages))
        self.pool = self.tree.pool

    def add(self, *letters: int, ticket: int = 0, limit: int = 100, namespace: str = "") -> tuple[int, list[int]]:
        depth, pages = self.tree.add(namespace, tokens_of(letters), limit, ticket)
        self.check()
        return depth, pages.tolist()

    def found(self, *letters: int, namespace: str = "") -> list[int]:
        pages = self.tree.find(namespace, tokens_of(letters)).pages.tolist()
        self.check()
        return pages

    def check(self) -> None:
        self.tree.check_integrity()
        self.pool.check_integrity(self.tree.pages_held())
        assert self.tree.num_evictable == self.tree.num_pages


def test_all_of_the_memory_is_given_out() -> None:
    host = Host(3)
    assert host.add(1, 2, 3) == (0, [1, 2, 3])
    assert host.pool.num_free == 0


def test_a_page_is_found_when_the_copy_that_fills_it_is_done() -> None:
    host = Host(4)
    assert host.add(1, 2, ticket=7) == (0, [1, 2])
    assert host.found(1, 2) == []
    host.pool.complete(6)
    assert host.found(1, 2) == []
    host.pool.complete(7)
    assert host.found(1, 2) == [1, 2]


def test_what_is_there_already_is_not_stored_again_though_its_copy_is_in_flight() -> None:
    host = Host(8)
    host.add(1, 2, ticket=1)
    assert host.add(1, 2, 3, ticket=2) == (2, [3])
    assert host.add(1, 2, 3, ticket=2) == (3, [])
    host.pool.complete(1)
    assert host.found(1, 2, 3) == [1, 2]
    host.pool.complete(2)
    assert host.found(1, 2, 3) == [1, 2, 3]


def test_a_long_prefix_is_stored_part_by_part() -> None:
    host = Host(8)
    parts = [host.add(1, 2, 3, 4, 5, limit=2, ticket=ticket) for ticket in (1, 2, 3, 4)]
    assert parts == [(0, [1, 2]), (2, [3, 4]), (4, [5]), (5, [])]


def test_the_least_recently_used_prefix_makes_room_page_by_page() -> None:
    host = Host(4)
    host.add(1, 2)
    host.add(3, 4)
    host.found(1, 2)
    assert host.add(5) == (0, [4])
    assert [host.found(3, 4), host.found(1, 2), host.found(5)] == [[3], [1, 2], [4]]


def test_a_prefix_is_not_evicted_for_its_own_continuation() -> None:
    host = Host(3)
    host.add(1, 2)
    assert host.add(1, 2, 3, 4, 5) == (2, [3])
    assert host.found(1, 2, 3, 4) == [1, 2, 3]


def test_pages_of_copies_in_flight_are_neither_evicted_nor_given_again() -> None:
    host = Host(2)
    host.add(1, ticket=1)
    host.add(2)
    host.tree.hold(host.tree.find("", tokens_of((2,))).node, 2)  # read by a load
    assert host.add(3) == (0, [])
    host.pool.complete(1)
    assert host.add(3) == (0, [1])
    assert host.add(3, 4) == (1, [])
    host.pool.complete(2)
    assert host.add(3, 4) == (1, [2])


def test_a_dropped_namespace_frees_the_pages_of_copies_in_flight_when_those_are_done() -> None:
    host = Host(4)
    host.add(1, 2, namespace="a", ticket=5)
    host.add(1, namespace="b")
    assert host.tree.drop_namespace("a") == 0
    assert (host.pool.num_free, host.pool.num_deferred) == (1, 2)
    host.pool.complete(5)
    assert host.pool.num_free == 3
    assert [host.found(1, 2, namespace="a"), host.found(1, namespace="b")] == [[], [3]]


@pytest.mark.parametrize("num_leaves", [50, 2000])
def test_making_room_looks_at_what_it_evicts_however_much_is_stored(num_leaves: int, visits: list[Node]) -> None:
    tree = HostTree(HostPool(2 * num_leaves))
    tokens = np.zeros(2 * PAGE_SIZE, np.int32)
    for leaf in range(num_leaves + 16):
        tokens[0] = tokens[-1] = leaf
        assert len(tree.add("", tokens, 2, 0)[1]) == 2
        assert len(visits) == 2 * (leaf >= num_leaves)  # the one that goes, and the one at which it stops
        visits.clear()


class NaiveHost:
    """The same operations on a dict of prefixes, one entry a page, compared after each."""

    def __init__(self, num_pages: int) -> None:
        self.host = Host(num_pages)
        self.pages: dict[Path, int] = {}
        self.last_use: Counter[Path] = Counter()
        self.filled_by: Counter[Path] = Counter()
        self.held_until: Counter[int] = Counter()  # page -> ticket of the last copy
        self.ticket = self.done = self.clock = 0
        self.num_free = num_pages
        self.deferred: set[int] = set()
        self.happened: Counter[str] = Counter()

    def add(self, namespace: str, letters: Letters, limit: int) -> None:
        self.ticket += 1
        epochs = self._epochs()
        depth = self._touch(namespace, letters)
        held = {(namespace, letters[:length]) for length in range(1, depth + 1)}
        count = max(min(len(letters) - depth, limit), 0)
        while self.num_free < count:
            parents = {(ns, path[:-1]) for ns, path in self.pages}
            leaves = [p for p in self.pages if p not in parents and p not in held and epochs[p] <= self.done]
            if not leaves:
                break
            self._drop(min(leaves, key=lambda path: self.last_use[path]))
            self.happened["evicted"] += 1
        count = min(count, self.num_free)
        before, pages = self.host.tree.add(namespace, tokens_of(letters), limit, self.ticket)
        assert (before, len(pages)) == (depth, count)
        self.num_free -= count
        for place, page in enumerate(pages.tolist(), depth + 1):
            path = namespace, letters[:place]
            self.pages[path] = page
            self.filled_by[path] = self.ticket
        if count:
            self._touch(namespace, letters[: depth + count])
            self._hold(namespace, letters[: depth + count], self.ticket)
            self.happened["stored"] += count

    def load(self, namespace: str, letters: Letters) -> None:
        """Look for a prefix, and read it until the next ticket."""
        depth = self._touch(namespace, letters)
        expected: list[int] = []
        for length in range(1, depth + 1):
            path = namespace, letters[:length]
            if self.filled_by[path] > self.done:
                self.happened["not there yet"] += 1
                break
            expected.append(self.pages[path])
        found = self.host.tree.find(namespace, tokens_of(letters))
        assert found.pages.tolist() == expected
        if expected:
            self.ticket += 1
            self.host.tree.hold(found.node, self.ticket)
            self._touch(namespace, letters[:depth])
            self._hold(namespace, letters[:depth], self.ticket)
            self.happened["found"] += len(expected)

    def complete(self, behind: int) -> None:
        self.done = max(self.done, self.ticket - behind)
        self.host.pool.complete(self.done)
        ready = {page for page in self.deferred if self.held_until[page] <= self.done}
        self.deferred -= ready
        self.num_free += len(ready)

    def drop(self, namespace: str) -> None:
        for path in [path for path in self.pages if path[0] == namespace]:
            self._drop(path)
            self.happened["dropped"] += 1
        self.host.tree.drop_namespace(namespace)

    def check(self) -> None:
        self.host.check()
        assert self._found() == self.pages
        assert self.host.pool.num_free == self.num_free
        assert self.host.pool.num_deferred == len(self.deferred)
        assert self.num_free + len(self.deferred) + len(self.pages) == self.host.pool.num_pages - 1

    def _touch(self, namespace: str, letters: Letters) -> int:
        self.clock += 1
        for length in range(1, len(letters) + 1):
            if (namespace, letters[:length]) not in self.pages:
                return length - 1
            self.last_use[namespace, letters[:length]] = self.clock
        return len(letters)

    def _hold(self, namespace: str, letters: Letters, ticket: int) -> None:
        for length in range(1, len(letters) + 1):
            self.held_until[self.pages[namespace, letters[:length]]] = ticket

    def _drop(self, path: Path) -> None:
        page, epoch = self.pages.pop(path), self._epochs()[path]
        assert epoch >= self.held_until[page], "a copy of a page is one of its node's"
        self.held_until[page] = epoch
        if epoch > self.done:
            self.deferred.add(page)
        else:
            self.num_free += 1

    def _nodes(self) -> list[tuple[Path, int, int]]:
        found: list[tuple[Path, int, int]] = []
        for namespace, root in self.host.tree._roots.items():
            for node in root.descendants():
                tokens, pages = self.host.tree.content(node)
                letters = self._letters(tokens)
                for index in range(len(pages) - len(node.pages), len(pages)):
                    found.append(((namespace, letters[: index + 1]), int(pages[index]), node.epoch))
        return found

    def _found(self) -> dict[Path, int]:
        return {path: page for path, page, _ in self._nodes()}

    def _epochs(self) -> dict[Path, int]:
        return {path: epoch for path, _, epoch in self._nodes()}

    @staticmethod
    def _letters(tokens: Int32) -> Letters:
        return tuple(LETTER_OF[page.tobytes()] for page in tokens.reshape(-1, PAGE_SIZE))


@pytest.mark.parametrize(
    ("seed", "num_pages", "num_letters", "max_letters"), [(1, 6, 2, 4), (2, 20, 2, 7), (3, 16, 3, 5)]
)
def test_prefixes_in_host_memory_agree_with_a_dict_after_each_of_2000_operations(
    seed: int, num_pages: int, num_letters: int, max_letters: int
) -> None:
    rng = np.random.default_rng(seed)
    naive = NaiveHost(num_pages)

    def letters() -> Letters:
        return tuple(rng.integers(num_letters, size=int(rng.integers(1, max_letters + 1))).tolist())

    def namespace() -> str:
        return "ab"[int(rng.integers(2))]

    operations: list[tuple[float, Callable[[], None]]] = [
        (0.45, lambda: naive.add(namespace(), letters(), int(rng.integers(1, 5)))),
        (0.25, lambda: naive.load(namespace(), letters())),
        (0.28, lambda: naive.complete(int(rng.integers(4)))),
        (0.02, lambda: naive.drop(namespace())),
    ]
    for index in rng.choice(len(operations), size=2_000, p=[share for share, _ in operations]).tolist():
        operations[index][1]()
        naive.check()
    for event in ("evicted", "stored", "found", "not there yet", "dropped"):
        assert naive.happened[event] > 20, f"{event!r} happened {naive.happened[event]} times only"

"""The radix tree: what is found, what is kept, what is given up first, and what that costs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from naive_cache import tokens_of

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.pages import IntegrityError, PagePool
from gpu_runner.kvcache.radix import Node, RadixTree


class Cache:
    """A tree and its pool, where a prompt's pages are released by whoever computed them once they are cached."""

    def __init__(self, num_pages: int = 100) -> None:
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool)

    def add(self, *letters: int, namespace: str = "", epoch: int = 0) -> Node:
        pages = self.pool.allocate(len(letters))
        node = self.tree.insert(namespace, tokens_of(letters), pages)
        self.pool.decref(pages, epoch)
        self.check()
        return node

    def found(self, *letters: int, namespace: str = "") -> list[int]:
        pages = self.tree.match(namespace, tokens_of(letters)).pages.tolist()
        self.check()
        return pages

    def locked(self, *letters: int, namespace: str = "") -> Node:
        node = self.tree.match(namespace, tokens_of(letters)).node
        self.tree.lock(node)
        self.check()
        return node

    def extended(self, node: Node, *letters: int) -> Node | None:
        """Have the tree keep new pages of a prompt behind a prefix that is locked."""
        pages = self.pool.allocate(len(letters))
        longer = self.tree.extend(node, tokens_of(letters), pages)
        if longer is None:
            self.pool.decref(pages, 0)
        self.check()
        return longer

    def check(self) -> None:
        self.tree.check_integrity()
        self.pool.check_integrity(self.tree.pages_held())


def num_nodes(tree: RadixTree) -> int:
    return sum(1 for root in tree._roots.values() for _ in root.descendants())


def test_an_empty_tree_matches_nothing_and_keeps_nothing_of_the_question() -> None:
    cache = Cache()
    node, pages = cache.tree.match("tenant", tokens_of((1, 2)))
    assert pages.tolist() == []
    assert pages.dtype == np.int32
    cache.tree.lock(node)
    cache.tree.unlock(node, 1)
    assert cache.tree._roots == {}
    cache.check()


def test_the_longest_run_of_whole_pages_is_found() -> None:
    cache = Cache()
    cache.add(1, 2, 3)
    tokens = tokens_of((1, 2, 3))
    expected = {0: 0, 15: 0, 16: 1, 31: 1, 32: 2, 47: 2, 48: 3}
    assert {n: len(cache.tree.match("", tokens[:n]).pages) for n in expected} == expected
    assert cache.found(1, 2, 3, 4) == [1, 2, 3]
    assert cache.found(1, 2, 5) == [1, 2]
    assert cache.found(2, 3) == []


def test_pages_that_differ_in_their_last_token_only_are_told_apart() -> None:
    cache = Cache()
    cache.add(0, 0, 0)
    assert cache.found(1, 0, 0) == []
    assert cache.found(0, 1, 0) == [1]
    assert cache.found(0, 0, 1) == [1, 2]


def test_the_same_pages_in_another_order_are_another_prompt() -> None:
    cache = Cache()
    cache.add(1, 2, 3)
    assert cache.found(2, 1, 3) == []
    assert cache.found(1, 3, 2) == [1]


def test_tokens_moved_over_a_page_border_do_not_match() -> None:
    cache = Cache()
    tokens = np.arange(4 * PAGE_SIZE, dtype=np.int32)
    cache.tree.insert("", tokens, cache.pool.allocate(4))
    assert cache.tree.match("", tokens[1:]).pages.tolist() == []
    shifted = np.concatenate((tokens[:PAGE_SIZE], tokens[PAGE_SIZE + 1 :]))
    assert cache.tree.match("", shifted).pages.tolist() == [1]


@pytest.mark.parametrize("base", [31, 33, 257, 1_000_003, 2**16])
def test_pages_that_a_polynomial_hash_takes_for_one_another_do_not_match(base: int) -> None:
    """Neighbours that differ by (+1, -base) are equal to h = h * base + token; here also across a border of pages."""
    tokens = np.full(3 * PAGE_SIZE, 2 * 10**6, dtype=np.int32)
    for place in (0, PAGE_SIZE - 2, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE - 1):
        cache = Cache()
        cache.tree.insert("", tokens, cache.pool.allocate(3))
        other = tokens.copy()
        other[place : place + 2] += np.array([1, -base], np.int32)
        assert len(cache.tree.match("", other).pages) == place // PAGE_SIZE
        assert len(cache.tree.match("", tokens).pages) == 3


def test_namespaces_never_see_each_other() -> None:
    cache = Cache()
    cache.add(1, 2, namespace="a")
    assert cache.found(1, 2, namespace="b") == []
    cache.add(1, 2, namespace="b")
    assert cache.found(1, 2, namespace="a") == [1, 2]
    assert cache.found(1, 2, namespace="b") == [3, 4]
    assert cache.found(1, 2) == []
    assert cache.tree.num_pages == 4


def test_token_arrays_of_another_dtype_or_stride_mean_the_same() -> None:
    cache = Cache()
    cache.add(1, 2)
    wide = np.repeat(tokens_of((1, 2)).astype(np.int64), 2)[::2]
    assert cache.tree.match("", wide).pages.tolist() == [1, 2]


def test_parts_already_cached_keep_the_pages_of_the_tree() -> None:
    cache = Cache()
    cache.add(1, 2)
    cache.add(1, 2, 3)
    assert cache.found(1, 2, 3) == [1, 2, 5]
    assert cache.pool.refcount(np.array([1, 2, 3, 4, 5], dtype=np.int32)).tolist() == [1, 1, 0, 0, 1]


def test_the_tree_keeps_copies_of_what_it_is_given() -> None:
    cache = Cache()
    tokens, pages = tokens_of((1, 2)), cache.pool.allocate(2)
    cache.tree.insert("", tokens, pages)
    tokens[:] = 0
    pages[:] = 0
    cache.tree.match("", tokens_of((1, 2))).pages[:] = 0
    assert cache.tree.match("", tokens_of((1, 2))).pages.tolist() == [1, 2]


def test_a_run_of_the_wrong_length_is_refused_and_changes_nothing() -> None:
    cache = Cache()
    with pytest.raises(ValueError, match="2 pages hold 32 tokens, got 16"):
        cache.tree.insert("", tokens_of((1,)), cache.pool.allocate(2))
    with pytest.raises(IntegrityError, match=r"pages \[9\] are not referenced"):
        cache.tree.insert("", tokens_of((1,)), np.array([9], dtype=np.int32))
    assert cache.tree._roots == {}
    cache.tree.check_integrity()


def test_an_insert_refused_after_its_split_leaves_a_sound_tree() -> None:
    cache = Cache()
    cache.add(1, 2)
    cache.add(5)
    with pytest.raises(IntegrityError, match=r"pages \[9\] are not referenced"):
        cache.tree.insert("", tokens_of((1, 3)), np.array([8, 9], dtype=np.int32))
    cache.check()
    assert cache.found(1, 2) == [1, 2]


def test_a_merged_node_is_as_busy_as_its_busier_part() -> None:
    cache = Cache()
    prefix = cache.add(1)
    cache.tree.lock(prefix)
    cache.add(1, 2)
    cache.tree.unlock(prefix, 5)
    assert num_nodes(cache.tree) == 1
    assert cache.tree.evict(2) == 0
    assert cache.found(1, 2) != []
    cache.pool.complete(5)
    assert cache.tree.evict(2) == 2


def test_inserting_nothing_returns_a_root() -> None:
    cache = Cache()
    node = cache.add()
    assert len(node.pages) == 0
    assert cache.tree.num_pages == 0


def test_insert_returns_the_node_that_ends_where_the_tokens_end() -> None:
    cache = Cache()
    whole = cache.add(1, 2, 3)
    start = cache.add(1, 2)
    assert start is not whole
    assert start.pages.tolist() == [1, 2]
    assert cache.add(1, 2, 3) is whole
    assert cache.add(1, 2) is start


def test_a_split_leaves_the_lower_part_to_the_holder_and_locks_both() -> None:
    cache = Cache()
    whole = cache.add(1, 2, 3)
    cache.tree.lock(whole)
    assert cache.found(1, 2, 4) == [1, 2]
    assert whole.pages.tolist() == [3]
    assert whole.parent is not None
    assert whole.parent.pages.tolist() == [1, 2]
    assert cache.tree.num_evictable == 0
    assert cache.tree.evict(9) == 0
    cache.tree.unlock(whole, 0)
    assert cache.tree.num_evictable == 3
    cache.check()


def test_a_lock_protects_the_node_and_everything_above_but_not_below() -> None:
    cache = Cache()
    cache.add(1, 2)
    cache.add(1, 2, 3)
    middle = cache.locked(1, 2)
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (3, 1)
    assert cache.tree.evict(9) == 1
    assert cache.found(1, 2, 3) == [1, 2]
    cache.tree.unlock(middle, 0)
    assert cache.tree.evict(9) == 2
    assert cache.tree.num_pages == 0
    cache.check()


def test_two_holders_of_a_node_both_have_to_let_go() -> None:
    cache = Cache()
    cache.add(1)
    first, second = cache.locked(1), cache.locked(1)
    assert first is second
    cache.tree.unlock(first, 0)
    assert cache.tree.evict(1) == 0
    cache.tree.unlock(second, 0)
    assert cache.tree.evict(1) == 1


def test_misused_handles_are_refused() -> None:
    cache = Cache()
    node = cache.add(1)
    with pytest.raises(IntegrityError, match="unlocked more often"):
        cache.tree.unlock(node, 0)
    cache.tree.evict(1)
    with pytest.raises(IntegrityError, match="after it had left the tree"):
        cache.tree.lock(node)
    cache.check()


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = Cache()
    for letter in (1, 2, 3):
        cache.add(letter)
    cache.found(1)
    assert [cache.tree.evict(1), cache.found(2)] == [1, []]
    assert [cache.tree.evict(1), cache.found(3)] == [1, []]
    assert cache.found(1) == [1]


def test_unlocking_counts_as_use() -> None:
    cache = Cache()
    old = cache.add(1)
    cache.tree.lock(old)
    cache.add(2)
    cache.tree.unlock(old, 0)
    assert cache.tree.evict(1) == 1
    assert cache.found(1) == [1]
    assert cache.found(2) == []


def test_a_parent_without_children_is_evicted_by_its_own_last_use() -> None:
    cache = Cache()
    cache.add(1, 2)
    cache.add(1, 3)
    cache.add(4)
    cache.found(1)
    assert cache.tree.evict(3) == 3
    assert cache.found(1, 2) == [1]
    assert cache.found(4) == []


def test_a_long_leaf_loses_no_more_than_is_needed() -> None:
    cache = Cache()
    cache.add(*[1] * 10)
    assert cache.tree.evict(3) == 3
    assert cache.found(*[1] * 10) == [1, 2, 3, 4, 5, 6, 7]
    assert cache.tree.evict(5) == 5
    assert cache.found(*[1] * 10) == [1, 2]
    assert (cache.tree.num_pages, cache.tree.num_evictable, cache.pool.num_free) == (2, 2, 97)


def test_cutting_a_leaf_page_by_page_does_not_keep_its_old_memory() -> None:
    cache = Cache()
    node = cache.add(*[1] * 64)
    for _ in range(63):
        cache.tree.evict(1)
    base = node.tokens if node.tokens.base is None else node.tokens.base
    assert base.size <= 2 * PAGE_SIZE


def test_only_pages_that_became_free_are_counted() -> None:
    cache = Cache()
    cache.add(1, 2, 3)
    cache.add(4, 5, 6)
    outside = np.array([1, 2, 3], dtype=np.int32)
    cache.pool.incref(outside)
    assert cache.tree.evict(2) == 2
    assert cache.tree.match("", tokens_of((1, 2, 3))).pages.tolist() == []
    assert cache.tree.match("", tokens_of((4, 5, 6))).pages.tolist() == [4]
    cache.pool.check_integrity(np.concatenate((outside, cache.tree.pages_held())))


def test_a_leaf_a_step_in_flight_may_read_stays_until_the_step_is_complete() -> None:
    cache = Cache()
    busy = cache.add(1)
    cache.tree.lock(busy)
    cache.tree.unlock(busy, 5)
    cache.add(2)
    assert cache.tree.evict(2) == 1
    assert cache.found(1) == [1]
    assert cache.found(2) == []
    cache.pool.complete(5)
    assert cache.tree.evict(2) == 1
    cache.check()


def test_pages_released_with_a_later_epoch_than_their_lock_are_deferred_not_free() -> None:
    cache = Cache()
    cache.add(1, epoch=5)
    assert cache.tree.evict(1) == 0
    assert (cache.pool.num_free, cache.pool.num_deferred) == (98, 1)
    cache.pool.complete(5)
    assert cache.pool.num_free == 99


@pytest.mark.parametrize("num_leaves", [10, 1000])
def test_eviction_looks_at_what_it_evicts_however_large_the_tree_is(num_leaves: int, visits: list[Node]) -> None:
    pool = PagePool(2 * num_leaves + 2)
    tree = RadixTree(pool)
    tokens = np.zeros(2 * PAGE_SIZE, dtype=np.int32)
    for leaf in range(num_leaves):
        tokens[0] = tokens[-1] = leaf
        pages = pool.allocate(2)
        tree.insert("", tokens, pages)
        pool.decref(pages, 0)
    assert tree.evict(8) == 8
    assert len(visits) == 5  # four leaves of two pages each, and the one at which it stops


def test_a_prompt_cached_chunk_by_chunk_is_one_node() -> None:
    cache = Cache()
    letters = [1, 2, 3, 4, 5, 6]
    held = cache.locked(*letters)
    own = cache.pool.allocate(6)
    for length in range(1, 7):
        node = cache.tree.insert("", tokens_of(tuple(letters[:length])), own[:length])
        cache.tree.lock(node)
        cache.tree.unlock(held, length)
        held = node
        cache.tree.check_integrity()
        assert num_nodes(cache.tree) == 1
    assert held.pages.tolist() == [1, 2, 3, 4, 5, 6]
    cache.tree.unlock(held, 6)
    cache.pool.decref(own, 6)
    cache.check()


def test_a_prefix_that_another_request_holds_is_not_merged_away() -> None:
    cache = Cache()
    prefix = cache.add(1, 2)
    cache.tree.lock(prefix)
    cache.tree.lock(prefix)
    longer = cache.add(1, 2, 3)
    cache.tree.unlock(prefix, 0)
    assert num_nodes(cache.tree) == 2
    assert cache.tree.evict(9) == 1
    assert longer.lock_count < 0
    assert cache.found(1, 2) == [1, 2]
    cache.tree.unlock(prefix, 0)
    cache.check()


def test_the_tree_takes_over_the_pages_behind_a_locked_prefix_and_the_lock_with_them() -> None:
    cache = Cache()
    first = cache.extended(cache.locked(), 1, 2)
    assert first is not None
    longer = cache.extended(first, 3)
    assert longer is not None
    assert (num_nodes(cache.tree), cache.tree.num_pages, cache.tree.num_evictable) == (1, 3, 0)
    assert cache.pool.refcount(np.arange(1, 4, dtype=np.int32)).tolist() == [1, 1, 1]
    assert first.lock_count == -1, "the handle was exchanged for the longer one"
    cache.tree.unlock(longer, 5)
    assert cache.found(1, 2, 3) == [1, 2, 3]
    assert cache.tree.evict(3) == 0, "step 5 may still read them"
    cache.pool.complete(5)
    assert cache.tree.evict(3) == 3


def test_a_prefix_that_another_request_holds_is_continued_beside_it() -> None:
    cache = Cache()
    cache.add(1)
    holders = [cache.locked(1) for _ in range(3)]
    left, right = cache.extended(holders[0], 2), cache.extended(holders[1], 3)
    assert left is not None
    assert right is not None
    assert left.parent is right.parent is holders[2]
    assert cache.extended(holders[2], 3, 4) is None, "another one's page for the same tokens is there"
    assert holders[2].lock_count == 3
    for node in (left, right, holders[2]):
        cache.tree.unlock(node, 0)
        cache.check()
    assert cache.tree.num_evictable == 3


def test_requests_that_found_nothing_cached_continue_the_same_root() -> None:
    cache = Cache()
    roots = [cache.locked() for _ in range(3)]
    nodes = [cache.extended(root, letter) for root, letter in zip(roots, (1, 2, 1), strict=True)]
    assert nodes[2] is None
    assert [node and node.parent is roots[0] for node in nodes] == [True, True, None]
    assert [root.lock_count for root in roots] == [2, 0, 1]
    assert cache.found(2) == [2]


def test_a_prefix_used_more_recently_than_its_continuation_stays_apart() -> None:
    cache = Cache()
    cache.add(1, 2)
    cache.add(1, 2, 3)
    prefix = cache.locked(1, 2)
    cache.add(4)
    cache.tree.unlock(prefix, 0)
    assert num_nodes(cache.tree) == 3
    assert cache.tree.evict(2) == 2
    assert cache.found(1, 2, 3) == [1, 2]


def test_roots_vanish_with_their_last_node() -> None:
    cache = Cache()
    for index in range(50):
        cache.add(1, namespace=f"request-{index}")
    assert len(cache.tree._roots) == 50
    assert cache.tree.evict(20) == 20
    assert len(cache.tree._roots) == 30
    for index in range(50):
        assert cache.tree.drop_namespace(f"request-{index}") == (1 if index >= 20 else 0)
    assert cache.tree._roots == {}
    cache.check()


def test_dropping_a_namespace_spares_what_is_locked_and_all_other_namespaces() -> None:
    cache = Cache()
    cache.add(1, 2, 3, namespace="a")
    cache.add(1, 4, namespace="a")
    cache.add(1, 2, namespace="b")
    held = cache.locked(1, 2, namespace="a")
    assert cache.tree.drop_namespace("a") == 2
    assert cache.found(1, 2, 3, namespace="a") == [1, 2]
    assert cache.found(1, 4, namespace="a") == [1]
    assert cache.tree.drop_namespace("never seen") == 0
    cache.tree.unlock(held, 3)
    assert cache.tree.drop_namespace("a") == 0
    assert cache.pool.num_deferred == 2
    assert list(cache.tree._roots) == ["b"]
    cache.check()


def test_a_root_handle_outlives_the_root() -> None:
    cache = Cache()
    cache.add(1, namespace="a")
    root = cache.locked(2, namespace="a")
    assert cache.tree.evict(1) == 1
    cache.add(1, namespace="a")
    cache.tree.unlock(root, 1)
    assert cache.found(1, namespace="a") == [1]
    cache.check()


def test_removed_nodes_are_freed_without_the_garbage_collector() -> None:
    def live_nodes() -> int:
        return sum(isinstance(thing, Node) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        cache = Cache()
        before = live_nodes()
        for letters in ((1, 2, 3), (1, 2, 4), (1, 5), (6, 7)):
            cache.add(*letters, namespace="a")
        held = cache.locked(6, 7, namespace="a")
        longer = cache.add(6, 7, 1, namespace="a")
        cache.tree.unlock(held, 0)
        assert cache.tree.evict(4) == 4
        cache.tree.drop_namespace("a")
        del held, longer
        assert live_nodes() == before
    finally:
        gc.enable()


def test_a_chain_of_thousands_of_nodes_needs_no_recursion() -> None:
    depth = 2000
    pool = PagePool(depth + 1)
    tree = RadixTree(pool)
    tokens = np.arange(depth * PAGE_SIZE, dtype=np.int32)
    pages = pool.allocate(depth)
    tree.insert("", tokens, pages)
    for length in range(depth - 1, 0, -1):
        tree.match("", tokens[: length * PAGE_SIZE])
    assert num_nodes(tree) == depth
    tree.check_integrity()
    pool.decref(pages, 0)
    assert tree.drop_namespace("") == depth


def damaged_tree() -> tuple[RadixTree, Node, Node]:
    cache = Cache()
    cache.add(1, 2)
    lower = cache.add(1, 2, 3)
    assert lower.parent is not None
    return cache.tree, lower.parent, lower


def test_the_integrity_check_finds_each_kind_of_damage() -> None:
    tree, upper, lower = damaged_tree()
    tree.num_pages += 1
    with pytest.raises(IntegrityError, match="num_pages is 4"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    tree.num_evictable -= 1
    with pytest.raises(IntegrityError, match="num_evictable 2"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.lock_count = 1
    with pytest.raises(IntegrityError, match="under the children's sum"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.last_use = upper.last_use + 1
    with pytest.raises(IntegrityError, match="stands before"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.epoch = 1
    with pytest.raises(IntegrityError, match="epoch 1"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.parent = None
    with pytest.raises(IntegrityError, match="another parent"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.tokens = lower.tokens[1:]
    with pytest.raises(IntegrityError):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.tokens = lower.tokens + 1
    with pytest.raises(IntegrityError, match="another page's key"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    tree._lru.remove(lower)
    with pytest.raises(IntegrityError, match="before its child"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    lower.next, lower.prev = lower.prev, lower.next
    with pytest.raises(IntegrityError, match="links"):
        tree.check_integrity()
    tree, upper, lower = damaged_tree()
    tree._pool.decref(lower.pages, 0)
    with pytest.raises(IntegrityError, match="not its own"):
        tree.check_integrity()


def test_pages_are_pinned_once_by_each_owner_whatever_is_split_or_merged_meanwhile() -> None:
    cache = Cache()
    long = cache.add(1, 2, 3, 4)
    assert cache.tree.pin(long, "a") == 4
    short = cache.tree.match("", tokens_of((1, 2))).node
    assert cache.tree.num_unpinned(short, "a") == 0
    assert cache.tree.num_unpinned(short, "b") == 2
    assert cache.tree.pin(short, "b") == 2
    other = cache.add(1, 2, 5)
    assert cache.tree.pin(other, "a") == 1
    cache.check()
    assert cache.tree.evict(100) == 0
    assert cache.tree.unpin(long, "a") == 2
    assert cache.tree.unpin(other, "a") == 3
    cache.check()
    assert cache.tree.num_evictable == 3
    assert cache.tree.unpin(short, "b") == 2
    cache.check()
    assert cache.tree.evict(100) == 5

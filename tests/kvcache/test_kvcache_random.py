"""Random operations on the page pool and the radix tree, against a naive model, checked after every operation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from naive_cache import Letters, NaiveCache

from gpu_runner.kvcache.pages import PagePool

NUM_OPERATIONS = 6_000
NAMESPACES = ("", "tenant", "adapter")


@pytest.mark.parametrize(
    ("seed", "num_pages", "num_letters", "max_letters", "num_namespaces", "max_rows"),
    [
        (1, 9, 2, 4, 1, 3),
        (2, 24, 2, 7, 1, 5),
        (3, 24, 3, 5, 2, 6),
        (4, 16, 4, 5, 3, 3),
        (5, 32, 2, 10, 2, 4),
        (6, 12, 3, 8, 1, 2),
    ],
)
def test_tree_and_pool_agree_with_the_model_after_each_of_6000_operations(
    seed: int, num_pages: int, num_letters: int, max_letters: int, num_namespaces: int, max_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    cache = NaiveCache(PagePool(num_pages))

    def number(below: int) -> int:
        return int(rng.integers(below))

    def namespace() -> str:
        return NAMESPACES[number(num_namespaces)]

    def letters() -> Letters:
        if cache.rows and number(3) == 0:
            return cache.rows[number(len(cache.rows))].path[1]  # the prompt of a running row once more
        return tuple(rng.integers(num_letters, size=number(max_letters + 1)).tolist())

    operations: list[tuple[float, Callable[[], None]]] = [
        (0.15, cache.launch),
        (0.15, lambda: cache.complete(behind=number(3))),
        (0.06, lambda: cache.look(namespace(), letters(), number(16))),
        (0.22, lambda: cache.start(namespace(), letters()) if len(cache.rows) < max_rows else None),
        (0.07, lambda: cache.cache_chunk(number(8), number(max_letters + 1), lock_first=bool(number(2)))),
        (0.12, lambda: cache.extend(number(8), 1 + number(max_letters))),
        (0.13, lambda: cache.finish(number(8), keep=number(4) > 0)),
        (0.02, lambda: cache.hold(namespace(), letters()) if len(cache.outside) < 3 else None),
        (0.03, lambda: cache.release(number(3))),
        (0.04, lambda: cache.evict(number(6))),
        (0.01, lambda: cache.drop_namespace(namespace())),
    ]
    chosen = rng.choice(len(operations), size=NUM_OPERATIONS, p=[share for share, _ in operations])
    for index in chosen.tolist():
        operations[index][1]()
        cache.check()
    cache.end()
    for event in ("deferred page freed", "page matched", "tree kept its own page", "merge", "extended", "page evicted"):
        assert cache.done[event] > 20, f"{event!r} happened {cache.done[event]} times only"


PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


class CacheMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    @initialize(num_pages=st.integers(2, 20))
    def begin(self, num_pages: int) -> None:
        self.cache = NaiveCache(PagePool(num_pages))

    @rule()
    def launch(self) -> None:
        self.cache.launch()

    @rule(behind=st.integers(0, 2))
    def complete(self, behind: int) -> None:
        self.cache.complete(behind)

    @rule(namespace=st.sampled_from(NAMESPACES), letters=PROMPTS, extra_tokens=st.integers(0, 15))
    def look(self, namespace: str, letters: Letters, extra_tokens: int) -> None:
        self.cache.look(namespace, letters, extra_tokens)

    @rule(namespace=st.sampled_from(NAMESPACES), letters=PROMPTS)
    def start(self, namespace: str, letters: Letters) -> None:
        self.cache.start(namespace, letters)

    @rule(which=st.integers(0, 3), length=st.integers(0, 6), lock_first=st.booleans())
    def cache_chunk(self, which: int, length: int, lock_first: bool) -> None:
        self.cache.cache_chunk(which, length, lock_first)

    @rule(which=st.integers(0, 3), length=st.integers(0, 6))
    def extend(self, which: int, length: int) -> None:
        self.cache.extend(which, length)

    @rule(which=st.integers(0, 3), keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        self.cache.finish(which, keep)

    @rule(namespace=st.sampled_from(NAMESPACES), letters=PROMPTS)
    def hold(self, namespace: str, letters: Letters) -> None:
        self.cache.hold(namespace, letters)

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        self.cache.release(which)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @rule(namespace=st.sampled_from(NAMESPACES))
    def drop_namespace(self, namespace: str) -> None:
        self.cache.drop_namespace(namespace)

    @invariant()
    def both_sides_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.end()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(derandomize=True, max_examples=60, stateful_step_count=40, deadline=None)

"""What sessions keep from being evicted, for how long, and what makes them give it up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncengine.config import PAGE_SIZE
from asyncengine.terms import Terms
from gpu_runner.kvcache import sessions as sessions_module
from gpu_runner.kvcache.pages import Int32, PagePool
from gpu_runner.kvcache.pins import Pins
from gpu_runner.kvcache.radix import RadixTree
from gpu_runner.kvcache.sessions import Sessions

SECOND = 10**9


class Cache:
    """A pool of `num_pages` usable pages, its tree and its sessions, without rows. now: of the clock, in ns."""

    def __init__(self, num_pages: int = 40, *, share: float = 0.25) -> None:
        self.now = 0
        self.pool = PagePool(num_pages + 1)
        self.tree = RadixTree(self.pool)
        self.pins = Pins(self.tree, num_pages=num_pages, tenant_share=share)
        self.sessions = Sessions(self.pins, clock=lambda: self.now)

    def end(
        self, tenant: str, name: str, tokens: Int32, *, ttl: float = 60.0, namespace: str = "", cached: bool = True
    ) -> None:
        """A request of the session ends with these tokens, all full pages of which are computed if `cached`."""
        if cached:
            count = len(tokens) // PAGE_SIZE
            self.tree.evict(max(0, count - self.pool.num_free))
            pages = self.pool.allocate(count)
            self.tree.insert(namespace, tokens[: count * PAGE_SIZE], pages)
            self.pool.decref(pages, 0)
        self.sessions.keep(Terms(tenant=tenant, session=name, session_ttl_seconds=ttl), namespace, tokens)
        self.check()

    def compare(self, tenant: str, name: str, prompt: Int32, *, namespace: str = "") -> tuple[int, int]:
        return self.sessions.compare(Terms(tenant=tenant, session=name), namespace, prompt)

    def cached_after_a_flood(self, tokens: Int32, *, namespace: str = "") -> int:
        """How many of the pages that hold `tokens` are left when all that may be evicted is."""
        self.tree.evict(self.pool.num_pages)
        self.check()
        return len(self.tree.match(namespace, tokens).pages)

    def check(self) -> None:
        self.sessions.check_integrity()
        self.tree.check_integrity()
        self.pool.check_integrity(self.tree.pages_held())


def tokens_of(num_tokens: int, seed: int) -> Int32:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens, dtype=np.int32)


def pages_of(num_pages: int, seed: int) -> Int32:
    return tokens_of(num_pages * PAGE_SIZE, seed)


def test_full_pages_of_a_session_stay_until_its_time_is_over() -> None:
    cache, tokens = Cache(), tokens_of(5 * PAGE_SIZE + 3, 1)
    cache.end("", "s", tokens, ttl=2.0)
    assert (cache.sessions.num_pages, len(cache.sessions)) == (5, 1)
    assert cache.cached_after_a_flood(tokens) == 5
    cache.now = 2 * SECOND - 1
    cache.sessions.expire()
    assert cache.cached_after_a_flood(tokens) == 5
    cache.now = 2 * SECOND
    cache.sessions.expire()
    assert (cache.sessions.num_pages, len(cache.sessions), cache.tree.num_evictable) == (0, 0, 5)
    assert cache.cached_after_a_flood(tokens) == 0


def test_released_prefixes_may_be_evicted_at_once() -> None:
    cache, tokens = Cache(), pages_of(5, 1)
    cache.end("a", "s", tokens)
    cache.sessions.release("b", "s")
    cache.sessions.release("a", "another")
    assert cache.cached_after_a_flood(tokens) == 5
    cache.sessions.release("a", "s")
    assert cache.compare("a", "s", tokens) == (-1, 0)
    assert cache.cached_after_a_flood(tokens) == 0


def test_the_last_request_to_end_says_what_a_session_is_though_it_is_shorter() -> None:
    cache, long, short = Cache(), pages_of(6, 1), pages_of(2, 2)
    cache.end("", "s", long)
    cache.end("", "s", short)
    assert cache.compare("", "s", long) == (32, 0)
    assert (cache.cached_after_a_flood(long), cache.cached_after_a_flood(short)) == (0, 2)


def test_sessions_of_one_name_are_each_tenants_own() -> None:
    cache, of_a, of_b = Cache(), pages_of(3, 1), pages_of(4, 2)
    cache.end("a", "s", of_a)
    cache.end("b", "s", of_b)
    assert cache.compare("a", "s", of_a) == (48, 48)
    assert cache.compare("b", "s", of_a) == (64, 0)
    cache.sessions.release("a", "s")
    assert (cache.cached_after_a_flood(of_a), cache.cached_after_a_flood(of_b)) == (0, 4)


def test_a_prompt_is_compared_token_by_token_with_what_the_session_had() -> None:
    cache, tokens = Cache(), tokens_of(100, 1)
    cache.end("", "s", tokens, namespace="x")
    rewritten = np.concatenate([tokens, tokens_of(50, 2)])
    assert cache.compare("", "s", rewritten, namespace="x") == (100, 100)
    rewritten[37] += 1
    assert cache.compare("", "s", rewritten, namespace="x") == (100, 37)
    assert cache.compare("", "s", tokens[:20], namespace="x") == (100, 20)
    assert cache.compare("", "s", tokens, namespace="y") == (100, 0)
    assert cache.compare("", "t", tokens, namespace="x") == (-1, 0)


def test_pages_that_sessions_of_a_tenant_share_count_once() -> None:
    cache, system = Cache(40), pages_of(6, 0)  # a tenant may pin 10 pages
    for seed in (1, 2, 3, 4):
        cache.end("", f"agent {seed}", np.concatenate([system, pages_of(1, seed)]))
    assert cache.sessions.num_pages == 10
    cache.sessions.release("", "agent 2")
    assert cache.sessions.num_pages == 9
    cache.end("other", "agent 1", np.concatenate([system, pages_of(1, 1)]))
    assert cache.sessions.num_pages == 9 + 7, "what two tenants have pinned counts for both"


def test_of_a_tenant_beyond_its_quota_the_sessions_that_end_soonest_lose_their_pins() -> None:
    cache = Cache(40)
    prompts = {ttl: pages_of(4, ttl) for ttl in (30, 10, 20)}
    for ttl, tokens in prompts.items():
        cache.end("a", f"{ttl} s", tokens, ttl=ttl)
    assert cache.sessions.num_pages == 8
    assert [cache.cached_after_a_flood(prompts[ttl]) for ttl in (30, 10, 20)] == [4, 0, 4]
    assert cache.compare("a", "10 s", prompts[10]) == (64, 64), "what it was is known all the same"
    cache.end("b", "s", pages_of(5, 5))
    assert cache.sessions.num_pages == 13


def test_of_a_session_longer_than_the_quota_the_beginning_is_pinned() -> None:
    cache, tokens = Cache(40), pages_of(15, 1)
    cache.end("", "short", pages_of(2, 2))
    cache.end("", "long", tokens)
    assert (cache.sessions.num_pages, cache.tree.num_evictable) == (10, 5 + 2)
    assert cache.cached_after_a_flood(tokens) == 10
    assert cache.compare("", "long", tokens) == (240, 240)


def test_all_tenants_together_pin_at_most_half_of_the_pages() -> None:
    cache = Cache(40, share=0.3)
    prompts = {tenant: pages_of(9, ord(tenant)) for tenant in "abc"}
    for tenant, tokens in prompts.items():
        cache.end(tenant, "s", tokens)
    assert cache.sessions.num_pages == 20
    assert [cache.cached_after_a_flood(tokens) for tokens in prompts.values()] == [9, 9, 2]
    cache.end("d", "s", pages_of(3, 9))
    assert cache.sessions.num_pages == 20
    assert cache.cached_after_a_flood(pages_of(3, 9)) == 0


def test_a_quota_of_nothing_pins_nothing_but_sessions_are_known() -> None:
    cache, tokens = Cache(share=0.0), pages_of(3, 1)
    cache.end("", "s", tokens)
    assert cache.compare("", "s", tokens) == (48, 48)
    assert cache.cached_after_a_flood(tokens) == 0


def test_pins_give_way_to_a_tenant_first_its_own_and_first_those_that_end_soonest() -> None:
    cache = Cache(40, share=0.5)
    for tenant, name, ttl in (("a", "long", 30), ("a", "short", 20), ("b", "long", 40), ("b", "short", 10)):
        cache.end(tenant, name, pages_of(3, ttl), ttl=ttl)
    order = []
    for _ in range(4):
        before = {(s.tenant, s.name) for s in cache.pins}
        evictable = cache.tree.num_evictable
        cache.sessions.give_way("a", lambda: cache.tree.num_evictable > evictable)  # noqa: B023 - called at once
        cache.check()
        after = {(s.tenant, s.name) for s in cache.pins}
        order += sorted(before - after)
    assert order == [("a", "short"), ("a", "long"), ("b", "short"), ("b", "long")]
    assert (cache.sessions.num_pages, len(cache.sessions)) == (0, 4)
    cache.sessions.give_way("a", lambda: False)


@pytest.mark.parametrize("ttl", [0.0, -1.0, math.nan])
def test_a_session_with_no_time_to_live_ends_with_its_last_request(ttl: float) -> None:
    cache, tokens = Cache(), pages_of(3, 1)
    cache.end("", "s", tokens)
    cache.end("", "s", tokens, ttl=ttl)
    assert (cache.sessions.num_pages, len(cache.sessions)) == (0, 0)


def test_nothing_is_kept_for_ever() -> None:
    cache, tokens = Cache(), pages_of(3, 1)
    cache.end("", "s", tokens, ttl=math.inf)
    cache.now = 86_400 * SECOND - 1
    assert cache.compare("", "s", tokens) == (48, 48)
    cache.now += 1
    assert cache.compare("", "s", tokens) == (-1, 0)


def test_beyond_the_most_sessions_those_that_end_soonest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS_PER_TENANT", 2)
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions_module, "MAX_TOKENS", 5 * PAGE_SIZE)
    cache = Cache()
    for tenant, name, ttl in (("a", "1", 30), ("a", "2", 20), ("b", "1", 10), ("a", "3", 40)):
        cache.end(tenant, name, pages_of(1, ttl), ttl=ttl)
    known = [("a", "1"), ("a", "3"), ("b", "1")]
    assert [(t, s) for t in "abc" for s in "123" if cache.compare(t, s, pages_of(1, 0))[0] > 0] == known
    cache.end("c", "1", pages_of(1, 5), ttl=50)
    known = [("a", "1"), ("a", "3"), ("c", "1")]
    assert [(t, s) for t in "abc" for s in "123" if cache.compare(t, s, pages_of(1, 0))[0] > 0] == known
    cache.end("c", "1", pages_of(4, 6), ttl=50)
    assert [(t, s) for t in "abc" for s in "123" if cache.compare(t, s, pages_of(1, 0))[0] > 0] == known[1:]


def test_a_session_that_goes_on_and_on_takes_no_more_memory() -> None:
    cache = Cache()
    for turn in range(300):
        cache.now = turn
        cache.end("", "s", pages_of(1, turn), ttl=1000.0)
    assert len(cache.sessions._ends) <= 67


@pytest.mark.parametrize("seed", range(6))
def test_random_sessions_never_exceed_a_quota(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(int(rng.integers(10, 40)), share=float(rng.choice([0.1, 0.25, 0.5, 0.9])))
    known: dict[tuple[str, str], tuple[Int32, str, int]] = {}
    most = 0
    for _ in range(1500):
        tenant, name = str(rng.choice(["a", "b", "c"])), str(rng.integers(4))
        namespace = str(rng.choice(["", "x"]))
        tokens = np.repeat(rng.integers(0, 3, int(rng.integers(1, 10)), dtype=np.int32), PAGE_SIZE)
        tokens = np.concatenate([tokens, rng.integers(0, 2, int(rng.integers(PAGE_SIZE)), dtype=np.int32)])
        before, action = known.get((tenant, name)), rng.random()
        if action < 0.5:
            ttl = int(rng.integers(1, 100))
            room = cache.pool.num_free + cache.tree.num_evictable >= len(tokens) // PAGE_SIZE
            cache.end(tenant, name, tokens, ttl=ttl / SECOND, namespace=namespace, cached=bool(room))
            known[tenant, name] = tokens, namespace, cache.now + ttl
        elif action < 0.6:
            cache.sessions.release(tenant, name)
            known.pop((tenant, name), None)
        elif action < 0.7:
            cache.tree.evict(int(rng.integers(10)))
        elif action < 0.75:
            evictable = cache.tree.num_evictable
            enough = evictable + int(rng.integers(4))
            cache.sessions.give_way(tenant, lambda: cache.tree.num_evictable >= enough)  # noqa: B023 - called at once
        elif action < 0.85:
            cache.now += int(rng.integers(40))
            cache.sessions.expire()
            known = {key: value for key, value in known.items() if value[2] > cache.now}
        elif before is None:
            assert cache.compare(tenant, name, tokens, namespace=namespace) == (-1, 0)
        else:
            had = before[0][: len(tokens)]
            same = had == tokens[: len(had)]
            common = len(had) if same.all() else int(same.argmin())
            expected = common if before[1] == namespace else 0
            assert cache.compare(tenant, name, tokens, namespace=namespace) == (len(before[0]), expected)
        cache.check()
        assert len(cache.sessions) == len(known)
        most = max(most, cache.sessions.num_pages)
    assert most >= min(cache.pins.tenant_quota, cache.pins.total_quota) > 0
    for tenant, name in known:
        cache.sessions.release(tenant, name)
    cache.check()
    assert cache.tree.num_evictable == cache.tree.num_pages

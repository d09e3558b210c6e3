"""Rows and their memory, without plans."""

from __future__ import annotations

import numpy as np

from asyncengine.sampling import SamplingParams
from gpu_runner.schedule.host_tier import recompute_ns
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.rows import EVICT_AHEAD_DIVISOR, Rows


def request_of(rid: int, prompt: np.ndarray) -> Request:
    return Request(
        rid=rid,
        tokens=prompt,
        prompt_len=len(prompt),
        params=SamplingParams(),
        seed=0,
        limit=len(prompt) + 1,
        detok=b"",
        namespace="",
        arrival=rid,
    )


def rows_of(num_pages: int) -> Rows:
    return Rows(
        num_slots=4,
        max_model_len=128,
        num_pages=num_pages,
        caching=True,
        session_pin_share=0.25,
        clock=lambda: 0,
        host_pages=0,
        page_load_ns=0,
        prefill_ns=recompute_ns,
    )


def test_a_row_does_not_hold_another_rows_pages_for_tokens_that_it_has_computed_itself() -> None:
    rows = rows_of(num_pages=21)
    first, second = (request_of(rid, np.arange(100, dtype=np.int32)) for rid in (1, 2))
    assert rows.start(first, watermark=0, alone=True)
    assert rows.start(second, watermark=0, alone=False)
    for request, computed in ((first, 64), (second, 80), (first, 96)):
        rows.slots.computed[request.slot] = computed
        rows.share(request.slot)
        rows.check_integrity()
    rows.end(first.slot)
    rows.check_integrity()
    assert rows.missing_pages(20 - 7) == 0  # all but the 7 of the second
    rows.end(second.slot)
    rows.check_integrity()
    assert rows.pool.num_free + rows.tree.num_evictable == 20


def test_a_row_holds_what_it_computed_by_its_lock_alone() -> None:
    rows = rows_of(num_pages=21)
    request = request_of(1, np.arange(100, dtype=np.int32))
    assert rows.start(request, watermark=0, alone=True)
    slot = request.slot
    for computed, locked in ((40, 2), (100, 6)):
        rows.slots.computed[slot] = computed
        rows.share(slot)
        rows.check_integrity()
        assert len(rows.slots.own_pages(slot)) == 7 - locked
        assert rows.pool.refcount(rows.slots.pages(slot)).tolist() == [1] * 7
    assert rows.missing_pages(20) == 7


def test_who_finds_a_full_cache_evicts_a_few_pages_more_than_it_needs() -> None:
    rows = rows_of(num_pages=513)
    ahead = 513 // EVICT_AHEAD_DIVISOR
    rid = 0
    while rows.pool.num_free >= 7:
        request = request_of(rid, np.arange(rid, rid + 112, dtype=np.int32))
        assert rows.start(request, watermark=0, alone=True)
        rows.slots.computed[request.slot] = 112
        rows.end(request.slot)
        rid += 1
    missing = 7 - rows.pool.num_free
    cached = rows.tree.num_pages
    assert rows.missing_pages(7) == 0
    assert (rows.pool.num_free, rows.tree.num_pages) == (7 + ahead, cached - missing - ahead)
    rows.check_integrity()

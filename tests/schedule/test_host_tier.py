"""The tier in host memory as requests see it: what comes back, what is computed again, and who waits for what."""

from __future__ import annotations

import numpy as np
import pytest
from support.copy_engine import CopyEngine
from support.engine_core import EngineCore

from asyncengine.config import PAGE_SIZE
from gpu_runner.schedule.host_tier import STORES_PER_BATCH
from gpu_runner.schedule.slots import State

PAGE_COMPUTE_NS = 160_000


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, length, dtype=np.int32)


def drain(core: EngineCore) -> None:
    """Until all that is to be stored is."""
    core.run()
    core.assert_all_right()
    core.assert_nothing_held()


def forgotten_by_the_device(page_load_ns: int = 0, host_pages: int = 64) -> EngineCore:
    """Request 1, of 80 tokens of prompt, is over; its pages are in host memory only, and copies wait to be let."""
    core = EngineCore(num_pages=12, max_num_seqs=4, host_pages=host_pages, page_load_ns=page_load_ns)
    core.add(1, prompt_of(80), 1, ignore_eos=True)
    drain(core)
    core.scheduler.rows.tree.evict(100)
    core.scheduler.check_integrity()
    assert core.scheduler.gauges()["free_pages"] == 11
    core.copies_done = lambda: 0
    return core


def turns(core: EngineCore, count: int = 3) -> None:
    for _ in range(count):
        core.turn()


def states(core: EngineCore) -> dict[int, int]:
    """By rid, of the requests that hold a slot."""
    slots = core.scheduler.slots
    return {request.rid: int(slots.state[request.slot]) for request in slots.request if request is not None}


def test_an_evicted_prefix_comes_back_from_host_memory_and_is_not_computed_again() -> None:
    core = forgotten_by_the_device()
    core.add(2, prompt_of(80), 4, ignore_eos=True)
    turns(core)
    assert states(core) == {2: State.LOADING}
    assert core.scheduler.plan() is None
    assert core.scheduler.has_work
    core.copies_done = lambda: 1
    drain(core)
    gauges = core.scheduler.gauges()
    assert gauges["prefill_tokens"] == 80 + 16  # the last page has the token to sample after
    assert (gauges["kv_loads"], gauges["host_hit_tokens"]) == (4, 64)
    assert core.opens[2].cached_tokens == 64


@pytest.mark.parametrize(("page_load_ns", "loads"), [(PAGE_COMPUTE_NS - 1, 4), (PAGE_COMPUTE_NS, 0)])
def test_a_prefix_is_loaded_only_where_that_is_quicker_than_to_compute_it(page_load_ns: int, loads: int) -> None:
    core = forgotten_by_the_device(page_load_ns)
    core.add(2, prompt_of(80), 4, ignore_eos=True)
    core.copies_done = lambda: 1
    drain(core)
    gauges = core.scheduler.gauges()
    assert (gauges["kv_loads"], gauges["prefill_tokens"]) == (loads, 160 - 16 * loads)


def test_only_what_the_device_has_lost_is_loaded() -> None:
    core = forgotten_by_the_device()
    core.copies_done = lambda: 1
    core.add(2, prompt_of(40), 1, ignore_eos=True)
    drain(core)
    assert core.scheduler.gauges()["kv_loads"] == 2
    core.add(3, prompt_of(80), 1, ignore_eos=True)
    drain(core)
    assert core.scheduler.gauges()["kv_loads"] == 4


def test_rows_do_not_wait_for_the_loads_of_others() -> None:
    core = forgotten_by_the_device()
    core.add(2, prompt_of(80), 4, ignore_eos=True)
    core.add(3, prompt_of(20, seed=3), 4, ignore_eos=True)
    turns(core, 8)
    assert core.finish_order == [1, 3]
    assert states(core) == {2: State.LOADING}
    core.copies_done = lambda: 1
    drain(core)


def test_a_row_has_not_lost_its_turn_to_those_that_started_while_it_was_loading() -> None:
    core = EngineCore(num_pages=24, max_num_seqs=4, max_num_batched_tokens=16, host_pages=64)
    core.add(1, prompt_of(80), 1, ignore_eos=True)
    drain(core)
    core.scheduler.rows.tree.evict(100)
    core.copies_done = lambda: 0
    core.add(2, prompt_of(120), 4, ignore_eos=True)
    turns(core)
    core.add(3, prompt_of(100, seed=3), 4, ignore_eos=True)
    turns(core)
    assert states(core) == {2: State.LOADING, 3: State.PREFILL}
    core.copies_done = lambda: 1
    drain(core)
    assert core.finish_order == [1, 2, 3]


def test_a_prefix_that_two_requests_want_is_loaded_once() -> None:
    core = forgotten_by_the_device()
    core.add(2, prompt_of(80), 4, ignore_eos=True, n=2)
    turns(core)
    core.add(4, np.concatenate([prompt_of(70), prompt_of(10, seed=4)]), 4, ignore_eos=True)
    turns(core)
    assert states(core) == dict.fromkeys((2, 3, 4), State.LOADING)
    core.copies_done = lambda: 1
    drain(core)
    gauges = core.scheduler.gauges()
    assert gauges["kv_loads"] == 4
    assert gauges["prefill_tokens"] == 80 + 3 * 16


def test_who_shares_a_load_goes_on_when_the_request_it_was_for_is_aborted() -> None:
    core = forgotten_by_the_device()
    core.add(2, prompt_of(80), 4, ignore_eos=True)
    core.add(3, prompt_of(80), 4, ignore_eos=True)
    turns(core)
    core.abort(2)
    turns(core)
    assert states(core) == {3: State.LOADING}
    core.copies_done = lambda: 1
    drain(core)
    assert core.scheduler.gauges()["kv_loads"] == 4


def test_pages_of_an_aborted_load_are_given_to_nobody_before_its_copies_are_done() -> None:
    core = forgotten_by_the_device()
    core.add(2, prompt_of(80), 4, ignore_eos=True)
    turns(core)
    core.abort(2)
    gauges = core.scheduler.gauges()
    assert (gauges["free_pages"], gauges["cached_pages"]) == (11 - 4, 0)
    core.add(3, prompt_of(120, seed=3), 1, ignore_eos=True)
    turns(core)
    assert 3 not in core.finish  # it needs 8 pages
    assert State.LOADING not in states(core).values()
    core.copies_done = lambda: 1
    drain(core)
    assert core.scheduler.gauges()["prefill_tokens"] == 80 + 120


def test_pages_in_host_memory_that_a_load_reads_are_not_evicted_for_a_store() -> None:
    core = forgotten_by_the_device(host_pages=5)
    core.add(2, prompt_of(80), 4, ignore_eos=True)
    core.add(3, prompt_of(60, seed=3), 1, ignore_eos=True)
    turns(core, 8)
    assert core.finish_order == [1, 3]
    assert core.scheduler.gauges()["kv_stores"] == 5 + 1  # the page that is not being loaded made room for one of three
    core.copies_done = lambda: 1
    drain(core)


def test_a_loading_row_is_retracted_before_the_older_ones_that_decode() -> None:
    core = forgotten_by_the_device()
    core.add(2, prompt_of(16, seed=2), 90, ignore_eos=True)
    turns(core)
    core.add(3, prompt_of(80), 40, ignore_eos=True)
    turns(core, 100)
    assert core.finish_order == [1, 2]
    assert core.scheduler.counters.preemptions > 0
    core.copies_done = lambda: 1
    drain(core)


def test_prefixes_of_one_namespace_are_not_loaded_for_another() -> None:
    core = forgotten_by_the_device()
    core.copies_done = lambda: 1
    core.scheduler.add(rid=2, prompt=prompt_of(80), params=core.asked[1][0], max_tokens=1, namespace="somebody else's")
    core.prompts[2], core.limits[2], core.stop_ids[2] = prompt_of(80), 81, ()
    drain(core)
    assert core.scheduler.gauges()["kv_loads"] == 0
    assert core.scheduler.gauges()["host_pages_used"] == 10


def test_nothing_is_stored_before_the_step_that_computes_it_is_done() -> None:
    core = EngineCore(host_pages=64, max_num_batched_tokens=256)
    core.add(1, prompt_of(80), 1, ignore_eos=True)
    plan = core.scheduler.plan()
    assert plan is not None
    core.model.launch(plan)
    core.scheduler.abort(1)
    assert core.scheduler.take_transfers() is None
    core.scheduler.commit(plan, core.model.collect())
    batch = core.scheduler.take_transfers()
    assert batch is not None
    assert (batch.ticket, len(batch.store_from), batch.store_to.tolist()) == (1, 5, [0, 1, 2, 3, 4])
    assert core.scheduler.take_transfers() is None
    core.scheduler.check_integrity()
    core.scheduler.transferred(1)
    core.scheduler.check_integrity()
    assert not core.scheduler.copying


def test_a_batch_stores_no_more_than_its_share_and_two_are_in_flight() -> None:
    core = EngineCore(
        num_pages=4096,
        max_model_len=16384,
        max_num_batched_tokens=16384,
        host_pages=4096,
        copies_done=lambda: 0,
        check=False,
    )
    core.add(1, prompt_of(1000 * PAGE_SIZE), 100, ignore_eos=True)
    turns(core, 20)
    assert isinstance(core.copy_engine, CopyEngine)
    assert [len(batch.store_from) for batch, _, _ in core.copy_engine.in_flight] == [STORES_PER_BATCH] * 2
    core.copies_done = lambda: 1
    core.run()
    assert core.scheduler.gauges()["kv_stores"] == 1000 + 99 // PAGE_SIZE
    core.scheduler.check_integrity()


def test_prefixes_in_host_memory_outlive_others_by_their_last_use() -> None:
    core = EngineCore(num_pages=12, max_num_seqs=1, host_pages=10)
    for rid, seed in ((1, 1), (2, 2), (3, 1), (4, 3)):
        core.add(rid, prompt_of(80, seed=seed), 1, ignore_eos=True)
        drain(core)
    core.scheduler.rows.tree.evict(100)
    tier = core.scheduler.rows.tier
    assert tier is not None
    found = [len(tier.tree.find("", prompt_of(80, seed=seed)).pages) for seed in (1, 2, 3)]
    assert found == [5, 0, 5]
    gauges = core.scheduler.gauges()
    assert (gauges["host_pages_used"], gauges["host_pages_total"]) == (10, 10)


@pytest.mark.parametrize("host_pages", [0, 256])
def test_four_long_answers_in_a_cache_for_one_and_a_half_all_finish(host_pages: int) -> None:
    core = EngineCore(num_pages=1 + 3 * 34 // 2, max_model_len=544, max_num_seqs=4, host_pages=host_pages, check=False)
    for rid in (1, 2, 3, 4):
        core.add(rid, prompt_of(32, seed=rid), 512, ignore_eos=True)
    requests = list(core.scheduler.queue)
    full = False
    while core.turn():
        gauges = core.scheduler.gauges()
        full = full or bool(gauges["preemptions"] and gauges["waiting_for_pages"])
        core.scheduler.check_integrity()
    assert full
    core.assert_all_right()
    core.assert_nothing_held()
    assert core.finish_order[0] == 1
    assert max(request.preemptions for request in requests) <= 8
    gauges = core.scheduler.gauges()
    assert gauges["preemptions"] > 0
    if host_pages:
        assert gauges["kv_loads"] > 0


def test_a_retracted_request_resumes_with_what_host_memory_has_of_it() -> None:
    core = EngineCore(num_pages=20, max_model_len=256, max_num_seqs=2, host_pages=64)
    core.add(1, prompt_of(96, seed=1), 140, ignore_eos=True)
    core.add(2, prompt_of(96, seed=2), 140, ignore_eos=True)
    drain(core)
    gauges = core.scheduler.gauges()
    assert gauges["preemptions"] > 0
    assert gauges["kv_loads"] > 0
    again = gauges["prefill_tokens"] - 2 * 96
    assert 0 < again < 32 * gauges["preemptions"]


def test_without_a_prefix_cache_host_memory_has_only_what_retracted_requests_need() -> None:
    core = EngineCore(num_pages=20, max_model_len=256, max_num_seqs=2, host_pages=64, enable_prefix_caching=False)
    core.add(1, prompt_of(96), 20, ignore_eos=True)
    drain(core)
    assert core.scheduler.gauges()["kv_stores"] == 0
    core.add(2, prompt_of(96), 140, ignore_eos=True)
    core.add(3, prompt_of(96), 140, ignore_eos=True)
    drain(core)
    gauges = core.scheduler.gauges()
    assert gauges["preemptions"] > 0
    assert gauges["kv_stores"] > 0
    assert gauges["host_pages_used"] == gauges["cached_pages"] == 0

"""Counting requests: the shared numbers, and what the real ring makes of known requests."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, Delta, EngineConfig, InvalidRequestError, SamplingParams
from asyncengine.config import ServiceClass
from asyncengine.gc_clock import GcClock
from asyncengine.metrics import FINISH_REASONS, RequestMetrics, Totals, make_block, read_totals
from asyncengine.request_terms import Target
from asyncengine.tenant_table import MAX_TENANTS, OTHERS, TenantTokens
from asyncengine.terms import Terms
from asyncengine.timeline import Timeline

S = 10**9
TIMELINE = Timeline(
    arrived=1 * S,
    encoded=2 * S,
    queued=2 * S,
    started=4 * S,
    computed=7 * S,
    seen=8 * S,
    finished=18 * S,
)

TARGETS: dict[ServiceClass, Target] = {"interactive": Target(7.0, 2.4), "background": Target(6.9, 2.5)}
"""`TIMELINE`'s first token comes after 7 s; of 5 tokens the mean gap is 2.5 s."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


def observed(totals: Totals, name: str) -> tuple[int, float]:
    """Number and sum of a histogram's observations."""
    histogram = totals.histograms[name]
    return sum(histogram.counts), histogram.total


def in_bucket(totals: Totals, name: str) -> list[float]:
    """The upper bounds of the buckets that hold something."""
    histogram = totals.histograms[name]
    bounds = (*histogram.bounds, float("inf"))
    return [bound for bound, count in zip(bounds, histogram.counts, strict=True) if count]


def test_a_choice_is_counted_when_it_begins_and_when_it_ends(run_dir: Path) -> None:
    metrics = RequestMetrics(run_dir, 0, TARGETS)
    metrics.submitted(2)
    metrics.begun(TIMELINE, prompt_tokens=300)
    metrics.ended("length", TIMELINE, tokens=5)
    totals = read_totals(run_dir)
    assert totals.counters == {
        "prompt_tokens": 300,
        "generation_tokens": 0,
        "finished_stop": 0,
        "finished_length": 1,
        "finished_abort": 0,
        "finished_error": 0,
        "gc_pause_ns": 0,
        "measured_interactive": 1,
        "measured_background": 0,
        "within_ttft_interactive": 1,
        "within_ttft_background": 0,
        "within_gap_interactive": 0,
        "within_gap_background": 0,
    }
    assert totals.tenants == {}
    expected = {
        "choices": 2,
        "prompt_length": 300,
        "output_length": 5,
        "time_to_first_token": 7,
        "queue_time": 2,
        "prefill_time": 3,
        "decode_time": 11,
        "inference_time": 14,
        "e2e_latency": 17,
        "time_per_output_token": 2.5,
    }
    assert {name: observed(totals, name) for name in expected} == {
        name: (1, pytest.approx(value)) for name, value in expected.items()
    }
    metrics.close()


def test_a_choice_that_ends_by_itself_is_held_to_the_targets_of_its_class(run_dir: Path) -> None:
    metrics = RequestMetrics(run_dir, 0, TARGETS)
    background = Terms(service_class="background")
    metrics.ended("stop", TIMELINE, tokens=5, terms=background)
    metrics.ended("length", TIMELINE, tokens=1, terms=background)  # its one token took the choice's 10 s
    metrics.ended("length", TIMELINE, tokens=0, terms=background)
    for reason in ("abort", "error"):
        metrics.ended(reason, TIMELINE, tokens=5, terms=background)
    counters = read_totals(run_dir).counters
    assert (counters["measured_background"], counters["measured_interactive"]) == (2, 0)
    assert (counters["within_ttft_background"], counters["within_gap_background"]) == (0, 1)
    metrics.close()


def test_tokens_are_counted_by_tenant_in_all_processes(run_dir: Path) -> None:
    blocks = [RequestMetrics(run_dir, worker, TARGETS) for worker in range(2)]
    for block in blocks:
        block.begun(TIMELINE, prompt_tokens=300, tenant="a")
        block.prompted(20, tenant="b")
        block.prompted(7, tenant="")
        block.ended("abort", TIMELINE, tokens=5, terms=Terms("a"))
        block.ended("stop", TIMELINE, tokens=0, terms=Terms("c"))
    assert read_totals(run_dir).tenants == {"a": TenantTokens(600, 10), "b": TenantTokens(40, 0)}
    for block in blocks:
        block.close()


def test_tenants_beyond_the_tables_end_are_counted_together(run_dir: Path) -> None:
    metrics = RequestMetrics(run_dir, 0, TARGETS)
    for number in range(MAX_TENANTS + 2):
        metrics.prompted(1, tenant=f"t{number}")
    metrics.prompted(1, tenant="t0")
    metrics.prompted(1, tenant="ü" * 65)
    tenants = read_totals(run_dir).tenants
    assert len(tenants) == MAX_TENANTS
    assert tenants[OTHERS] == TenantTokens(4, 0)
    assert tenants["t0"] == TenantTokens(2, 0)
    metrics.close()


def test_a_value_on_a_bound_belongs_to_the_bucket_below_it(run_dir: Path) -> None:
    metrics = RequestMetrics(run_dir, 0, TARGETS)
    for n in (1, 2, 3, 16):
        metrics.submitted(n)
    assert in_bucket(read_totals(run_dir), "choices") == [1, 2, 5, 20]
    metrics.ended("stop", TIMELINE, tokens=10**9)
    assert in_bucket(read_totals(run_dir), "output_length") == [float("inf")]
    metrics.close()


def test_the_choices_of_a_frame_that_waited_alike_are_counted_at_once(run_dir: Path) -> None:
    metrics = RequestMetrics(run_dir, 0, TARGETS)
    metrics.frame(5 * S, [0, 3 * S, 3 * S, 4 * S, 0], tokens=6)
    totals = read_totals(run_dir)
    assert totals.counters["generation_tokens"] == 6
    assert observed(totals, "inter_token_latency") == (3, pytest.approx(5))
    assert in_bucket(totals, "inter_token_latency") == [1.0, 2.5]
    metrics.close()


def test_the_totals_are_those_of_all_processes(run_dir: Path) -> None:
    blocks = [RequestMetrics(run_dir, worker, TARGETS) for worker in (0, 1, 12)]
    for block in blocks:
        block.submitted(3)
        block.ended("abort", TIMELINE, tokens=0)
    totals = read_totals(run_dir)
    assert totals.counters["finished_abort"] == 3
    assert observed(totals, "choices") == (3, 9)
    for block in blocks:
        block.close()


def test_what_a_lost_process_has_counted_stays_counted_and_its_successor_goes_on(run_dir: Path) -> None:
    kept = make_block(run_dir, 3)
    for tenants in (("b", "a"), ("a", "c")):
        metrics = RequestMetrics(run_dir, 3, TARGETS, fd=os.dup(kept))
        metrics.submitted(2)
        for tenant in tenants:
            metrics.prompted(10, tenant=tenant)
        metrics.close()
        totals = read_totals(run_dir)
    assert observed(totals, "choices") == (2, 4)
    assert totals.counters["prompt_tokens"] == 40
    assert totals.tenants == {"b": TenantTokens(10, 0), "a": TenantTokens(20, 0), "c": TenantTokens(10, 0)}
    os.close(kept)


def test_a_block_that_went_with_its_process_is_passed_over(run_dir: Path) -> None:
    metrics = RequestMetrics(run_dir, 0, TARGETS)
    (run_dir / "engine.1.metrics").symlink_to("/proc/4194304/fd/3")
    (run_dir / "engine.2.metrics").write_bytes(b"short")
    metrics.submitted(1)
    assert observed(read_totals(run_dir), "choices") == (1, 1)
    metrics.close()


def test_garbage_collection_is_clocked_from_start_to_stop() -> None:
    pauses: list[int] = []
    clock = GcClock(pauses.append)
    gc.disable()
    gc.freeze()  # what other tests have left is much to look through
    try:
        gc.collect()
        clock.start()
        gc.collect()
        clock.stop()
        gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    assert len(pauses) == 1
    assert pauses[0] > 0


# ------------------------------------------------------------------------------------------------- over the real ring


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"step_ms": 2, "endless_from": 1900}))
        yield


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    assert "ASYNCENGINE_SCRIPT" in os.environ
    config = EngineConfig(max_model_len=2048, max_num_seqs=4, detokenizer_workers=2)
    async with AsyncEngine.start(config, modules={"gpu_runner": "support.scripted_runner"}) as engine:
        yield engine


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def test_known_requests_give_exact_counts(engine: AsyncEngine) -> None:
    for _ in range(3):  # 7 prompt tokens come back, and then the end
        await collect(engine.generate(list(range(10, 17)), SamplingParams()))
    await collect(engine.generate([20, 21], SamplingParams(n=3, max_tokens=5, ignore_eos=True)))
    with pytest.raises(InvalidRequestError):
        await collect(engine.generate([1] * 3000, SamplingParams(n=2)))
    left = dict.fromkeys(range(4), 0)  # tokens of four choices that take all rows, so that what comes then has to wait
    async with aclosing(engine.generate([30], SamplingParams(n=4, max_tokens=1900, ignore_eos=True))) as deltas:
        async for delta in deltas:
            left[delta.index] = delta.completion_tokens
            if min(left.values()) >= 3:
                break
        queued = asyncio.create_task(collect(engine.generate([40] * 1000, SamplingParams(n=16))))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
    totals = engine.totals()
    ended = {reason: totals.counters[f"finished_{reason}"] for reason in FINISH_REASONS}
    assert ended == {"stop": 3, "length": 3, "abort": 4 + 16, "error": 0}
    assert totals.counters["prompt_tokens"] == 3 * 7 + 3 * 2 + 4
    tokens = 3 * 8 + 3 * 5 + sum(left.values())  # more may have come of the choices that were left
    assert totals.counters["generation_tokens"] >= tokens
    assert observed(totals, "time_to_first_token")[0] == observed(totals, "prompt_length")[0] == 3 + 3 + 4
    assert observed(totals, "e2e_latency")[0] == observed(totals, "output_length")[0] == sum(ended.values())
    assert observed(totals, "output_length")[1] >= tokens
    assert observed(totals, "choices") == (7, 3 + 3 + 2 + 4 + 16)
    gaps, gap_seconds = observed(totals, "inter_token_latency")
    assert gaps <= observed(totals, "output_length")[1] - 10
    assert gap_seconds <= observed(totals, "e2e_latency")[1]


async def test_a_timeline_has_what_every_process_stamped_in_order(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate([5], SamplingParams(n=4, max_tokens=150, ignore_eos=True))) as blocking:
        await anext(blocking)
        waiting = asyncio.create_task(collect(engine.generate([6], SamplingParams(max_tokens=100, ignore_eos=True))))
        rest = await collect(blocking)
    assert [delta.timeline is not None for delta in rest] == [delta.finish_reason is not None for delta in rest]
    *_, last = await waiting
    timeline = last.timeline
    assert timeline is not None
    assert 0 < timeline.arrived < timeline.encoded
    assert timeline.arrived < timeline.queued < timeline.started < timeline.computed < timeline.seen
    assert timeline.finished - timeline.computed > 50 * 2_000_000
    assert timeline.started > min(delta.timeline.computed for delta in rest if delta.timeline)  # it waited for a row

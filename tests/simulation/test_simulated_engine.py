"""The simulated engine: times worked out by hand, nothing lost, policies that differ as they must."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from simulation.records import Target, Targets
from simulation.replica import Replica, ReplicaConfig
from simulation.run import Run, capacity_ns, simulate, simulate_closed_loop
from simulation.traces import TraceRequest, load_trace, scaled
from support.step_models import one_us_a_token

from asyncengine.config import SchedulingPolicy
from gpu_runner.schedule.ageing import MAX_OVERTAKES

SAMPLE = Path(__file__).parents[1] / "chaos" / "data" / "azure_conversation.csv"
US = 1000
TARGETS: Targets = {"interactive": Target(1.0, 1.0), "background": Target(2.0, 2.0)}
CONFIG = ReplicaConfig(kv_cache_tokens=65536, max_model_len=8192)


def request(index: int, at_us: int, prompt: int, output: int, *, priority: int = 1) -> TraceRequest:
    return TraceRequest(index, at_us * US, prompt, output, first_id=index * 10_000, priority=priority)


def gaps_us(run: Run) -> list[int]:
    return (np.concatenate(run.records.gaps) // US).tolist()


def test_one_request_takes_its_steps_one_after_the_other_and_the_host_is_hidden_behind_them() -> None:
    run = simulate([request(0, 0, 16, 3)], CONFIG, one_us_a_token(host_us=100))
    # the step with the prompt begins when the host is done with it, at 100 us, and takes 999 + 16; then two of 1000
    assert run.records.first.tolist() == [1115 * US]
    assert run.records.end.tolist() == [3115 * US]
    assert gaps_us(run) == [1000, 1000]
    assert (run.replica.steps, run.replica.busy_ns) == (3, 3015 * US)


def test_a_host_that_is_slower_than_the_steps_shows() -> None:
    run = simulate([request(0, 0, 16, 3)], CONFIG, one_us_a_token(host_us=2000))
    # steps are launched at 2000, 4000 and 6000, and looked at behind the launch of the next one
    assert run.records.first.tolist() == [4000 * US]
    assert run.records.end.tolist() == [7000 * US]
    assert gaps_us(run) == [2000, 1000]


def test_a_request_that_comes_during_a_step_is_in_the_next_but_one() -> None:
    run = simulate([request(0, 0, 16, 4), request(1, 1500, 16, 1)], CONFIG, one_us_a_token(host_us=100))
    # it comes while step 2 runs and step 3 waits; step 4 holds it and the other's last token: 17 tokens, padded to 24
    assert run.records.end.tolist() == [4138 * US, 4138 * US]
    assert run.records.ttft_ms.tolist() == [1.115, 2.638]
    assert run.records.started.tolist() == [0, 2115 * US]


def test_an_engine_without_work_waits_for_the_next_request() -> None:
    run = simulate([request(0, 0, 16, 1), request(1, 9000, 16, 1)], CONFIG, one_us_a_token(host_us=100))
    assert run.records.first.tolist() == [1115 * US, 10_115 * US]


def test_what_a_step_costs_is_counted_by_rows_contexts_and_pairs() -> None:
    costs = one_us_a_token(host_us=0, sampled_row_us=10.0, decode_context_us=1.0, prefill_pair_us=0.5)
    run = simulate([request(0, 0, 16, 3)], CONFIG, costs)
    # 16 x 17 / 2 pairs; then decode steps that see 17 and 18 tokens
    assert run.records.first.tolist() == [(1015 + 10 + 68) * US]
    assert gaps_us(run) == [1000 + 10 + 17, 1000 + 10 + 18]


def test_a_long_prompt_is_computed_in_chunks_that_see_what_came_before() -> None:
    config = CONFIG._replace(max_num_seqs=4, max_num_batched_tokens=16)
    run = simulate([request(0, 0, 40, 1)], config, one_us_a_token(host_us=0, prefill_pair_us=1.0))
    # chunks of 16, 16 and 8 tokens behind 0, 16 and 32
    pairs = 16 * 17 // 2 + (16 * 16 + 16 * 17 // 2) + (8 * 32 + 8 * 9 // 2)
    assert run.records.first.tolist() == [(1015 + 1015 + 1007 + pairs) * US]


def test_prompts_that_begin_alike_are_found_in_the_cache() -> None:
    blocks = [TraceRequest(index, index * 10**9, 1000, 4, blocks=(7, 8 + index)) for index in range(2)]
    run = simulate(blocks, CONFIG, one_us_a_token())
    assert run.records.cached.tolist() == [0, 512]
    assert run.replica.scheduler.counters.prefill_tokens == 1000 + 488
    without = simulate(blocks, CONFIG._replace(prefix_caching=False), one_us_a_token())
    assert without.records.cached.tolist() == [0, 0]


def test_what_the_device_forgot_comes_from_host_memory_in_the_time_of_its_copies() -> None:
    config = CONFIG._replace(kv_cache_tokens=128, kv_host_tokens=1024, page_copy_ns=100 * US)
    again = TraceRequest(2, 20_000 * US, 96, 1, first_id=0)  # as request 0, of which the device has 2 of 6 pages left
    run = simulate([request(0, 0, 96, 1), request(1, 10_000, 96, 1), again], config, one_us_a_token(host_us=100))
    assert run.records.cached.tolist() == [0, 0, 80]
    assert run.replica.scheduler.gauges()["kv_loads"] == 3
    # three pages take 300 us, the host 100, then a step of the last 16 tokens
    assert run.records.first.tolist()[2] == (20_000 + 300 + 100 + 1015) * US


def test_a_request_that_is_too_long_is_refused_and_the_others_run() -> None:
    run = simulate([request(0, 0, 8192, 1), request(1, 0, 16, 1)], CONFIG, one_us_a_token())
    assert run.records.is_refused.tolist() == [True, False]
    assert run.records.ran.tolist() == [False, True]
    figures = run.figures(TARGETS)
    assert (figures["requests"], figures["refused"], figures["ended"], figures["good_share"]) == (2, 1, 1, 0.0)
    nothing = simulate([request(0, 0, 8192, 1)], CONFIG, one_us_a_token()).figures(TARGETS)
    assert nothing["ended"] == 0


# --------------------------------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest", "longest"])
def test_every_request_ends_once_with_all_its_tokens_though_pages_run_out(policy: SchedulingPolicy) -> None:
    trace = scaled(load_trace(str(SAMPLE), limit=80, length_scale=0.5), 0.02)
    config = CONFIG._replace(kv_cache_tokens=6000, max_model_len=6000, max_num_seqs=32, policy=policy)
    run = simulate(trace, config, one_us_a_token())
    records, scheduler = run.records, run.replica.scheduler
    assert records.ran.all()
    assert ((records.arrival <= records.started) & (records.started < records.first)).all()
    assert (records.first <= records.end).all()
    assert sum(map(len, records.gaps)) == int((records.output_tokens - 1).sum())
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.finished == len(trace)
    scheduler.check_integrity()
    gauges = scheduler.gauges()
    assert gauges["free_pages"] + gauges["cached_pages"] == gauges["total_pages"]


def test_the_same_trace_gives_the_same_figures() -> None:
    trace = scaled(load_trace(str(SAMPLE), limit=40), 0.1)
    runs = [simulate(trace, CONFIG, one_us_a_token()) for _ in range(2)]
    assert np.array_equal(runs[0].records.first, runs[1].records.first)
    assert np.array_equal(runs[0].records.end, runs[1].records.end)
    assert gaps_us(runs[0]) == gaps_us(runs[1])


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    requests = [request(index, 0, 16, 2 + index % 3) for index in range(12)]
    run = simulate_closed_loop(requests, CONFIG, one_us_a_token(), concurrency=3)
    arrival, end = run.records.arrival, run.records.end
    assert run.records.ran.all()
    assert (arrival[:3] == 0).all()
    under_way = [np.count_nonzero((arrival <= at) & (end > at)) for at in arrival[3:]]
    assert set(under_way) == {3}


def test_capacity_is_what_all_requests_at_once_take() -> None:
    requests = [request(index, 10**6 * index, 2048, 1) for index in range(4)]
    # each has a step of its own of 999 + 2048 us, of which the first is 100 us late
    assert capacity_ns(requests, CONFIG, one_us_a_token()) == (100 + 4 * 3047) * US


# --------------------------------------------------------------------------------------------------------- policies


def order(requests: Sequence[TraceRequest], policy: SchedulingPolicy) -> list[int]:
    """Of their starts, on an engine that runs one at a time."""
    run = simulate(requests, CONFIG._replace(max_num_seqs=1, policy=policy), one_us_a_token())
    return np.argsort(run.records.first).tolist()  # type: ignore[no-any-return]


def test_each_policy_has_its_order() -> None:
    lengths = [500, 2000, 100, 1000]
    requests = [request(index, 0, prompt, 4, priority=index % 2) for index, prompt in enumerate(lengths)]
    assert order(requests, "fcfs") == [0, 1, 2, 3]
    assert order(requests, "priority") == [0, 2, 1, 3]
    assert order(requests, "shortest") == [2, 0, 3, 1]
    assert order(requests, "longest") == [1, 3, 0, 2]


def test_shortest_first_has_the_smaller_mean_ttft_of_a_mix() -> None:
    mix = [request(index, 0, 4000 if index % 2 == 0 else 50, 8) for index in range(40)]
    mean = {}
    policies: tuple[SchedulingPolicy, ...] = ("fcfs", "shortest", "longest")
    for policy in policies:
        run = simulate(mix, CONFIG._replace(policy=policy), one_us_a_token(prefill_pair_us=0.001))
        mean[policy] = float(run.records.ttft_ms.mean())
    assert mean["shortest"] < 0.7 * mean["fcfs"]
    assert mean["fcfs"] < mean["longest"]


def test_a_long_request_is_overtaken_no_more_often_than_ageing_allows() -> None:
    trace = [request(0, 0, 16, 4), request(1, 1, 4000, 1), *(request(2 + at, 2 + at, 16, 4) for at in range(60))]
    run = simulate(trace, CONFIG._replace(max_num_seqs=1, policy="shortest"), one_us_a_token())
    overtakes = np.count_nonzero(run.records.started[2:] < run.records.started[1])
    assert overtakes == MAX_OVERTAKES


# -------------------------------------------------------------------------------------------------------- edges


def test_time_between_two_requests_may_be_run_in_any_number_of_parts() -> None:
    trace = scaled(load_trace(str(SAMPLE), limit=40), 0.1)
    whole = simulate(trace, CONFIG, one_us_a_token())
    records = type(whole.records)(trace)
    replica = Replica(CONFIG, one_us_a_token(), records)
    for each in trace:
        while replica.busy and replica.now_ns < each.at_ns:
            replica.run_until(min(each.at_ns, replica.now_ns + 1))
        replica.submit(each, each.at_ns)
    while replica.busy:
        replica.turn()
    assert np.array_equal(records.end, whole.records.end)


def test_the_simulator_needs_no_torch() -> None:
    code = "import sys, simulate; print(sorted({'torch', 'aiohttp', 'matplotlib'} & set(sys.modules)))"
    scripts = Path(__file__).parents[2] / "scripts"
    done = subprocess.run([sys.executable, "-c", code], cwd=scripts, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

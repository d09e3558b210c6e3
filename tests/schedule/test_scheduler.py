"""Exact behaviour of the scheduler, seen through a device that keeps a real paged cache (`support.paged_model`)."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.config import SchedulingPolicy
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import MARK_RETRACTED, MARK_TOKEN, Open
from gpu_runner.schedule.buckets import bucket_for, token_buckets
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.prefill_marks import MAX_MARKS
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.schedule.step_output import StepOutput


def prompt_of(length: int, *, seed: int = 0, vocab_size: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int32)


def chunks_of(core: EngineCore) -> list[list[int]]:
    """Per plan, the prefill rows' chunk lengths."""
    return [plan.row_len[plan.num_decode_rows :].tolist() for plan in core.plans]


def test_one_request_prefills_once_then_decodes_one_token_a_step() -> None:
    core = EngineCore()
    core.add(1, prompt_of(10), 5, ignore_eos=True)
    core.run()
    assert [(plan.num_decode_rows, plan.num_tokens) for plan in core.plans] == [(0, 10)] + [(1, 1)] * 4
    assert core.outputs[1] == core.expected(1)
    assert core.finish[1] == Finish.LENGTH


def test_a_row_that_reaches_its_limit_is_in_no_further_step() -> None:
    core = EngineCore()
    core.add(1, prompt_of(4), 1, ignore_eos=True)
    core.run()
    assert len(core.plans) == 1


def test_a_row_that_stops_by_token_overshoots_by_exactly_one_step() -> None:
    core = EngineCore()
    core.add(1, prompt_of(4), 200, ignore_eos=True)
    core.run()
    stop = core.outputs[1][5]
    first = core.outputs[1].index(stop)
    again = EngineCore()
    again.add(1, prompt_of(4), 200, ignore_eos=True, stop_token_ids=(stop,))
    again.run()
    assert again.outputs[1] == core.outputs[1][: first + 1]
    assert again.finish[1] == Finish.STOP
    assert len(again.plans) == first + 2
    again.assert_nothing_held()


def test_the_next_step_is_planned_before_the_last_one_is_read() -> None:
    core = EngineCore()
    core.add(1, prompt_of(4), 10, ignore_eos=True)
    core.turn()
    assert len(core.in_flight) == 1
    core.turn()
    assert [plan.step for plan in core.in_flight] == [2], "step 2 was launched, then step 1 collected"
    assert core.outputs[1] == core.expected(1)[:1]


def test_a_long_prompt_is_cut_into_chunks_that_fill_the_budget_beside_decode_rows() -> None:
    core = EngineCore(num_pages=64, max_num_batched_tokens=32)
    core.add(1, prompt_of(5, seed=1), 30, ignore_eos=True)
    core.turn()
    core.add(2, prompt_of(100, seed=2), 3, ignore_eos=True)
    core.run()
    mixed = [plan for plan in core.plans if plan.num_decode_rows == 1 and plan.num_rows == 2]
    assert [int(plan.row_len[1]) for plan in mixed] == [31, 31, 31, 7]
    assert [plan.row_samples.tolist() for plan in mixed] == [[True, False]] * 3 + [[True, True]]
    core.assert_all_right()


def test_every_running_row_gets_its_token_each_step_while_others_prefill() -> None:
    core = EngineCore(max_num_batched_tokens=16, num_pages=64)
    core.add(1, prompt_of(5, seed=1), 40, ignore_eos=True)
    core.turn()
    for rid in range(2, 6):
        core.add(rid, prompt_of(60, seed=rid), 2, ignore_eos=True)
    for _ in range(30):
        core.turn()
        assert 0 in core.plans[-1].row_slot[: core.plans[-1].num_decode_rows]


def test_a_cut_chunk_makes_the_step_exactly_a_bucket_and_a_last_chunk_pads_to_the_next() -> None:
    core = EngineCore(max_num_batched_tokens=64, num_pages=64)
    core.add(1, prompt_of(150), 2, ignore_eos=True)
    core.run()
    sizes = [(plan.num_tokens, plan.bucket) for plan in core.plans[:3]]
    assert sizes == [(64, 64), (64, 64), (22, 24)]


@pytest.mark.parametrize("max_tokens", [16, 17, 100, 2048, 8192])
def test_buckets_ascend_end_at_the_budget_and_pad_at_most_a_quarter(max_tokens: int) -> None:
    buckets = token_buckets(max_tokens)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_tokens
    for tokens in range(1, max_tokens + 1):
        bucket = bucket_for(buckets, tokens)
        assert tokens <= bucket <= max(tokens * 1.26, tokens + 7)


def test_a_shared_prefix_is_computed_once_and_both_answers_are_right() -> None:
    core = EngineCore()
    prompt = prompt_of(50)
    core.add(1, prompt, 4, ignore_eos=True)
    core.run()
    core.add(2, np.concatenate([prompt, prompt_of(5, seed=9)]), 4, ignore_eos=True)
    core.run()
    assert core.scheduler.counters.prefix_hit_tokens == 48
    core.assert_all_right()


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    core = EngineCore()
    for rid in (1, 2):
        core.add(rid, prompt_of(48), 3, ignore_eos=True)
        core.run()
    assert core.scheduler.counters.prefix_hit_tokens == 32
    core.assert_all_right()


def test_equal_prompts_that_arrive_together_are_prefilled_once() -> None:
    core = EngineCore(max_num_batched_tokens=64)
    for rid in (1, 2, 3):
        core.add(rid, prompt_of(50), 4, ignore_eos=True)
    core.run()
    assert chunks_of(core)[0] == [50, 2, 2]
    core.assert_all_right()


def test_equal_long_prompts_that_arrive_together_are_prefilled_once_over_several_steps() -> None:
    core = EngineCore(max_num_batched_tokens=32, num_pages=64)
    for rid in (1, 2):
        core.add(rid, prompt_of(70), 4, ignore_eos=True)
    core.run()
    assert core.scheduler.counters.prefill_tokens == 70 + 6
    core.assert_all_right()


def test_n_choices_share_the_prompts_pages_with_prefix_caching_on_and_off() -> None:
    for caching in (True, False):
        core = EngineCore(enable_prefix_caching=caching)
        core.add(1, prompt_of(50), 4, n=4, ignore_eos=True)
        core.run()
        assert chunks_of(core)[0] == [50, 2, 2, 2]
        assert core.scheduler.counters.prefill_tokens == 56
        core.assert_all_right()
        core.assert_nothing_held()


def test_without_prefix_caching_nothing_is_shared_between_requests_or_kept() -> None:
    core = EngineCore(enable_prefix_caching=False)
    for rid in (1, 2):
        core.add(rid, prompt_of(50), 4, ignore_eos=True)
    core.run()
    assert core.scheduler.counters.prefix_hit_tokens == 0
    assert core.scheduler.gauges()["free_pages"] == core.scheduler.gauges()["total_pages"]


def test_a_prefix_of_one_namespace_is_never_served_to_another() -> None:
    core = EngineCore()
    for rid, namespace in ((1, "a"), (2, "b"), (3, "a")):
        core.scheduler.add(
            rid=rid,
            prompt=prompt_of(50),
            params=SamplingParams(max_tokens=2, ignore_eos=True),
            max_tokens=2,
            namespace=namespace,
        )
        core.run()
    assert core.scheduler.counters.prefix_hit_tokens == 48


def test_when_pages_run_out_the_newest_row_is_retracted_and_continues_exactly() -> None:
    core = EngineCore(num_pages=9, max_model_len=128, max_num_seqs=4)
    for rid in (1, 2, 3):
        core.add(rid, prompt_of(20, seed=rid), 60, ignore_eos=True)
    core.run()
    assert core.scheduler.counters.preemptions > 0
    assert core.finish_order[0] == 1, "the oldest is never retracted"
    core.assert_all_right()
    core.assert_nothing_held()


def test_rows_that_together_need_far_more_than_the_pool_all_finish_with_few_retractions() -> None:
    core = EngineCore(num_pages=49, max_model_len=600, max_num_seqs=4, max_num_batched_tokens=64)
    for rid in range(1, 5):
        core.add(rid, prompt_of(10, seed=rid), 512, ignore_eos=True)
    core.run()
    core.assert_all_right()
    assert core.scheduler.counters.preemptions <= 4 * 8


def test_a_resumed_row_finds_its_pages_in_the_prefix_cache() -> None:
    core = EngineCore(num_pages=9, max_model_len=128, max_num_seqs=4)
    for rid in (1, 2):
        core.add(rid, prompt_of(40, seed=rid), 40, ignore_eos=True)
    core.run()
    counters = core.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prefill_tokens < 80 + counters.preemptions * 80
    core.assert_all_right()


@pytest.mark.parametrize("output", [15, 16, 17, 49])
def test_what_rows_decoded_over_many_steps_is_cached_for_a_prompt_that_repeats_it(output: int) -> None:
    core = EngineCore()
    for rid in (1, 2):
        core.add(rid, prompt_of(20, seed=rid), output, ignore_eos=True)
    core.run()
    before = core.scheduler.gauges()["prefix_hit_tokens"]
    core.add(3, [*core.prompts[2], *core.outputs[2], 7], 20, ignore_eos=True)
    core.run()
    assert core.scheduler.gauges()["prefix_hit_tokens"] - before == (20 + output - 1) // 16 * 16
    core.assert_all_right()


def test_a_retracted_row_can_be_aborted_and_holds_nothing() -> None:
    core = EngineCore(num_pages=9, max_model_len=128, max_num_seqs=4)
    for rid in (1, 2, 3):
        core.add(rid, prompt_of(20, seed=rid), 60, ignore_eos=True)
    while not core.scheduler.counters.preemptions:
        core.turn()
    for rid in (1, 2, 3):
        core.abort(rid)
    core.run()
    core.assert_nothing_held()
    assert set(core.finish.values()) == {Finish.ABORT}


def test_aborting_a_waiting_request_computes_nothing_for_it() -> None:
    core = EngineCore(max_num_seqs=1)
    core.add(1, prompt_of(10, seed=1), 20, ignore_eos=True)
    core.turn()
    for rid in range(2, 30):
        core.add(rid, prompt_of(30, seed=rid), 5)
    for rid in range(2, 30):
        core.abort(rid)
    core.run()
    assert core.scheduler.counters.prefill_tokens == 10
    core.assert_nothing_held()


def test_aborting_an_unknown_request_does_nothing() -> None:
    core = EngineCore()
    core.abort(77)
    assert core.scheduler.counters.aborted == 0


def test_a_stop_for_an_older_generation_of_the_slot_is_ignored() -> None:
    core = EngineCore(max_num_seqs=1)
    core.add(1, prompt_of(4, seed=1), 2, ignore_eos=True)
    core.run()
    (slot, gen), _ = next(iter(core.row_of.items()))
    core.add(2, prompt_of(4, seed=2), 6, ignore_eos=True)
    core.turn()
    core.stop(slot, gen)
    core.run()
    assert core.finish[2] == Finish.LENGTH
    core.assert_all_right()


def test_a_stop_hit_ends_the_row_and_frees_its_pages() -> None:
    core = EngineCore()
    core.add(1, prompt_of(4), 200, ignore_eos=True)
    while not core.outputs.get(1):
        core.turn()
    core.stop(*next(iter(core.row_of)))
    core.run()
    assert len(core.outputs[1]) < 4
    core.assert_nothing_held()


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [1, 2, 3, 4]), ("shortest", [1, 3, 2, 4]), ("longest", [1, 4, 2, 3]), ("priority", [1, 4, 3, 2])],
)
def test_policies_order_what_waits(policy: SchedulingPolicy, order: list[int]) -> None:
    core = EngineCore(max_num_seqs=1, policy=policy, max_num_batched_tokens=64)
    core.add(1, prompt_of(4, seed=1), 5, ignore_eos=True, priority=-9)
    core.turn()
    for rid, length, priority in ((2, 20, 5), (3, 10, 5), (4, 30, -1)):
        core.add(rid, prompt_of(length, seed=rid), 2, ignore_eos=True, priority=priority - (rid == 3))
    core.run()
    assert core.finish_order == order


def test_an_important_request_takes_the_place_of_a_lesser_one_which_resumes_exactly() -> None:
    core = EngineCore(num_pages=9, max_model_len=128, max_num_seqs=4, policy="priority")
    core.add(1, prompt_of(60, seed=1), 50, ignore_eos=True)
    for _ in range(20):
        core.turn()
    core.add(2, prompt_of(90, seed=2), 10, ignore_eos=True, priority=-100)
    core.run()
    assert core.finish_order == [2, 1]
    core.assert_all_right()
    core.assert_nothing_held()


def test_an_important_request_takes_a_row_when_all_rows_are_taken() -> None:
    core = EngineCore(max_num_seqs=1, policy="priority")
    core.add(1, prompt_of(10, seed=1), 50, ignore_eos=True)
    for _ in range(5):
        core.turn()
    core.add(2, prompt_of(10, seed=2), 3, ignore_eos=True, priority=-1)
    core.run()
    assert core.finish_order == [2, 1]
    core.assert_all_right()


def test_what_can_never_fit_is_refused_with_both_numbers_and_harms_nobody() -> None:
    core = EngineCore(num_pages=8, max_model_len=256)
    with pytest.raises(InvalidRequestError, match=r"113 tokens.*holds 112") as refused:
        core.add(1, prompt_of(113), 1)
    assert refused.value.code == "kv_cache_exceeded"
    with pytest.raises(InvalidRequestError, match="256") as refused:
        core.add(1, prompt_of(256), 1)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError, match=r"200 tokens.*57.*256") as refused:
        core.add(1, prompt_of(200), 57)
    assert refused.value.code == "context_length_exceeded"
    core.add(2, prompt_of(112), 1, ignore_eos=True)
    core.run()
    core.assert_all_right()


def test_unlimited_output_is_cut_to_what_context_and_cache_hold() -> None:
    for num_pages, limit in ((8, 113), (64, 256)):
        scheduler = Scheduler(num_pages=num_pages, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
        scheduler.add(rid=1, prompt=prompt_of(10), params=SamplingParams(), max_tokens=246)
        request = scheduler.queue.head()
        assert request is not None
        assert request.limit == limit


def test_choices_get_consecutive_seeds_that_wrap_in_64_bits() -> None:
    scheduler = Scheduler(num_pages=8, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    params = SamplingParams(n=2, seed=2**63 - 1, max_tokens=2)
    scheduler.add(rid=1, prompt=prompt_of(4), params=params, max_tokens=2)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.start.seed.tolist() == [2**63 - 1, -(2**63)]


def test_stop_ids_join_the_requests_own_and_the_models_unless_eos_is_ignored() -> None:
    scheduler = Scheduler(
        num_pages=8, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, eos_ids=(2, 7), policy="fcfs"
    )
    for rid, ignore in ((1, False), (2, True)):
        params = SamplingParams(max_tokens=2, stop_token_ids=(5, 7), ignore_eos=ignore)
        scheduler.add(rid=rid, prompt=prompt_of(4, seed=rid), params=params, max_tokens=2)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.start.stop_ids[0, :4].tolist() == [5, 7, 2, -1]
    assert plan.start.stop_ids[1, :3].tolist() == [5, 7, -1]


def test_plans_are_self_contained_copies() -> None:
    core = EngineCore()
    core.add(1, prompt_of(20), 20, ignore_eos=True)
    core.turn()
    plan = core.plans[0]
    before = {name: np.array(getattr(plan, name)) for name in ("row_slot", "row_gen", "row_start", "prefill_tokens")}
    core.run()
    for name, value in before.items():
        assert np.array_equal(getattr(plan, name), value)


def test_requests_are_stamped_when_they_come_when_they_start_and_at_their_first_token() -> None:
    core = EngineCore(max_num_seqs=1, clock=count(1).__next__)
    opens: list[Open] = []
    commit = core.scheduler.commit

    def recording(plan: StepPlan, result: StepResult) -> StepOutput:
        output = commit(plan, result)
        opens.extend(output.opens)
        return output

    core.scheduler.commit = recording  # type: ignore[method-assign]
    core.add(1, prompt_of(4), 2, n=2, ignore_eos=True)
    core.run()
    assert [(row.rid, row.queued_ns, row.started_ns, row.first_token_ns) for row in opens] == [
        (1, 1, 2, 4),
        (2, 1, 5, 7),
    ]


def test_a_retracted_request_keeps_the_time_at_which_it_started() -> None:
    core = EngineCore(num_pages=8)
    for rid in (1, 2, 3):
        core.add(rid, prompt_of(17, seed=rid), 60, ignore_eos=True)
    core.turn()
    started = {request.rid: request.started_ns for request in core.scheduler.slots.request if request is not None}
    while not core.scheduler.counters.preemptions:
        core.turn()
    retracted = [request for request in core.scheduler.queue if request.preemptions]
    assert retracted
    assert all(request.started_ns == started[request.rid] > 0 for request in retracted)
    core.run()
    core.assert_all_right()


def told_of(core: EngineCore) -> dict[int, list[tuple[int, int]]]:
    """Runs to the end; the marks of each request."""
    told: dict[int, list[tuple[int, int]]] = {}
    commit = core.scheduler.commit

    def recording(plan: StepPlan, result: StepResult) -> StepOutput:
        output = commit(plan, result)
        owner = {slot: core.row_of[slot, gen] for slot, gen in core.row_of if core.scheduler.slots.gen[slot] == gen}
        owner.update({row.slot: row.rid for row in output.opens})
        for row in output.marks:
            assert row.slot in output.slots[output.tokens >= 0]
            pairs = np.frombuffer(row.marks, np.int64).reshape(-1, 2)
            told.setdefault(owner[row.slot], []).extend((at, mark) for at, mark in pairs.tolist())
        return output

    core.scheduler.commit = recording  # type: ignore[method-assign]
    core.run()
    core.assert_all_right()
    return told


def test_each_chunk_of_a_prompt_is_told_with_the_first_token() -> None:
    core = EngineCore(max_num_batched_tokens=16, clock=count(1).__next__)
    core.add(1, prompt_of(40), 3, ignore_eos=True)
    assert told_of(core) == {1: [(3, 16), (4, 16), (5, 8), (6, MARK_TOKEN)]}


def test_a_prompt_of_very_many_chunks_has_a_bounded_number_of_marks() -> None:
    core = EngineCore(num_pages=32, max_num_batched_tokens=1)
    core.add(1, prompt_of(MAX_MARKS + 20), 2, ignore_eos=True)
    (marks,) = told_of(core).values()
    assert [mark for _, mark in marks] == [1] * (MAX_MARKS - 1) + [21, MARK_TOKEN]


def test_what_a_preempted_request_loses_and_computes_again_is_told_with_its_next_token() -> None:
    core = EngineCore(num_pages=8, clock=count(1).__next__)
    for rid in (1, 2, 3):
        core.add(rid, prompt_of(17, seed=rid), 60, ignore_eos=True)
    told = told_of(core)
    assert core.scheduler.counters.preemptions > 0
    assert sum(mark == MARK_RETRACTED for marks in told.values() for _, mark in marks) == (
        core.scheduler.counters.preemptions
    )
    for marks in told.values():
        assert [at for at, _ in marks] == sorted(at for at, _ in marks)
        kinds = [mark for _, mark in marks]
        assert kinds[:2] == [17, MARK_TOKEN]
        assert kinds[-1] == MARK_TOKEN
        lost = [place for place, mark in enumerate(kinds) if mark == MARK_RETRACTED]
        assert all(max(kinds[place + 1 : place + 3]) > 0 for place in lost)  # a token may have been on its way
    assert not core.scheduler._results._marks._marks


def test_the_prefix_cache_is_asked_for_every_token_of_a_request_that_starts() -> None:
    core = EngineCore()
    for rid in (1, 2):
        core.add(rid, prompt_of(48), 3, ignore_eos=True)
        core.run()
    gauges = core.scheduler.gauges()
    assert (gauges["prefix_query_tokens"], gauges["prefix_hit_tokens"]) == (96, 32)


def test_requests_that_lack_pages_are_told_from_those_that_lack_a_row() -> None:
    short_of_rows = EngineCore(max_num_seqs=1)
    for rid in (1, 2, 3):
        short_of_rows.add(rid, prompt_of(20, seed=rid), 5, ignore_eos=True)
    short_of_rows.turn()
    gauges = short_of_rows.scheduler.gauges()
    assert (gauges["waiting"], gauges["waiting_for_pages"]) == (2, 0)
    short_of_pages = EngineCore(num_pages=6)
    for rid in (1, 2, 3):
        short_of_pages.add(rid, prompt_of(40, seed=rid), 5, ignore_eos=True)
    short_of_pages.turn()
    gauges = short_of_pages.scheduler.gauges()
    assert gauges["waiting"] == gauges["waiting_for_pages"] == 2
    short_of_pages.run()
    assert short_of_pages.scheduler.gauges()["waiting_for_pages"] == 0


def test_with_every_slot_held_by_the_retracted_a_more_important_request_waits_for_a_row_to_end() -> None:
    core = EngineCore(max_num_seqs=1, policy="priority")
    for rid, priority in ((1, 2), (2, 1), (3, 0)):
        core.add(rid, prompt_of(10, seed=rid), 30, priority=priority, ignore_eos=True)
        for _ in range(4):
            core.turn()
    core.run()
    assert core.finish_order == [2, 3, 1]
    core.assert_all_right()
    core.assert_nothing_held()

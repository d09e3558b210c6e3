"""How long the scheduler makes a step with chunks of prompts while other rows decode in it."""

from __future__ import annotations

import numpy as np
import pytest

from asyncengine.config import ServiceClass
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.terms import Terms
from gpu_runner.schedule.buckets import bucket_for, token_buckets
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.schedule.step_room import LEAST_SHARE, LEAST_TOKENS
from gpu_runner.schedule.step_time import StepTime, attended_pairs

MS = 10**6
GAPS: dict[ServiceClass, int] = {"interactive": 50 * MS, "background": 200 * MS}
BUDGET = 1024


def teach(times: StepTime, *, token_ns: int = 100_000, base_ns: int = 4 * MS, pair_ns: float = 10.0) -> None:
    """What a step costs: 4 ms, 0.1 ms for each token, and 10 ns for each pair of tokens."""
    for bucket in (8, BUDGET):
        for position in (0, 1000, 2000, 4000):
            pairs = attended_pairs(position, bucket)
            for _ in range(4):
                times.learn(base_ns + token_ns * bucket + pair_ns * pairs, bucket, 0, pairs)
    for bucket in (1, 8, 32):
        times.learn(base_ns + token_ns * bucket, bucket, 100, 0)
    times.error = 0.0  # as after many more


class Steps:
    """A scheduler whose device has no clock, so that it knows what it was taught."""

    def __init__(self, *, taught: bool = True, limited: bool = True, **costs: float) -> None:
        self.scheduler = Scheduler(
            num_pages=2000,
            max_model_len=20_000,
            max_num_seqs=64,
            max_num_batched_tokens=BUDGET,
            gap_ns=GAPS if limited else None,
        )
        if taught:
            teach(self.scheduler.step_time, **costs)  # type: ignore[arg-type]
        self.rids = 0

    def add(self, length: int, *, of: ServiceClass = "interactive", structured: Structured | None = None) -> None:
        self.rids += 1
        prompt = np.random.default_rng(self.rids).integers(0, 50, length, dtype=np.int32)
        params = SamplingParams(max_tokens=1000, ignore_eos=structured is None, structured=structured)
        terms = Terms(service_class=of)
        self.scheduler.add(rid=self.rids, prompt=prompt, params=params, max_tokens=1000, terms=terms)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        tokens = np.where(plan.row_samples, np.int32(7), np.int32(-1))
        self.scheduler.commit(plan, StepResult(plan.step, tokens, np.zeros(plan.num_rows, np.uint8)))
        self.scheduler.check_integrity()
        return plan

    def decoding(self, rows: int, *, of: ServiceClass = "interactive") -> Steps:
        for _ in range(rows):
            self.add(4, of=of)
        self.step()
        return self

    def cost_ms(self, plan: StepPlan) -> float:
        chunks = zip(plan.row_start[plan.num_decode_rows :], plan.row_len[plan.num_decode_rows :], strict=True)
        pairs = sum(attended_pairs(int(start), int(length)) for start, length in chunks)
        return 4 + 0.1 * plan.bucket + pairs / MS * 10


def chunks(plan: StepPlan) -> list[int]:
    return plan.row_len[plan.num_decode_rows :].tolist()


def test_a_chunk_makes_the_step_the_largest_bucket_that_is_in_time() -> None:
    steps = Steps().decoding(8)
    steps.add(4000)
    plan = steps.step()
    # 4 + 44.8 ms and 0.97 of pairs; 512 tokens would take 56
    assert (plan.bucket, plan.num_tokens, chunks(plan)) == (448, 448, [440])
    assert 49 < steps.cost_ms(plan) < 50


def test_chunks_get_shorter_the_further_they_are_in_the_prompt() -> None:
    steps = Steps().decoding(8)
    steps.add(12_000)
    plans = [steps.step() for _ in range(40)]
    lengths = [chunks(plan)[0] for plan in plans if chunks(plan)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 2
    assert all(plan.bucket == plan.num_tokens for plan in plans[:-5])
    assert max(map(steps.cost_ms, plans)) < 50.5


def test_a_step_in_which_nothing_decodes_is_as_long_as_may_be() -> None:
    steps = Steps()
    steps.add(4000)
    assert chunks(steps.step()) == [BUDGET]


def test_without_a_target_and_without_a_measured_step_there_is_no_limit() -> None:
    for steps in (Steps(limited=False), Steps(taught=False)):
        steps.decoding(8).add(4000)
        assert chunks(steps.step()) == [BUDGET - 8]


def test_the_target_is_that_of_the_classes_that_decode() -> None:
    steps = Steps().decoding(8, of="background")
    steps.add(4000)
    assert chunks(steps.step()) == [BUDGET - 8], "107 ms are well within 200"
    steps = Steps().decoding(7, of="background").decoding(1)
    steps.add(4000)
    assert chunks(steps.step()) == [440]


def test_a_row_that_waits_for_its_mask_is_a_stream_like_others() -> None:
    steps = Steps()
    steps.add(4, structured=Structured("choice", '["a", "b"]'))
    steps.step()
    work = steps.scheduler.masked_rows.take_work()
    assert work is not None
    row = work.opened[0]
    steps.scheduler.masked_rows.ready(np.array([row.slot], np.int32), np.array([row.gen], np.int32))
    steps.step()
    assert steps.scheduler.masked_rows.num_held == 1
    steps.add(4000)
    plan = steps.step()
    assert (plan.num_decode_rows, chunks(plan)) == (0, [448])


def test_short_prompts_share_a_step_and_the_one_that_is_cut_fills_it() -> None:
    steps = Steps().decoding(8)
    for _ in range(6):
        steps.add(100)
    plan = steps.step()
    assert (plan.bucket, chunks(plan)) == (448, [100, 100, 100, 100, 40])
    assert chunks(steps.step()) == [60, 100], "nothing was lost, and the rest comes in order"


def test_a_device_whose_steps_are_slow_by_themselves_prefills_all_the_same() -> None:
    steps = Steps(base_ns=90 * MS).decoding(8)
    steps.add(4000)
    plan = steps.step()
    # decoding alone takes 90.8 ms, 40.8 more than the target: a step may take half as much again as their sum, 197
    assert (plan.bucket, chunks(plan)) == (896, [888])


def test_a_device_that_could_just_keep_the_target_by_decoding_alone_leaves_a_third_of_a_step_to_prefill() -> None:
    steps = Steps(base_ns=40 * MS).decoding(8)
    steps.add(4000)
    plan = steps.step()
    # 40.8 ms alone, so that a step may take 61.2; 224 tokens would take 62.6
    assert (plan.bucket, chunks(plan)) == (192, [184])


def test_where_not_even_a_few_tokens_are_in_time_a_step_has_them_all_the_same() -> None:
    least = max(LEAST_TOKENS, BUDGET // LEAST_SHARE)
    for token_ms in (60, 14):  # of which not one is in time, or three
        steps = Steps(token_ns=token_ms * MS, base_ns=0).decoding(1)
        steps.add(4000)
        assert chunks(steps.step()) == [bucket_for(token_buckets(BUDGET), 1 + least) - 1]


@pytest.mark.parametrize("rows", [1, 31, 32, 60])
def test_a_prompt_comes_to_its_end_beside_any_number_of_rows(rows: int) -> None:
    steps = Steps().decoding(rows)
    steps.add(3000)
    for _ in range(60):
        plan = steps.step()
        assert plan.num_decode_rows >= rows
        if plan.num_decode_rows == rows + 1:
            return
    raise AssertionError("it never did")

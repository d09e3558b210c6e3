"""When few prompt tokens beside many decoding rows wait for others, and how many of them a step takes."""

from __future__ import annotations

import numpy as np
import pytest

from asyncengine.sampling import SamplingParams
from gpu_runner.schedule.buckets import bucket_for, token_buckets
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.prompt_batches import HOLD_NS, LEAST_CUT, MANY_ROWS, PromptBatches
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.schedule.step_time import StepTime

US, MS = 1_000, 1_000_000
BUDGET = 2048
BUCKETS = token_buckets(BUDGET)
ROWS = 100  # in a step of 112 tokens


class Clock:
    ns = 1

    def __call__(self) -> int:
        return self.ns


def teach(times: StepTime, *, token_us: float, prompts_us: float, step_us: float = 2000.0) -> None:
    """A step takes 2 ms, so much for each token, padding included, and `prompts_us` more if it has prompts."""
    for bucket in BUCKETS:
        took = US * (step_us + token_us * bucket)
        times.learn(took, bucket, 0, 0)
        times.learn(took + US * prompts_us, bucket, 0, 1)


class Batches:
    """prompts cost a step 1 ms and a token 2 us, unless said otherwise, and the largest step has 1948 of them: those
    cost (1000 + 2 x (2048 - 112)) / 1948 = 2.50 us each, and a step with tokens up to 3.13 us is not waited with."""

    def __init__(self, *, token_us: float = 2.0, prompts_us: float = 1000.0, max_num_seqs: int = 256) -> None:
        self.clock = Clock()
        times = StepTime(BUCKETS)
        teach(times, token_us=token_us, prompts_us=prompts_us)
        self.batches = PromptBatches(times, BUCKETS, max_num_seqs=max_num_seqs, clock=self.clock)

    def room(self, prompts: int, *, rows: int = ROWS) -> int:
        return self.batches.room(BUDGET - rows, rows=rows, prompts=prompts)


def test_few_tokens_beside_many_rows_wait_for_others() -> None:
    batches = Batches()
    assert batches.room(150) == 0  # 256 tokens: (1000 + 2 x 144) / 150 = 8.6 us each
    assert batches.room(780) == 0  # 896: (1000 + 2 x 784) / 780 = 3.29 us
    assert batches.room(924) == BUDGET - ROWS  # 1024: (1000 + 2 x 912) / 924 = 3.06 us


def test_prompts_wait_no_longer_than_they_may() -> None:
    batches = Batches()
    for batches.clock.ns in (1, HOLD_NS):
        assert batches.room(150) == 0
    batches.clock.ns = HOLD_NS + 1
    assert batches.room(150) == BUDGET - ROWS
    assert batches.room(150) == 0, "those that come then may wait as long"


def test_a_prompt_that_comes_while_others_wait_starts_with_them() -> None:
    batches = Batches()
    assert batches.room(150) == 0
    batches.clock.ns += HOLD_NS - 1
    assert batches.room(300) == 0
    batches.clock.ns += 1
    assert batches.room(300) == BUDGET - ROWS


@pytest.mark.parametrize(("rows", "max_num_seqs"), [(1, 8), (MANY_ROWS - 1, 256), (127, 512)])
def test_beside_few_rows_prompts_start_at_once(rows: int, max_num_seqs: int) -> None:
    assert Batches(max_num_seqs=max_num_seqs).room(1, rows=rows) == BUDGET - rows


def test_where_a_step_is_not_dearer_for_having_prompts_they_start_at_once() -> None:
    batches = Batches(token_us=0.0, prompts_us=0.0)
    assert batches.room(1) == BUDGET - ROWS
    batches = Batches(prompts_us=0.0)
    assert batches.room(156) == BUDGET - ROWS  # nothing but their tokens, and those fill a bucket


def test_before_times_are_known_prompts_start_at_once() -> None:
    batches = PromptBatches(StepTime(BUCKETS), BUCKETS, max_num_seqs=256, clock=Clock())
    assert batches.room(BUDGET - ROWS, rows=ROWS, prompts=1) == BUDGET - ROWS


def test_prompts_are_cut_to_a_full_bucket_where_that_makes_a_token_cheaper() -> None:
    batches = Batches(token_us=20.0, prompts_us=500.0)
    assert batches.room(256 - ROWS + 5) == 256 - ROWS  # 5 more would pay for 64
    assert batches.room(256 - ROWS + 60) == BUDGET - ROWS


def test_prompts_that_have_waited_are_not_cut() -> None:
    batches = Batches(token_us=20.0, prompts_us=5000.0)
    tokens = 256 - ROWS + 5
    assert batches.room(tokens) == 0
    batches.clock.ns += HOLD_NS
    assert batches.room(tokens) == BUDGET - ROWS


def test_more_tokens_than_a_step_has_room_for_start_at_once() -> None:
    assert Batches().room(100_000) == BUDGET - ROWS
    assert Batches().batches.room(0, rows=BUDGET, prompts=100) == 0, "no room is none"


@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_device_is_like_nothing_waits_too_long_and_cuts_are_buckets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, clock = StepTime(BUCKETS), Clock()
    batches = PromptBatches(times, BUCKETS, max_num_seqs=256, clock=clock)
    since = 0
    for _ in range(2000):
        if rng.random() < 0.2:
            took, bucket = float(rng.integers(1, 20 * MS)), int(rng.choice(BUCKETS))
            times.learn(took, bucket, 100, int(rng.integers(2)) * 1000)
        clock.ns += int(rng.integers(5 * MS))
        rows, prompts = int(rng.integers(MANY_ROWS, 300)), int(rng.integers(1, 1500))
        room = batches.room(BUDGET - rows, rows=rows, prompts=prompts)
        if room == 0:
            since = since or clock.ns
            assert clock.ns - since < HOLD_NS
            continue
        since = 0
        assert room == BUDGET - rows or (
            LEAST_CUT <= room < prompts and bucket_for(BUCKETS, rows + room) == rows + room
        )


class Steps:
    """A scheduler whose device has no clock, so that it knows what it was taught; a step takes 4 ms on the clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(
            num_pages=10_000, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=BUDGET, clock=self.clock
        )
        teach(self.scheduler.step_time, token_us=2.0, prompts_us=1000.0)
        self.rids = 0

    def add(self, length: int) -> int:
        self.rids += 1
        prompt = np.random.default_rng(self.rids).integers(0, 50, length, dtype=np.int32)
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        self.scheduler.add(rid=self.rids, prompt=prompt, params=params, max_tokens=1000)
        return self.rids

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.clock.ns += 4 * MS
        tokens = np.where(plan.row_samples, np.int32(7), np.int32(-1))
        self.scheduler.commit(plan, StepResult(plan.step, tokens, np.zeros(plan.num_rows, np.uint8)))
        self.scheduler.check_integrity()
        return plan


def lengths(plan: StepPlan) -> list[int]:
    return plan.row_len[plan.num_decode_rows :].tolist()


def test_prompts_that_come_one_by_one_beside_many_rows_start_together() -> None:
    steps = Steps()
    for _ in range(ROWS):
        steps.add(4)
    assert sum(lengths(steps.step())) == 4 * ROWS
    seen = []
    for _ in range(6):
        steps.add(50)
        seen.append(lengths(steps.step()))
    assert seen == [[], [], [], [], [], [50] * 6]


def test_the_rest_of_a_prompt_that_was_cut_waits_no_longer_than_others() -> None:
    steps = Steps()
    for _ in range(ROWS):
        steps.add(4)
    steps.step()
    steps.add(BUDGET)
    assert lengths(steps.step()) == [BUDGET - ROWS]
    assert [lengths(steps.step()) for _ in range(6)] == [[], [], [], [], [], [ROWS]]


def test_an_aborted_prompt_is_waited_with_no_more() -> None:
    steps = Steps()
    for _ in range(ROWS):
        steps.add(4)
    steps.step()
    rid = steps.add(50)
    assert lengths(steps.step()) == []
    steps.scheduler.abort(rid)
    for _ in range(8):
        assert lengths(steps.step()) == []
    assert steps.scheduler.num_running == ROWS

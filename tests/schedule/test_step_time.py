"""What the scheduler learns of its steps' times: how soon, how exactly, and from what it does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_runner.schedule.buckets import token_buckets
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.plan_builder import PlanBuilder, PlanDraft
from gpu_runner.schedule.running import DecodeRows
from gpu_runner.schedule.slots import Slots
from gpu_runner.schedule.step_time import DECODE_SAMPLE, StepTime, attended_pairs

BUCKETS = token_buckets(2048)
MS = 1e6
Device = Callable[[int, int, int], float]


def device(bucket: int, context: int, pairs: int) -> float:
    """An 8B model on an H200: ns. Not linear in the tokens: the first 256 are cheaper than later ones."""
    return 1e3 * (4000 + 10 * min(bucket, 256) + 21.5 * max(bucket - 256, 0) + 0.031 * context + 0.0014 * pairs)


def decode(times: StepTime, steps: int, *, context: int = 32_000, on: Device = device) -> None:
    """32 rows that grow."""
    for step in range(steps):
        times.learn(on(32, context + 32 * step, 0), 32, context + 32 * step, 0)


def prefill(times: StepTime, tokens: int, *, bucket: int, on: Device = device) -> None:
    """A prompt in chunks that fill steps of `bucket` beside 32 rows."""
    chunk = bucket - 32
    for position in range(0, tokens, chunk):
        pairs = attended_pairs(position, chunk)
        times.learn(on(bucket, 32_000, pairs), bucket, 32_000, pairs)


def learned() -> StepTime:
    times = StepTime(BUCKETS)
    decode(times, 20)
    for bucket in (512, 1024, 2048):
        prefill(times, 12_000, bucket=bucket)
    return times


def off_by(times: StepTime, bucket: int, context: int, pairs: int, on: Device = device) -> float:
    return abs(times.step_ns(bucket, context, pairs) / on(bucket, context, pairs) - 1)


@pytest.mark.parametrize("bucket", [512, 640, 1024, 1536, 2048])
@pytest.mark.parametrize("position", [0, 8_000, 60_000])
def test_after_some_tens_of_steps_it_is_right_within_a_tenth_where_it_has_not_been(bucket: int, position: int) -> None:
    assert off_by(learned(), bucket, 40_000, attended_pairs(position, bucket - 32)) < 0.1


def test_steps_that_only_decode_are_known_by_their_context() -> None:
    times = learned()
    assert off_by(times, 32, 32_000, 0) < 0.01
    decode(times, 20, context=128_000)
    assert off_by(times, 32, 320_000, 0) < 0.1


def test_noise_of_five_percent_leaves_it_right_within_a_tenth() -> None:
    rng = np.random.default_rng(1)

    def noisy(bucket: int, context: int, pairs: int) -> float:
        return device(bucket, context, pairs) * float(1 + 0.05 * rng.standard_normal())

    times = StepTime(BUCKETS)
    decode(times, 40, on=noisy)
    for bucket in (512, 1024, 2048):
        prefill(times, 20_000, bucket=bucket, on=noisy)
    for bucket in (640, 1024, 2048):
        assert off_by(times, bucket, 32_000, attended_pairs(20_000, bucket - 32)) < 0.1
    assert 0.02 < times.error < 0.15


def test_before_it_has_seen_a_step_it_knows_nothing() -> None:
    assert StepTime(BUCKETS).step_ns(2048, 1000, 1000) == 0
    assert StepTime(BUCKETS).prefill_ns(5000, 0) == 0


def test_steps_larger_than_any_seen_are_believed_to_grow_with_their_tokens() -> None:
    times = StepTime(BUCKETS)
    decode(times, 20)
    base = times.step_ns(32, 0, 0)
    assert times.step_ns(320, 0, 1) == pytest.approx(10 * base)
    assert times.step_ns(16, 0, 0) == pytest.approx(base)


def test_decoding_is_not_taken_to_need_a_full_step_where_all_steps_were_full() -> None:
    times = StepTime(BUCKETS)
    times.learn(50 * MS, 2048, 0, 1000)
    assert times.step_ns(128, 0, 0) == 50 * MS
    assert times.decode_ns(128, 0) == 50 * MS / 16
    assert times.decode_ns(2048, 0) == 50 * MS


def test_one_step_that_took_ten_times_as_long_changes_nothing() -> None:
    times = learned()
    before = [times.step_ns(bucket, 32_000, 10**7) for bucket in BUCKETS]
    times.learn(10 * device(1024, 32_000, 10**7), 1024, 32_000, 10**7)
    times.learn(10 * device(32, 32_000, 0), 32, 32_000, 0)
    assert [times.step_ns(bucket, 32_000, 10**7) for bucket in BUCKETS] == before


@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_a_device_that_changes_its_speed_is_known_again_after_a_few_steps(factor: float) -> None:
    def changed(bucket: int, context: int, pairs: int) -> float:
        return factor * device(bucket, context, pairs)

    times = learned()
    prefill(times, 5_000, bucket=1024, on=changed)
    for bucket in (640, 1024, 2048):
        assert off_by(times, bucket, 32_000, attended_pairs(20_000, bucket - 32), changed) < 0.1
    assert off_by(times, 32, 32_000, 0, changed) < 0.1


def test_decoding_for_hours_does_not_make_it_forget_prefill() -> None:
    times = learned()
    before = times.step_ns(1024, 32_000, 10**7)
    decode(times, 2000)
    assert times.step_ns(1024, 32_000, 10**7) == pytest.approx(before, rel=0.01)


def test_times_never_fall_with_more_to_attend_to_whatever_was_measured() -> None:
    rng = np.random.default_rng(0)
    times = StepTime(BUCKETS)
    for _ in range(500):
        bucket, context = int(rng.choice(BUCKETS)), int(rng.integers(1, 10**6))
        pairs = int(rng.integers(1, 10**8)) * int(rng.integers(0, 2))
        times.learn(float(rng.lognormal(17, 2)), bucket, context, pairs)
        at = times.step_ns(bucket, context, pairs)
        assert 0 <= at <= times.step_ns(bucket, 2 * context, pairs)
        assert at <= times.step_ns(bucket, context, 2 * pairs)
        assert np.isfinite(at)


def test_a_step_without_context_teaches_nothing_of_what_context_takes() -> None:
    times = StepTime(BUCKETS)
    times.learn(1_000_000, 256, 1_000, 30_000)
    times.learn(1_000_000, 256, 0, 30_000)
    assert [times.step_ns(256, context, 30_000) for context in (0, 50_000)] == [1_000_000, 1_000_000]
    assert times.error == 0.0


def test_a_prompt_takes_its_full_steps_and_one_with_the_rest() -> None:
    times = learned()
    expected = (
        2 * times.step_ns(2048, 0, 1)
        + times.step_ns(1024, 0, 1)
        + times.step_ns(2048, 0, attended_pairs(500, 5000))
        - times.step_ns(2048, 0, 0)
    )
    assert times.prefill_ns(5000, 500) == pytest.approx(expected, rel=0.1)
    whole = sum(
        device(2048, 0, attended_pairs(position, 2048)) if position < 63_488 else 0
        for position in range(0, 63_488, 2048)
    )
    assert times.prefill_ns(63_488, 0) == pytest.approx(whole, rel=0.1)


# ----------------------------------------------------------------------------------------------- what a step took


def plan_of(step: int, *, chunk: int = 0) -> StepPlan:
    """One row that decodes behind 99 tokens, or one that prefills."""
    slots = Slots(2, 256)
    slots.computed[:] = 99
    draft = PlanDraft(rows := DecodeRows(slots, np.array([0] if not chunk else [], np.int32)), rows.start)
    if chunk:
        slots.known[1] = slots.computed[1] = chunk
        draft.prefill.append((1, chunk))
    return PlanBuilder(slots, buckets=BUCKETS, eos_ids=()).build(draft, step)


def result_of(step: int, begin: float, end: float) -> StepResult:
    return StepResult(step, np.zeros(1, np.int32), np.zeros(1, np.uint8), int(begin * MS), int(end * MS))


def test_a_step_takes_from_the_end_of_the_one_before_or_from_its_begin_if_that_is_later() -> None:
    times = StepTime(BUCKETS)
    times.ended(plan_of(1, chunk=64), result_of(1, 100, 107))
    assert times.step_ns(64, 0, attended_pairs(0, 64)) == 7 * MS
    times.ended(plan_of(2), result_of(2, 106, 110))  # it was let in before the one before had ended
    assert times.step_ns(1, 100, 0) == 3 * MS


class Watched(StepTime):
    """Keeps what it learns from."""

    def __init__(self) -> None:
        super().__init__(BUCKETS)
        self.learned: list[float] = []

    def learn(self, took: float, bucket: int, context: int, pairs: int) -> None:
        self.learned.append(took / MS)
        super().learn(took, bucket, context, pairs)


def test_steps_that_only_decode_are_looked_at_now_and_then_once_they_are_familiar() -> None:
    times = Watched()
    for end in range(1, 3 * DECODE_SAMPLE + 1):
        took = 10 + end / 64  # which tells the steps apart
        times.ended(plan_of(end), result_of(end, 20 * end, 20 * end + took))
    steps = [1, 2, 3, 4, DECODE_SAMPLE, 2 * DECODE_SAMPLE, 3 * DECODE_SAMPLE]
    assert times.learned == [10 + step / 64 for step in steps]
    times.ended(plan_of(99, chunk=8), result_of(99, 2000, 2011))
    assert times.learned[-1] == 11


def test_a_device_without_a_clock_teaches_nothing() -> None:
    times = StepTime(BUCKETS)
    for step in range(1, 20):
        times.ended(plan_of(step, chunk=step), result_of(step, 0, 0))
    assert times.step_ns(64, 0, 1) == 0

"""When rows that decode take pages: for many steps at once where there are plenty, else each when it has to."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.config import PAGE_SIZE
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.slots import Slots

PROMPTS = (3, 4, 5)


def decoding_core(*, num_pages: int = 64, max_tokens: int = 70) -> EngineCore:
    """Of which the next step is the first in which all rows decode."""
    core = EngineCore(num_pages=num_pages, max_num_seqs=len(PROMPTS))
    for rid, length in enumerate(PROMPTS):
        core.add(rid, np.full(length, rid, np.int32), max_tokens, ignore_eos=True, namespace=str(rid))
    core.turn()
    return core


def decode(core: EngineCore, steps: int) -> list[StepPlan]:
    for _ in range(steps):
        core.turn()
    return core.plans[-steps:]


def writes(plan: StepPlan) -> list[tuple[int, int]]:
    """Slots, and places in their page tables."""
    return list(zip(plan.page_slot.tolist(), plan.page_index.tolist(), strict=True))


def test_all_rows_take_a_page_with_every_sixteenth_step() -> None:
    plans = decode(core := decoding_core(), 4 * PAGE_SIZE)
    assert all(plan.row_slot is plans[0].row_slot for plan in plans)
    first = PAGE_SIZE - max(PROMPTS)  # in which the row with the longest prompt needs its page
    growing = {step: writes(plan) for step, plan in enumerate(plans) if len(plan.page_id)}
    assert growing == {
        first + PAGE_SIZE * more: [(slot, 1 + more) for slot in range(len(PROMPTS))] for more in range(4)
    }
    ids = np.concatenate([plan.page_id for plan in plans]).tolist()
    assert len(ids) == len(set(ids))
    core.run()
    core.assert_all_right()
    core.assert_nothing_held()


def test_rows_that_need_a_page_at_other_times_get_into_step_with_a_row_that_joins() -> None:
    core = decoding_core()
    core.abort(2)
    decode(core, 10)
    core.add(9, np.full(31, 9, np.int32), 40, ignore_eos=True)
    plans = decode(core, 3)
    # the new row's prompt has but one place left on its pages: the others need theirs later
    assert [writes(plan) for plan in plans] == [[(2, 0), (2, 1)], [], [(0, 1), (1, 1), (2, 2)]]
    assert [plan.row_start.tolist() for plan in plans] == [[13, 14, 0], [14, 15, 31], [15, 16, 32]]


def test_a_row_takes_no_page_that_it_would_end_before() -> None:
    # the last tokens, which are on no page, are numbers 32, 33 and 34, from 0
    core = decoding_core(max_tokens=PAGE_SIZE + 14)
    plans = decode(core, 2 * PAGE_SIZE - max(PROMPTS))
    assert [writes(plan) for plan in plans if len(plan.page_id)] == [[(0, 1), (1, 1), (2, 1)]]
    (last,) = decode(core, 1)
    assert last.row_start.tolist() == [30, 31, 32]
    assert writes(last) == [(1, 2), (2, 2)]
    core.run()
    core.assert_all_right()


def test_where_pages_are_scarce_each_row_takes_one_when_it_has_a_token_for_it() -> None:
    # rows have three pages; with two more than they are about to need, not each would find another
    plans = decode(decoding_core(num_pages=1 + 3 + 5), PAGE_SIZE)
    growing = {step: writes(plan) for step, plan in enumerate(plans) if len(plan.page_id)}
    assert growing == {PAGE_SIZE - length: [(slot, 1)] for slot, length in enumerate(PROMPTS)}


def test_pages_for_later_steps_are_those_of_prefixes_that_nobody_uses() -> None:
    core = EngineCore(num_pages=1 + 12, max_num_seqs=len(PROMPTS))
    core.add(7, np.full(9 * PAGE_SIZE, 7, np.int32), 2, ignore_eos=True)
    core.run()
    assert core.scheduler.gauges()["cached_pages"] == 9
    for rid, length in enumerate(PROMPTS):
        core.add(rid, np.full(length, rid, np.int32), 20, ignore_eos=True)
    core.turn()
    assert core.scheduler.rows.pool.num_free == 0
    plans = decode(core, PAGE_SIZE)
    assert [writes(plan) for plan in plans if len(plan.page_id)] == [[(0, 1), (1, 1), (2, 1)]]
    assert core.scheduler.gauges()["cached_pages"] == 6
    assert core.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("length", [1, 3, 16])
def test_runs_of_tokens_begin_with_any_cell(length: int) -> None:
    slots = Slots(3, 16)
    runs = np.arange(2 * length, dtype=np.int32).reshape(2, length) + 1
    ends = [16, 48]  # the last run ends with the last cell
    slots.runs_of_tokens(length)[np.array(ends) - length] = runs
    expected = np.zeros(48, np.int32)
    for end, run in zip(ends, runs, strict=True):
        expected[end - length : end] = run
    assert slots.tokens.reshape(-1).tolist() == expected.tolist()

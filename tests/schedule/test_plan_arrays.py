"""What plans share with each other and with the scheduler: only what nobody changes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from support.engine_core import EngineCore

from gpu_runner.schedule.plan import StepPlan

ROW_ARRAYS = ("row_slot", "row_gen", "row_len", "row_samples")


def arrays_of(plan: Any) -> dict[str, np.ndarray]:
    """Every array of a plan, its starting rows' among them."""
    own = (
        plan._asdict() if isinstance(plan, StepPlan) else {part.name: getattr(plan, part.name) for part in fields(plan)}
    )
    if isinstance(plan, StepPlan):
        own |= {f"start.{name}": array for name, array in arrays_of(plan.start).items()}
    return {name: array for name, array in own.items() if isinstance(array, np.ndarray)}


def decoding_core(rows: int) -> EngineCore:
    core = EngineCore(max_num_seqs=rows)
    for rid in range(rows):
        core.add(rid, np.arange(3 + rid, dtype=np.int32), 60, ignore_eos=True)
    core.turn()
    core.turn()
    assert core.plans[-1].num_decode_rows == rows
    return core


def test_steps_of_the_same_decode_rows_share_all_but_their_positions_and_pages() -> None:
    core = decoding_core(3)
    core.turn()
    before, after = core.plans[-2:]
    shared = {name for name, array in arrays_of(before).items() if arrays_of(after)[name] is array}
    empty = {name for name in arrays_of(after) if name.startswith("start.")}
    nothing = {"prefill_tokens", "page_slot", "page_index", "page_id", "scores", "score_row"}
    assert shared == {*ROW_ARRAYS, *nothing, *empty}
    assert before.row_start.tolist() == [3, 4, 5]
    assert after.row_start.tolist() == [4, 5, 6]


def test_the_shared_arrays_of_rows_cannot_be_written() -> None:
    plan = decoding_core(2).plans[-1]
    for name in ROW_ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 1


def test_a_row_that_joins_or_leaves_changes_no_plan_made_before() -> None:
    core = decoding_core(3)
    core.abort(1)
    core.turn()
    assert [plan.row_slot.tolist() for plan in core.plans[-2:]] == [[0, 1, 2], [0, 2]]
    core.add(9, np.arange(5, dtype=np.int32), 60, ignore_eos=True)
    core.turn()
    core.turn()
    assert [plan.row_slot.tolist() for plan in core.plans[-3:]] == [[0, 2], [0, 2, 1], [0, 2, 1]]
    assert [plan.row_gen.tolist() for plan in core.plans[-2:]] == [[0, 0, 1], [0, 0, 1]]
    core.run()
    core.assert_all_right()


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_stays_what_it_was_whatever_happens_after(seed: int) -> None:
    rng = np.random.default_rng(seed)
    core = EngineCore(num_pages=12, max_num_seqs=4, max_num_batched_tokens=24, vocab_size=20)
    copies: list[dict[str, list[Any]]] = []
    for rid in range(1, 30):
        prompt = rng.integers(0, 20, int(rng.integers(1, 30)), dtype=np.int32)
        core.add(rid, prompt, int(rng.integers(1, 90)), ignore_eos=bool(rng.integers(2)))
        if rng.random() < 0.2:
            core.abort(int(rng.integers(1, rid + 1)))
        for _ in range(int(rng.integers(0, 12))):
            core.turn()
            new = core.plans[len(copies) :]
            copies.extend({name: array.tolist() for name, array in arrays_of(plan).items()} for plan in new)
    core.run()
    core.assert_all_right()
    assert core.scheduler.counters.preemptions > 0
    assert len(copies) > 50
    for plan, copy in zip(core.plans, copies, strict=False):
        assert {name: array.tolist() for name, array in arrays_of(plan).items()} == copy

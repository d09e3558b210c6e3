"""What steps compute: plans built by hand, against a full recompute of each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_harness import NEVER, VOCAB, Prefill, Rig, Row, naive_greedy

from asyncengine.wire.base import Finish
from gpu_runner.schedule.plan import StepPlan, StepResult

PROMPT = [5, 17, 80, 3, 3, 41, 9, 66, 12, 30, 2, 77, 50, 8, 21, 94, 33, 60, 7, 19]
OTHER = [90, 4, 4, 25]


def naive(rig: Rig, prompt: list[int], count: int) -> list[int]:
    return naive_greedy(rig.decoder, prompt, count, rig.device)


def test_a_prompt_and_its_decode_steps_equal_a_full_recompute(rig: Rig) -> None:
    assert rig.generate(PROMPT, 24, row=Row()) == naive(rig, PROMPT, 24)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_equals_one_chunk(rig: Rig, chunk: int) -> None:
    assert rig.generate(PROMPT, 6, row=Row(), chunk=chunk) == naive(rig, PROMPT, 6)


def test_rows_of_a_mixed_batch_equal_the_same_rows_alone(rig: Rig) -> None:
    first = rig.run(rig.plan(prefill=[Prefill(3, 0, OTHER)], start={3: Row()}, pages=[(3, 0, 9), (3, 1, 4)]))
    mixed = rig.run(
        rig.plan(
            decode=[(3, 4)],
            prefill=[Prefill(0, 0, PROMPT), Prefill(5, 0, PROMPT[:9], samples=False)],
            start={0: Row(), 5: Row()},
            pages=[(0, 0, 7), (0, 1, 2), (5, 0, 3), (5, 1, 5)],
        )
    )
    assert mixed.tokens[2] == -1, "a chunk that is not the prompt's last samples nothing"
    last = rig.run(rig.plan(decode=[(3, 5), (0, 20)], prefill=[Prefill(5, 9, PROMPT[9:])]))
    by_slot = {
        3: [first.tokens[0], mixed.tokens[0], last.tokens[0]],
        0: [mixed.tokens[1], last.tokens[1]],
        5: [last.tokens[2]],
    }
    assert by_slot == {3: naive(rig, OTHER, 3), 0: naive(rig, PROMPT, 2), 5: naive(rig, PROMPT, 1)}
    assert (last.finish == Finish.NONE).all()


def test_a_cached_prefix_is_read_from_another_rows_page(rig: Rig) -> None:
    rig.run(rig.plan(prefill=[Prefill(0, 0, PROMPT)], start={0: Row()}, pages=[(0, 0, 1), (0, 1, 2)]))
    result = rig.run(rig.plan(prefill=[Prefill(6, 16, PROMPT[16:])], start={6: Row()}, pages=[(6, 0, 1), (6, 1, 3)]))
    assert result.tokens.tolist() == naive(rig, PROMPT, 1)


def test_stop_ids_end_a_row_and_its_overshoot_touches_only_the_dummy_page(rig: Rig) -> None:
    expected = naive(rig, PROMPT, 3)
    stop = Row(stop_ids=(expected[2], NEVER))
    tokens = rig.run(
        rig.plan(prefill=[Prefill(0, 0, PROMPT)], start={0: stop}, pages=[(0, 0, 1), (0, 1, 2)])
    ).tokens.tolist()
    executor = rig.executor
    executor.launch(rig.plan(decode=[(0, 20)]))
    executor.launch(rig.plan(decode=[(0, 21)]))  # samples the stop id
    tokens.append(int(executor.collect().tokens[0]))
    end = executor.collect()
    before = rig.pages_snapshot()
    dummy = rig.kv_cache[:, :, 0].clone()
    executor.launch(rig.plan(decode=[(0, 22)]))
    executor.launch(rig.plan(decode=[(0, 23)]))
    overshoot = [executor.collect(), executor.collect()]

    assert expected[0] != expected[2] != expected[1]
    assert (tokens, end.tokens.tolist(), end.finish.tolist()) == (expected[:2], expected[2:], [Finish.STOP])
    assert [(r.tokens.tolist(), r.finish.tolist()) for r in overshoot] == [([-1], [Finish.NONE])] * 2
    assert torch.equal(rig.pages_snapshot(), before)
    assert not torch.equal(rig.kv_cache[:, :, 0], dummy)


def test_an_overshoot_row_beside_live_rows_leaves_their_tokens_alone(rig: Rig) -> None:
    expected, other = naive(rig, PROMPT, 1), naive(rig, OTHER, 4)
    plans = [
        rig.plan(
            prefill=[Prefill(0, 0, PROMPT), Prefill(1, 0, OTHER)],
            start={0: Row(stop_ids=(expected[0],)), 1: Row()},
            pages=[(0, 0, 1), (0, 1, 2), (1, 0, 3)],
        ),
        rig.plan(decode=[(0, 20), (1, 4)]),
        rig.plan(decode=[(1, 5)]),
        rig.plan(decode=[(1, 6)]),
    ]
    results = pipelined(rig, plans)
    assert [r.tokens.tolist() for r in results] == [[expected[0], other[0]], [-1, other[1]], [other[2]], [other[3]]]


def test_a_slot_starts_again_right_behind_the_overshoot_of_its_last_row(rig: Rig) -> None:
    expected = naive(rig, PROMPT, 1)
    plans = [
        rig.plan(
            prefill=[Prefill(2, 0, PROMPT)],
            start={2: Row(stop_ids=(expected[0],))},
            pages=[(2, 0, 1), (2, 1, 2)],
        ),
        rig.plan(decode=[(2, 20)]),
        # The next request takes the slot and both pages while the overshoot may still be running.
        rig.plan(prefill=[Prefill(2, 0, OTHER)], start={2: Row()}, pages=[(2, 0, 2), (2, 1, 1)]),
        *[rig.plan(decode=[(2, 4 + index)]) for index in range(14)],
    ]
    results = pipelined(rig, plans)
    assert [int(r.tokens[0]) for r in results] == [expected[0], -1, *naive(rig, OTHER, 15)]


def test_a_row_ends_with_length_at_its_limit_and_stop_wins_over_length(rig: Rig) -> None:
    expected = naive(rig, PROMPT, 2)
    rows = {0: Row(limit=22), 1: Row(limit=22, stop_ids=(expected[1],)), 2: Row(limit=21), 3: Row(limit=23)}
    first = rig.run(
        rig.plan(
            prefill=[Prefill(slot, 0, PROMPT) for slot in rows],
            start=rows,
            pages=[(slot, index, 1 + 2 * slot + index) for slot in rows for index in range(2)],
        )
    )
    second = rig.run(rig.plan(decode=[(slot, 20) for slot in rows]))
    assert first.tokens.tolist() == [expected[0]] * 4
    assert first.finish.tolist() == [Finish.NONE, Finish.NONE, Finish.LENGTH, Finish.NONE]
    assert second.tokens.tolist() == [expected[1], expected[1], -1, expected[1]]
    assert second.finish.tolist() == [Finish.LENGTH, Finish.STOP, Finish.NONE, Finish.NONE]


def test_stop_ids_cannot_be_sampled_before_min_tokens(rig: Rig) -> None:
    favourite = naive(rig, PROMPT, 1)[0]
    pages = [(slot, index, 1 + 2 * slot + index) for slot in range(3) for index in range(2)]
    rows = {
        0: Row(stop_ids=(favourite,), min_tokens_until=21),
        1: Row(stop_ids=(favourite,), min_tokens_until=20),
        2: Row(temperature=1.0, seed=4, stop_ids=tuple(range(1, 17)), min_tokens_until=24),
    }
    result = rig.run(rig.plan(prefill=[Prefill(slot, 0, PROMPT) for slot in rows], start=rows, pages=pages))
    assert result.tokens[0] != favourite
    assert result.finish.tolist() == [Finish.NONE, Finish.STOP, Finish.NONE]
    free = rig.generate(PROMPT, 1, row=Row(), slot=7, first_page=20)
    assert free == [favourite]
    drawn = [int(result.tokens[2]), *rig.decode_pipelined({2: 20}, 3)[2]]
    assert not set(drawn) & set(range(1, 17))


def test_a_seeded_row_draws_the_same_tokens_anywhere_in_any_batch(rig: Rig) -> None:
    row = Row(temperature=0.9, top_p=0.95, seed=-7)
    alone = rig.generate(PROMPT, 12, row=row, slot=0)
    assert len(set(alone)) > 3

    neighbours = [Row(), Row(temperature=2.0, seed=-7), Row(temperature=0.7, top_k=5, seed=3), Row(min_p=0.2, seed=9)]
    slots = {5: row, **dict(enumerate(neighbours, start=1))}
    first = rig.run(
        rig.plan(
            prefill=[Prefill(slot, 0, OTHER if slot != 5 else PROMPT) for slot in (1, 2, 5, 3, 4)],
            start=slots,
            pages=[(slot, index, 10 + 4 * slot + index) for slot in slots for index in range(3)],
        )
    )
    positions = {1: 4, 2: 4, 5: 20, 3: 4, 4: 4}
    together = [int(first.tokens[2]), *rig.decode_pipelined(positions, 11)[5]]
    assert together == alone


def test_a_retracted_row_resumes_with_the_tokens_it_would_have_drawn(rig: Rig) -> None:
    row = Row(temperature=1.0, seed=2**63 - 1)
    whole = rig.generate(PROMPT, 10, row=row)
    resumed = rig.generate(PROMPT + whole[:4], 6, row=row, slot=3, first_page=30, chunk=10)
    assert resumed == whole[4:]
    other_seed = rig.generate(PROMPT, 10, row=Row(temperature=1.0, seed=2**62), slot=4, first_page=40)
    assert other_seed != whole


def test_a_step_in_which_no_row_samples_returns_no_tokens(rig: Rig) -> None:
    result = rig.run(rig.plan(prefill=[Prefill(0, 0, PROMPT[:3], samples=False)], start={0: Row()}, pages=[(0, 0, 1)]))
    assert (result.tokens.dtype, result.finish.dtype) == (np.int32, np.uint8)
    assert (result.step, result.tokens.tolist(), result.finish.tolist()) == (1, [-1], [0])


def test_a_row_may_reach_the_last_position_of_the_page_table(rig: Rig) -> None:
    prompt = [index % VOCAB for index in range(120)]
    assert rig.generate(prompt, 8, row=Row(limit=128)) == naive(rig, prompt, 8)
    overshoot = rig.run(rig.plan(decode=[(0, 127)]))
    assert overshoot.tokens.tolist() == [-1]


def pipelined(rig: Rig, plans: list[StepPlan]) -> list[StepResult]:
    """Run plans with two in flight throughout."""
    results = []
    for index, plan in enumerate(plans):
        rig.executor.launch(plan)
        if index:
            results.append(rig.executor.collect())
    return [*results, rig.executor.collect()]

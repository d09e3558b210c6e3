"""Rows within a structure wait for their masks; nobody else does. Numpy only, with a stand-in for what makes masks."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.config import PAGE_SIZE
from asyncengine.sampling import Structured
from asyncengine.wire.base import Finish
from gpu_runner.schedule.mask_work import MaskWork
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.slots import State

SHAPE = Structured("regex", ".*")


class MaskedCore(EngineCore):
    """An `EngineCore` beside which masks are made that take `delay` turns, and that checks what they are made of.

    The stand-in keeps each row's text: it must be told of every token, once and in order, and a row may sample only
    with the mask that its last token led to.
    """

    def __init__(self, *, delay: int, **options: Any) -> None:
        super().__init__(**options)
        self.delay = delay
        self.turns = 0
        self.texts: dict[tuple[int, int], list[int]] = {}
        self.masked_for: dict[tuple[int, int], int] = {}  # length of the text that the row's mask follows
        self.due: deque[tuple[int, MaskWork]] = deque()

    def turn(self) -> bool:
        self.turns += 1
        while self.due and self.due[0][0] <= self.turns:
            work = self.due.popleft()[1]
            self._note(work)
            super().make_masks(work)
            self.scheduler.check_integrity()
        plans = len(self.plans)
        busy = super().turn()
        for plan in self.plans[plans:]:
            self._check(plan)
        return busy or bool(self.due)

    def make_masks(self, work: MaskWork) -> None:
        self._follow(work)
        self.due.append((self.turns + self.delay, work))

    def _follow(self, work: MaskWork) -> None:
        for row in work.opened:
            assert (row.slot, row.gen) not in self.texts, "a row is opened once, also if it was retracted"
            self.texts[row.slot, row.gen] = row.tokens.tolist()
        for slot, gen, token in zip(work.slots.tolist(), work.gens.tolist(), work.tokens.tolist(), strict=True):
            self.texts[slot, gen].append(token)

    def _note(self, work: MaskWork) -> None:
        opened = [(row.slot, row.gen) for row in work.opened]
        for row in [*opened, *zip(work.slots.tolist(), work.gens.tolist(), strict=True)]:
            self.masked_for[row] = len(self.texts[row])
            known = self.scheduler.masked_rows.output_of(*row)
            if known is not None:
                assert known[0] == SHAPE
                assert known[1].tolist() == self.texts[row]

    def _check(self, plan: StepPlan) -> None:
        slots = self.scheduler.slots
        for slot, gen, start, length in zip(
            *(c[plan.row_samples].tolist() for c in (plan.row_slot, plan.row_gen, plan.row_start, plan.row_len)),
            strict=True,
        ):
            if slots.constrained[slot]:
                text = start + length - int(slots.prompt_len[slot])
                assert self.masked_for.pop((slot, gen)) == text, "it samples with the mask of its own last token"


def core(*, delay: int = 1, **options: Any) -> MaskedCore:
    return MaskedCore(delay=delay, **options)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, length).astype(np.int32)


def steps_of(core: EngineCore, rid: int) -> list[int]:
    """The steps in which a request got a token."""
    (row,) = [row for row, owner in core.row_of.items() if owner == rid]
    return [
        plan.step
        for plan in core.plans
        if any(
            (slot, gen) == row
            for slot, gen in zip(
                plan.row_slot[plan.row_samples].tolist(), plan.row_gen[plan.row_samples].tolist(), strict=True
            )
        )
    ]


def test_a_constrained_row_is_in_one_step_at_a_time_and_its_neighbour_in_every_step() -> None:
    engine = core(delay=1)
    engine.add(0, prompt(5), 12, ignore_eos=True)
    engine.add(1, prompt(5, seed=1), 6, structured=SHAPE)
    engine.run()
    engine.assert_all_right()
    free, bound = steps_of(engine, 0), steps_of(engine, 1)
    assert free == list(range(free[0], free[0] + 12))
    assert min(np.diff(bound)) >= 2
    engine.assert_nothing_held()


@pytest.mark.parametrize("delay", [1, 7, 30])
def test_a_slow_mask_delays_its_own_row_alone(delay: int) -> None:
    engine = core(delay=delay)
    for rid in range(3):
        engine.add(rid, prompt(20, seed=rid), 10, ignore_eos=True)
    engine.add(3, prompt(20, seed=3), 4, structured=SHAPE)
    engine.run()
    engine.assert_all_right()
    alone = EngineCore()
    for rid in range(3):
        alone.add(rid, prompt(20, seed=rid), 10, ignore_eos=True)
    alone.run()
    assert [steps_of(engine, rid) for rid in range(3)] == [steps_of(alone, rid) for rid in range(3)]


@pytest.mark.parametrize("length", [1, 2, PAGE_SIZE, PAGE_SIZE + 1, 5 * PAGE_SIZE + 1])
def test_all_of_a_prompt_but_its_last_token_is_computed_while_the_first_mask_is_made(length: int) -> None:
    engine = core(delay=8)
    engine.add(0, prompt(length), 3, structured=SHAPE)
    engine.run()
    engine.assert_all_right()
    rows = [plan for plan in engine.plans if plan.num_decode_rows == 0]
    assert sum(len(plan.prefill_tokens) for plan in rows) == length
    assert [bool(plan.row_samples.any()) for plan in rows] == [False] * (len(rows) - 1) + [True]
    assert len(rows[-1].prefill_tokens) == 1
    # the device is told of the row with its first tokens, whenever they come
    assert [len(plan.start) for plan in engine.plans] == [1] + [0] * (len(engine.plans) - 1)
    assert len(engine.plans[0].page_id) == -(-length // PAGE_SIZE)


def test_choices_have_a_text_each() -> None:
    engine = core()
    engine.add(0, prompt(20), 5, structured=SHAPE, n=3, seed=1)
    engine.run()
    engine.assert_all_right()
    assert len(engine.texts) == 3
    for row, rid in engine.row_of.items():
        assert engine.texts[row] == engine.outputs[rid][:-1], "nobody needs a mask behind the last token"


@pytest.mark.parametrize("delay", [1, 5])
def test_a_retracted_row_goes_on_with_its_text(delay: int) -> None:
    engine = core(delay=delay, num_pages=14, max_num_seqs=6)
    for rid in range(6):
        shape: dict[str, Any] = {"structured": SHAPE} if rid % 2 else {"ignore_eos": True}
        engine.add(rid, prompt(30, seed=rid), 40, **shape)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    engine.assert_all_right()
    engine.assert_nothing_held()


def test_a_row_that_ends_while_its_mask_is_made_leaves_its_slot_to_another() -> None:
    engine = core(delay=6, max_num_seqs=1)
    engine.add(0, prompt(20), 30, structured=SHAPE)
    engine.add(1, prompt(20, seed=1), 3, structured=SHAPE)
    while not engine.outputs.get(0):
        engine.turn()
    engine.turn()
    slot = engine.scheduler.slots.slot_of[0]
    assert engine.scheduler.slots.state[slot] == State.HELD
    assert engine.scheduler.masked_rows.num_held == 1
    engine.abort(0)
    assert engine.scheduler.masked_rows.num_held == 0
    engine.run()
    assert engine.finish[1] in (Finish.STOP, Finish.LENGTH)
    engine.assert_nothing_held()


def test_the_loop_is_told_when_only_masks_are_waited_for() -> None:
    engine = core(delay=4)
    engine.add(0, prompt(3), 3, structured=SHAPE)
    assert not engine.scheduler.masked_rows.waiting
    engine.turn()
    assert engine.scheduler.masked_rows.waiting
    engine.run()
    assert not engine.scheduler.masked_rows.waiting
    assert engine.scheduler.masked_rows.take_work() is None


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_all_end_with_their_own_tokens(seed: int) -> None:
    generator = np.random.default_rng(seed)
    engine = core(
        delay=int(generator.integers(1, 6)),
        num_pages=int(generator.integers(20, 40)),
        max_num_seqs=int(generator.integers(1, 8)),
        policy="priority" if seed % 2 else "fcfs",
        enable_prefix_caching=bool(seed % 3),
    )
    live: list[int] = []
    for rid in range(0, 40, 2):
        shape: dict[str, Any] = {"structured": SHAPE} if generator.random() < 0.6 else {}
        n = int(generator.integers(1, 3))
        engine.add(
            rid, prompt(int(generator.integers(1, 90)), seed=int(generator.integers(4))),
            int(generator.integers(1, 40)), n=n, priority=int(generator.integers(3)), **shape,
        )  # fmt: skip
        live += range(rid, rid + n)
        for _ in range(int(generator.integers(0, 12))):
            engine.turn()
        if generator.random() < 0.2:
            engine.abort(int(generator.choice(live)))
    engine.run()
    engine.assert_all_right()
    engine.assert_nothing_held()

"""Prompts under way and rows that run give way to requests that go before them, so often and no more."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.terms import Terms
from gpu_runner.schedule.ageing import MAX_OVERTAKES, MAX_OVERTAKES_OF_BACKGROUND
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.request import MAX_PREEMPTIONS

BEHIND = Terms(service_class="background")
A, B = Terms(tenant="a"), Terms(tenant="b")


def prompt_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, length, dtype=np.int32)


class Engine(EngineCore):
    """Requests by number, each with a prompt of its own."""

    def ask(self, rid: int, length: int, output: int = 4, terms: Terms = A, priority: int = 0) -> None:
        self.add(rid, prompt_of(length, rid), output, ignore_eos=True, terms=terms, priority=priority)

    def chunks(self) -> list[tuple[int, int]]:
        """Of the next step: request and tokens of each prompt in it."""
        self.turn()
        return self.chunks_of(self.plans[-1])

    def chunks_of(self, plan: StepPlan) -> list[tuple[int, int]]:
        rows = zip(plan.row_slot[plan.num_decode_rows :], plan.row_len[plan.num_decode_rows :], strict=True)
        requests = self.scheduler.slots.request
        return [(request.rid, int(length)) for slot, length in rows if (request := requests[slot]) is not None]

    def running(self) -> set[int]:
        requests = self.scheduler.slots.request
        return {rid for slot, gen in self.row_of if (rid := self.scheduler.rid_of(slot, gen)) and requests[slot]} - {
            request.rid for request in self.scheduler.queue
        }

    def preemptions(self) -> dict[int, int]:
        return {request.rid: request.preemptions for request in self.scheduler.slots.request if request is not None}


# ------------------------------------------------------------------------------------------------- prompts under way


def test_an_interactive_prompt_goes_before_the_rest_of_one_of_the_background() -> None:
    core = Engine(max_num_batched_tokens=32)
    core.ask(1, 200, terms=BEHIND)
    assert core.chunks() == [(1, 32)]
    core.ask(2, 40)
    assert core.chunks() == [(2, 32)]
    assert core.chunks() == [(2, 8), (1, 24)]
    core.run()
    core.assert_all_right()
    core.assert_nothing_held()


def test_one_of_the_background_waits_for_the_end_of_an_interactive_prompt() -> None:
    core = Engine(max_num_batched_tokens=32)
    core.ask(1, 60)
    core.chunks()
    core.ask(2, 40, terms=BEHIND)
    assert core.chunks() == [(1, 28), (2, 4)]


def test_a_tenants_prompt_goes_before_the_rest_of_one_of_a_tenant_that_is_served_more_and_is_not_passed_back() -> None:
    core = Engine(max_num_batched_tokens=32, max_num_seqs=16)
    for rid in range(1, 9):
        core.ask(rid, 100)
    assert [core.chunks(), core.chunks()] == [[(1, 32)], [(1, 32)]]
    core.ask(20, 90, terms=B)
    core.ask(21, 90, terms=B)
    assert [core.chunks() for _ in range(3)] == [[(20, 32)], [(20, 32)], [(20, 26), (1, 6)]]
    core.run()
    core.assert_all_right()


def test_a_tenant_never_passes_its_own_prompts() -> None:
    core = Engine(max_num_batched_tokens=32)
    core.ask(1, 60)
    core.ask(2, 60)
    assert [core.chunks() for _ in range(2)] == [[(1, 32)], [(1, 28), (2, 4)]]


def test_a_more_important_prompt_goes_first_with_policy_priority() -> None:
    core = Engine(max_num_batched_tokens=32, policy="priority")
    core.ask(1, 60, priority=5)
    core.chunks()
    core.ask(2, 40, priority=1)
    assert [core.chunks() for _ in range(2)] == [[(2, 32)], [(2, 8), (1, 24)]]


@pytest.mark.parametrize(("first", "most"), [(BEHIND, MAX_OVERTAKES_OF_BACKGROUND), (A, MAX_OVERTAKES)])
def test_a_prompt_that_is_passed_goes_on_behind_so_many_that_start(first: Terms, most: int) -> None:
    core = Engine(max_num_batched_tokens=32, num_pages=400, policy="priority", check=False)
    core.ask(1, 120, terms=first, priority=1)
    core.chunks()
    rid, between = 2, [0]
    while 1 not in core.outputs:
        while len(core.scheduler.queue) < 4:  # a stream of prompts that go first, each a step's worth, never ends
            core.ask(rid, 32, output=1)
            rid += 1
        if any(number == 1 for number, _ in core.chunks()):
            between.append(0)
        else:
            between[-1] += 1
        assert rid < 500
    assert max(between) == most
    assert len(between) > 3


# -------------------------------------------------------------------------------------------------------- rows, pages


def test_an_interactive_request_takes_the_row_of_the_newest_of_the_background_which_goes_on_as_if_nothing_was() -> None:
    core = Engine(max_num_seqs=3)
    for rid in (1, 2, 3):
        core.ask(rid, 20, output=30, terms=BEHIND)
        core.turn()
    while len(core.outputs) < 3:
        core.turn()
    core.ask(4, 20, output=10)
    while 4 not in core.outputs:
        core.turn()
    assert core.running() == {1, 2, 4}
    core.run()
    core.assert_all_right()
    assert core.scheduler.counters.preemptions == 1


def test_rows_give_way_until_there_are_pages_enough_and_no_longer() -> None:
    core = Engine(num_pages=1 + 20, max_num_seqs=8)
    for rid in range(1, 5):
        core.ask(rid, 32, output=40, terms=BEHIND)
    while len(core.outputs) < 4:
        core.turn()
    core.ask(9, 160, output=4)
    while 9 not in core.outputs:
        core.turn()
    # it needs 10 pages and one to grow for each row; rows hold 3 each, so 8 are free
    assert core.preemptions() == {1: 0, 2: 0, 3: 1, 4: 1, 9: 0}
    core.run()
    core.assert_all_right()
    core.assert_nothing_held()


def test_a_tenant_takes_rows_of_one_that_holds_more_until_they_hold_as_many() -> None:
    core = Engine(max_num_seqs=4)
    for rid in range(1, 9):
        core.ask(rid, 20, output=60)
    while len(core.outputs) < 4:
        core.turn()
    for rid in range(11, 15):
        core.ask(rid, 20, output=60, terms=B)
    while not {11, 12} <= core.outputs.keys():
        core.turn()
    for _ in range(5):
        core.turn()
    assert core.running() == {1, 2, 11, 12}
    assert core.scheduler.counters.preemptions == 2
    core.run()
    core.assert_all_right()


def test_when_pages_run_out_those_of_the_background_go_first() -> None:
    core = Engine(num_pages=1 + 10, max_num_seqs=4)
    core.ask(1, 30, output=60, terms=BEHIND)
    core.ask(2, 30, output=60)
    while not core.scheduler.counters.preemptions:
        core.turn()
    assert core.preemptions() == {1: 1, 2: 0}
    core.run()
    core.assert_all_right()


def test_a_request_loses_its_pages_so_often_and_no_more() -> None:
    core = Engine(max_num_seqs=1, max_num_batched_tokens=64)
    core.ask(1, 20, output=60, terms=BEHIND)
    rid, seen = 2, 0
    while 1 not in core.finish:
        if not len(core.scheduler.queue) and core.outputs.get(1) and core.running() == {1}:
            core.ask(rid, 8, output=2)
            rid += 1
        core.turn()
        seen = max(seen, core.preemptions().get(1, 0))
    assert seen == MAX_PREEMPTIONS
    core.run()
    core.assert_all_right()


def test_four_long_outputs_in_a_pool_for_one_and_a_half_all_end() -> None:
    core = EngineCore(num_pages=1 + 51, max_model_len=544, max_num_seqs=4, check=False)
    for rid in range(1, 5):
        core.add(rid, prompt_of(16, rid), 512, ignore_eos=True)
    most = 0
    while core.turn():
        most = max(most, *(each.preemptions for each in core.scheduler.slots.request if each is not None), 0)
    assert 0 < most <= MAX_PREEMPTIONS
    assert len(core.finish) == 4
    core.assert_all_right()
    core.assert_nothing_held()


@pytest.mark.parametrize("keeps", [1, 3])
def test_rows_that_must_keep_their_pages_run_together_only_if_they_have_enough(keeps: int) -> None:
    core = Engine(num_pages=1 + 16, max_num_seqs=4)
    for rid in range(1, 5):
        core.ask(rid, 16, output=110)
    for request in core.scheduler.queue:
        request.preemptions = MAX_PREEMPTIONS if request.rid <= keeps else 0
    while core.turn():
        kept = [rid for rid in core.running() if rid <= keeps]
        assert len(kept) <= 2, "each may need half the pool"
    core.assert_all_right()
    core.assert_nothing_held()


def test_when_a_more_important_request_comes_to_a_full_pool_the_row_that_gave_way_ends_as_if_alone() -> None:
    core = Engine(num_pages=1 + 12, max_num_seqs=4, policy="priority")
    for rid in (1, 2):
        core.ask(rid, 80, output=10)
    while len(core.outputs) < 2:
        core.turn()
    core.ask(3, 80, output=10, priority=-100)
    while 3 not in core.outputs:
        core.turn()
    assert core.preemptions()[2] == 1
    core.run()
    core.assert_all_right()


def test_prompts_that_begin_alike_run_one_after_the_other_while_their_beginning_is_cached() -> None:
    core = EngineCore(num_pages=1 + 12, max_num_seqs=1)
    beginnings = [prompt_of(96, seed) for seed in range(3)]
    for rid in range(1, 13):
        core.add(rid, np.concatenate([beginnings[rid % 3], prompt_of(32, 100 + rid)]), 2, ignore_eos=True)
    core.run()
    core.assert_all_right()
    assert core.finish_order == [1, 4, 7, 10, 2, 5, 8, 11, 3, 6, 9, 12]
    assert [rid for rid, row in core.opens.items() if row.cached_tokens == 96] == [4, 7, 10, 5, 8, 11, 6, 9, 12]

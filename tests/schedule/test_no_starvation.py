"""How long a request waits and how often it gives way at most, whatever else comes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count
from typing import get_args

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.config import SchedulingPolicy
from asyncengine.terms import Terms
from gpu_runner.schedule.ageing import MAX_OVERTAKES_OF_BACKGROUND
from gpu_runner.schedule.request import MAX_PREEMPTIONS

POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
BEHIND = Terms(service_class="background")
ROWS, BUDGET = 4, 64
PROMPT, OUTPUT = 48, 6
"""The longest there are."""


class Crowd:
    """An engine to which interactive requests come without end, so many that some always wait."""

    def __init__(self, policy: SchedulingPolicy, *, num_pages: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.core = EngineCore(
            num_pages=num_pages,
            max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
            policy=policy,
            clock=count(1, 1_000_000).__next__,
            check=False,
        )
        self.retractions: Counter[int] = Counter()
        departures = self.core.scheduler._departures
        retract = departures.retract

        def counted(slot: int) -> None:
            request = self.core.scheduler.slots.request[slot]
            assert request is not None
            self.retractions[request.rid] += 1
            retract(slot)

        departures.retract = counted  # type: ignore[method-assign]

    def ask(self, terms: Terms, *, prompt: int, output: int, priority: int = 0) -> int:
        rid = len(self.core.prompts)
        tokens = self.rng.integers(1, 50, prompt, dtype=np.int32)
        self.core.add(rid, tokens, output, ignore_eos=True, priority=priority, terms=terms)
        return rid

    def turn(self, *, waiting: int) -> None:
        while len(self.core.scheduler.queue) < waiting:
            terms = Terms(tenant="abc"[self.rng.integers(3)])
            sizes = {"prompt": int(self.rng.integers(1, PROMPT + 1)), "output": int(self.rng.integers(1, OUTPUT + 1))}
            self.ask(terms, **sizes, priority=int(self.rng.integers(-3, 4)))
        self.core.turn()

    def end(self) -> None:
        self.core.run()
        self.core.assert_all_right()
        self.core.scheduler.check_integrity()
        self.core.assert_nothing_held()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_background_request_starts_within_so_many_steps_though_interactive_ones_never_end(
    policy: SchedulingPolicy,
) -> None:
    """While any waits, all rows are taken. Those that run compute their prompts in steps with all of the budget that
    decoding leaves, then have their tokens, of which the last is seen two steps later: then another one starts."""
    steps_to_a_start = math.ceil(ROWS * PROMPT / (BUDGET - ROWS)) + OUTPUT + 2
    crowd = Crowd(policy, num_pages=200, seed=0)
    for _ in range(20):
        crowd.turn(waiting=6)
    # prompts that policies like least
    behind = [crowd.ask(BEHIND, prompt=PROMPT, output=OUTPUT, priority=9) for _ in range(3)]
    started: dict[int, int] = {}
    core = crowd.core
    for step in range(3 * (MAX_OVERTAKES_OF_BACKGROUND + 1) * steps_to_a_start):
        crowd.turn(waiting=6)
        for rid in behind:
            if rid in core.scheduler.slots.slot_of:
                started.setdefault(rid, step)
        if len(started) == 3:
            break
    waits = [started[rid] for rid in behind]
    for older, wait in enumerate(waits):
        assert wait <= (older + 1) * (MAX_OVERTAKES_OF_BACKGROUND + 1) * steps_to_a_start
    assert waits[0] > MAX_OVERTAKES_OF_BACKGROUND // ROWS, "others went first"
    crowd.end()


def test_no_request_gives_way_more_often_than_it_may_whatever_comes() -> None:
    """Rows of the background are wanted by interactive ones, of tenants by others', less important by more important,
    and pages by all that grow."""
    most = []
    for seed, num_pages in ((8, 12), (3, 16), (1, 24)):
        crowd = Crowd(POLICIES[seed % 4], num_pages=num_pages, seed=seed)
        for _ in range(600):
            if crowd.rng.random() < 0.05:
                terms = Terms(tenant="abc"[crowd.rng.integers(3)], service_class="background")
                crowd.ask(terms, prompt=int(crowd.rng.integers(1, PROMPT)), output=60, priority=9)
            crowd.turn(waiting=int(crowd.rng.random() < 0.4))
            assert max(crowd.retractions.values(), default=0) <= MAX_PREEMPTIONS
        crowd.end()
        most.append(max(crowd.retractions.values()))
    assert max(most) == MAX_PREEMPTIONS


def test_rows_that_keep_all_slots_while_they_wait_run_before_one_that_goes_before_them_but_has_none() -> None:
    """The first two rows keep their slots from when all is set aside for a trial, and nothing runs that would end."""
    core = EngineCore(max_num_seqs=1, policy="priority")
    core.add(1, np.full(20, 1, np.int32), 40, priority=5, ignore_eos=True)
    for _ in range(3):
        core.turn()
    core.add(2, np.full(20, 2, np.int32), 40, priority=1, ignore_eos=True)  # takes the place of the first
    for _ in range(6):
        core.turn()
    while not core.scheduler.set_aside():
        core.turn()
    core.add(3, np.full(20, 3, np.int32), 40, priority=0, ignore_eos=True)
    core.scheduler.queue.release()
    core.run(500)
    core.assert_all_right()


def test_of_rows_that_keep_all_slots_the_one_that_goes_before_the_others_runs_first() -> None:
    core = EngineCore(max_num_seqs=1)
    core.add(0, np.full(20, 1, np.int32), 40, terms=Terms("a", "background"), ignore_eos=True)
    for _ in range(3):
        core.turn()
    core.add(1, np.full(20, 2, np.int32), 40, terms=Terms("a"), ignore_eos=True)  # takes the place of the first
    for _ in range(8):
        core.turn()
    while not core.scheduler.set_aside():
        core.turn()
    core.add(2, np.full(20, 3, np.int32), 5, terms=Terms("b"), ignore_eos=True)
    core.scheduler.queue.release()
    head = core.scheduler.queue.head()
    assert head is not None
    assert head.rid == 2
    core.run(500)
    core.assert_all_right()
    assert core.finish_order == [1, 2, 0]

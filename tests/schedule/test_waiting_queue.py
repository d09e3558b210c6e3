"""Nobody waits for ever, whatever the policy and whoever else comes."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_core import EngineCore

from asyncengine.config import SchedulingPolicy
from asyncengine.sampling import SamplingParams
from asyncengine.terms import Terms
from gpu_runner.schedule.ageing import MAX_OVERTAKES, MAX_OVERTAKES_OF_BACKGROUND
from gpu_runner.schedule.queues import WaitingQueue
from gpu_runner.schedule.request import Request

POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)


def request(rid: int, length: int, priority: int = 0, *, background: bool = False) -> Request:
    return Request(
        rid=rid,
        tokens=np.zeros(length, np.int32),
        prompt_len=length,
        params=SamplingParams(priority=priority),
        seed=0,
        limit=length + 1,
        detok=b"",
        namespace="",
        arrival=rid,
        terms=Terms(service_class="background" if background else "interactive"),
    )


@pytest.mark.parametrize(
    ("policy", "unwanted", "wanted"),
    [
        ("shortest", request(0, 9000), lambda rid: request(rid, 1)),
        ("longest", request(0, 1), lambda rid: request(rid, 9000)),
        ("priority", request(0, 1, 2**31 - 1), lambda rid: request(rid, 1, -(2**31) + 1)),
    ],
)
def test_what_the_policy_likes_least_is_overtaken_so_often_and_no_more(policy, unwanted, wanted) -> None:  # type: ignore[no-untyped-def]
    queue = WaitingQueue(policy)
    queue.push(unwanted)
    started = []
    for rid in range(1, 100):
        queue.push(wanted(rid))
        head = queue.head()
        assert head is not None
        queue.take(head, resumed=False)
        started.append(head.rid)
    assert started.index(0) == MAX_OVERTAKES


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "push behind"]), st.integers(1, 5000), st.integers(-3, 3)),
        st.tuples(st.sampled_from(["start", "fill", "remove", "retract"]), st.integers(0, 10**6), st.just(0)),
    ),
    max_size=300,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(policy=st.sampled_from(POLICIES), operations=OPERATIONS)
def test_a_request_starts_within_the_bound_whatever_happens(
    policy: SchedulingPolicy, operations: list[tuple[str, int, int]]
) -> None:
    """Of those that start for the first time an interactive one is at the latest number (older + 1) * 17 of its class,
    one of the background number (older + 1) * 65 of all and (older + 1) * 17 of its class. older: those of its class
    that came before it and wait."""
    queue = WaitingQueue(policy)
    older: dict[int, int] = {}
    starts_seen: dict[int, list[int]] = {}  # of each that has not run: interactive ones, and of the background
    waiting: tuple[dict[int, Request], dict[int, Request]] = {}, {}  # that have not run, of each class
    running: list[Request] = []
    arrivals = 0

    def start(chosen: Request) -> None:
        resumed, behind = chosen.slot >= 0, chosen.background
        queue.take(chosen, resumed=resumed)
        running.append(chosen)
        if not resumed:
            chosen.slot = chosen.rid
            for seen in starts_seen.values():
                seen[behind] += 1
            turns, seen = older.pop(chosen.rid) + 1, starts_seen.pop(chosen.rid)
            del waiting[behind][chosen.rid]
            assert seen[behind] <= turns * (MAX_OVERTAKES + 1)
            assert not behind or sum(seen) <= turns * (MAX_OVERTAKES_OF_BACKGROUND + 1)

    for kind, number, priority in operations:
        if kind.startswith("push"):
            new = request(arrivals, number, priority, background=kind == "push behind")
            older[arrivals], starts_seen[arrivals] = len(waiting[new.background]), [0, 0]
            waiting[new.background][arrivals] = new
            queue.push(new)
            arrivals += 1
        elif kind in ("start", "fill") and (head := queue.head()) is not None:
            start((queue.filler(head) or head) if kind == "fill" else head)
        elif kind == "remove" and arrivals:
            rid = number % arrivals
            queue.remove(rid)
            older.pop(rid, None)
            starts_seen.pop(rid, None)
            for each in waiting:
                each.pop(rid, None)
        elif kind == "retract" and running:
            queue.push(running.pop(number % len(running)))
        queue.check_integrity()
    while (head := queue.head()) is not None:
        start(head)
    assert not older


def test_a_filler_is_shorter_than_the_head_and_never_passes_one_that_has_run() -> None:
    queue = WaitingQueue("fcfs")
    long, short = request(0, 100), request(1, 10)
    queue.push(long)
    assert queue.filler(long) is None
    queue.push(short)
    assert queue.filler(long) is short
    assert queue.filler(short) is None
    long.slot = 3
    assert queue.filler(long) is None


def prompt_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, length, dtype=np.int32)


def first_token_turns(*, shorts: int) -> dict[int, int]:
    """At which turn each request has its first token: a row fills half the pool for a while, a long prompt waits for
    more than the other half, and short ones come behind it."""
    core = EngineCore(num_pages=129, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=64, check=False)
    core.add(1, prompt_of(1000, seed=1), 100, ignore_eos=True)
    while 1 not in core.outputs:
        core.turn()
    core.add(2, prompt_of(1100, seed=2), 5, ignore_eos=True)
    for rid in range(3, 3 + shorts):
        core.add(rid, prompt_of(64, seed=rid), 5, ignore_eos=True)
    turns: dict[int, int] = {}
    for turn in range(10_000):
        if not core.turn():
            break
        for rid in core.outputs.keys() - turns.keys():
            turns[rid] = turn
    core.assert_all_right()
    core.assert_nothing_held()
    return turns


def test_short_prompts_use_the_pages_that_are_too_few_for_the_long_one_before_them() -> None:
    alone, crowded = first_token_turns(shorts=0), first_token_turns(shorts=8)
    assert alone[2] > 90, "the long one waits for the end of the row that runs"
    assert sorted(crowded[rid] for rid in range(3, 11))[3] < 15
    assert crowded[2] <= 1.15 * alone[2]


def test_a_long_prompt_is_passed_by_so_many_short_ones_and_no_more() -> None:
    core = EngineCore(num_pages=65, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=64, check=False)
    core.add(1, prompt_of(400, seed=1), 400, ignore_eos=True)
    while 1 not in core.outputs:
        core.turn()
    core.add(2, prompt_of(700, seed=2), 5, ignore_eos=True)
    rid = 3
    while 2 not in core.outputs:
        while len(core.scheduler.queue) < 4:  # a stream of short ones that never ends
            core.add(rid, prompt_of(16, seed=rid), 3, ignore_eos=True)
            rid += 1
        assert core.turn()
    first = list(core.row_of.values()).index(2)
    assert first == 1 + MAX_OVERTAKES
    core.run()
    core.assert_all_right()


def test_an_aged_row_is_not_sent_back_for_more_important_ones() -> None:
    core = EngineCore(max_num_seqs=1, policy="priority", check=True)
    core.add(1, prompt_of(8, seed=1), 3, ignore_eos=True, priority=9)
    rid = 2
    while 1 not in core.finish:
        while len(core.scheduler.queue) < 3:
            core.add(rid, prompt_of(8, seed=rid), 2, ignore_eos=True, priority=-9)
            rid += 1
        core.turn()
        assert rid < 100
    core.run()
    core.assert_all_right()

"""Requests that may be what crashes gpu_runner, one at a time, and what waits meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.engine_core import EngineCore
from support.paged_model import expected_output

from asyncengine.sampling import SamplingParams
from asyncengine.terms import Terms
from asyncengine.wire.requests import PROVEN_TOKENS, Generate, Resume
from gpu_runner.schedule.limits import Backlog
from gpu_runner.trials import Trials

LONG = 60


def message(rid: int, *, n: int = 1, trial: int = 0, max_tokens: int = LONG, had: int = 0) -> Generate:
    """trial: tokens of it, if it is a suspect. had: tokens that it comes with, if it comes again."""
    params = SamplingParams(n=n, max_tokens=max_tokens)
    prompt = np.arange(rid, rid + 20, dtype=np.int32) % 50
    output = expected_output(prompt, limit=len(prompt) + had, vocab_size=50, stop_ids=())
    again = tuple(Resume(choice, np.array(output, np.int32).tobytes(), 0, trial) for choice in range(n))
    return Generate(rid, prompt.tobytes(), params, max_tokens, b"", "", again if trial or had else ())


class Bench:
    """Trials in front of a scheduler and a device. log: the rids on trial, in order. Nothing ever runs beside one."""

    def __init__(self, **options: Any) -> None:
        self.core = EngineCore(eos_ids=(), **({"num_pages": 256} | options))
        self.note = [0, 0]
        self.trials = Trials(self.core.scheduler, note=self.note, start=self._start)
        self.log: list[int] = []
        self._rids: dict[int, set[int | None]] = {}  # by step, of its rows

    def _start(self, message: Generate) -> None:
        self.core.add_request(message.rid, np.frombuffer(message.ids, np.int32), message.params, message.resume)

    def send(self, *messages: Generate) -> None:
        for each in messages:
            if not self.trials.take(each):
                self._start(each)

    def abort(self, rid: int) -> None:
        self.trials.abort(rid)
        self.core.abort(rid)

    def turn(self) -> bool:
        if self.trials.busy:
            self.trials.go_on()
        first, count = self.note
        if count and first not in self.log:
            self.log.append(first)
        num_plans = len(self.core.plans)
        goes_on = self.core.turn() or self.trials.busy
        for plan in self.core.plans[num_plans:]:
            rows = zip(plan.row_slot.tolist(), plan.row_gen.tolist(), strict=True)
            self._rids[plan.step] = {self.core.scheduler.rid_of(slot, gen) for slot, gen in rows} - {None}
        if count:
            own = set(range(first, first + count))
            assert all(self._rids[plan.step] <= own for plan in self.core.in_flight)
        return goes_on

    def run(self) -> None:
        while self.turn():
            self.core.scheduler.check_integrity()
        self.core.assert_all_right()
        self.core.assert_nothing_held()
        assert self.note[1] == 0


def test_without_a_suspect_nothing_is_held() -> None:
    bench = Bench()
    bench.send(message(1), message(2, had=3))
    assert not bench.trials.busy
    assert 1 in bench.core.scheduler.queue
    bench.run()
    assert bench.log == []


def test_suspects_run_one_after_the_other_each_as_far_as_it_is_to_and_all_others_wait() -> None:
    bench = Bench()
    bench.send(message(1, trial=20), message(2, had=5), message(3, trial=PROVEN_TOKENS, had=4), message(4))
    assert bench.trials.held("interactive") == Backlog(2, 40)
    assert bench.trials.held_rids() == {1, 2, 3, 4}
    while len(bench.log) != 2:
        bench.turn()
    assert bench.log == [1, 3]
    assert len(bench.core.outputs[1]) == 20 + 1, "and the one of the step that was in flight"
    assert not bench.core.scheduler.knows(2)
    while bench.trials.busy:
        bench.turn()
    assert len(bench.core.outputs[1]) == 20 + 1
    assert len(bench.core.outputs[3]) == 4 + PROVEN_TOKENS + 1
    assert bench.core.scheduler.knows(2)
    assert bench.core.scheduler.knows(4)
    bench.run()
    assert sorted(bench.core.finish) == [1, 2, 3, 4]


def test_what_has_started_before_waits_from_then_on_and_goes_on_exactly() -> None:
    bench = Bench(max_num_seqs=4)
    scheduler = bench.core.scheduler
    bench.send(message(1), message(2, max_tokens=3), message(3, n=2))
    while scheduler.num_steps < 4:
        bench.turn()
    bench.send(message(5, trial=PROVEN_TOKENS), message(6, trial=40))
    bench.turn()
    had = len(bench.core.outputs[1])
    while bench.trials.busy:
        bench.turn()
        assert len(bench.core.outputs[1]) <= had + bench.core.depth
    assert bench.log == [5, 6]
    bench.run()
    assert sorted(bench.core.finish) == [1, 2, 3, 4, 5, 6]
    assert scheduler.counters.preemptions == 0


def test_a_row_that_loads_from_host_memory_and_one_with_a_session_wait_and_go_on_exactly() -> None:
    bench = Bench(num_pages=40, host_pages=64, session_pin_share=0.08)
    core, scheduler = bench.core, bench.core.scheduler
    prompt = np.arange(90, dtype=np.int32) % 50
    terms = Terms(session="s", session_ttl_seconds=600)
    core.add(1, prompt, 4, terms=terms)
    bench.run()
    scheduler.rows.tree.evict(100)
    core.copies_done = lambda: 0
    core.add(2, prompt, LONG, terms=terms)
    core.add(3, prompt[::-1], LONG, terms=terms)
    bench.turn()
    assert len(scheduler._running.loading) == 1
    bench.send(message(4, trial=PROVEN_TOKENS))
    while not bench.log:
        bench.turn()
    assert not scheduler._running.loading
    core.copies_done = lambda: 1
    bench.run()
    assert sorted(core.finish) == [1, 2, 3, 4]


def test_where_no_slot_is_left_those_that_remain_are_not_tried_and_all_go_on() -> None:
    bench = Bench(max_num_seqs=1)
    bench.send(*(message(rid, trial=PROVEN_TOKENS) for rid in (1, 2, 3)), message(4))
    bench.run()
    assert bench.log == [1, 2]
    assert sorted(bench.core.finish) == [1, 2, 3, 4]


def test_nothing_is_on_trial_while_messages_are_taken_in() -> None:
    bench = Bench()
    bench.send(message(1, trial=PROVEN_TOKENS))
    bench.turn()
    assert bench.note == [1, 1]
    bench.trials.hush()
    assert bench.note[1] == 0
    bench.turn()
    assert bench.note == [1, 1]
    bench.run()


def test_a_trial_ends_with_its_request_whichever_way_that_ends() -> None:
    bench = Bench()
    bench.send(*(message(rid, trial=PROVEN_TOKENS, max_tokens=LONG if rid == 3 else 2) for rid in (1, 2, 3, 4)))
    while len(bench.log) < 3:
        bench.turn()
    bench.turn()
    bench.abort(3)
    bench.run()
    assert bench.log == [1, 2, 3, 4]


def test_what_is_aborted_while_it_is_held_is_never_started() -> None:
    bench = Bench()
    bench.send(message(1, trial=PROVEN_TOKENS), message(2, trial=PROVEN_TOKENS), message(3), message(4, n=3))
    bench.turn()
    for rid in (2, 3, 5):
        bench.abort(rid)
    bench.run()
    assert bench.log == [1]
    assert sorted(bench.core.finish) == [1, 4, 6]


def test_a_trial_does_not_wait_for_what_waited_before_it_and_has_not_run() -> None:
    bench = Bench(max_num_seqs=2)
    scheduler = bench.core.scheduler
    bench.send(message(1), message(2), *(message(rid) for rid in range(3, 8)))
    bench.turn()
    bench.send(message(8, trial=PROVEN_TOKENS))
    bench.turn()
    bench.abort(4)
    assert scheduler.queue.backlog("interactive") == Backlog(6, 120)
    assert scheduler.gauges()["waiting"] == 6
    assert scheduler.rids() == {1, 2, 3, 5, 6, 7}
    assert all(map(scheduler.knows, (1, 3, 7)))
    assert not scheduler.knows(4)
    while bench.trials.busy:
        bench.turn()
        scheduler.check_integrity()
    assert bench.log == [8]
    assert not any(rid in bench.core.outputs for rid in (3, 5, 6, 7))
    bench.run()
    assert sorted(bench.core.finish) == [1, 2, 3, 5, 6, 7, 8]


def test_what_nobody_waits_for_any_more_takes_no_room_from_others() -> None:
    bench = Bench()
    bench.send(message(1, trial=PROVEN_TOKENS), message(3), message(4, n=3))
    bench.abort(8)  # before its request is here
    bench.send(message(8))
    assert bench.trials.held("interactive") == Backlog(4, 80)
    for rid in (3, 5, 3):
        bench.abort(rid)
    assert bench.trials.held("interactive") == Backlog(2, 40)
    assert bench.trials.held("background") == Backlog(0, 0)
    bench.run()
    assert sorted(bench.core.finish) == [1, 4, 6]
    assert bench.trials.held("interactive") == Backlog(0, 0)


def test_the_choices_of_a_request_are_on_trial_together() -> None:
    bench = Bench(max_num_seqs=2)
    bench.send(message(10, n=3, trial=20, max_tokens=30), message(20, trial=20, max_tokens=30))
    bench.turn()
    assert bench.note == [10, 3]
    bench.run()
    assert bench.log == [10, 20]
    assert len(bench.core.finish) == 4


def test_a_suspect_that_loses_its_pages_to_others_stays_on_trial() -> None:
    bench = Bench(policy="priority")
    bench.send(message(1, trial=PROVEN_TOKENS))
    for _ in range(5):
        bench.turn()
    bench.core.scheduler._departures.retract(bench.core.scheduler.slots.slot_of[1])
    bench.turn()
    assert bench.note == [1, 1]
    bench.run()


def test_the_latest_row_of_each_slot_is_noted() -> None:
    bench = Bench(max_num_seqs=2)
    bench.send(*(message(rid, max_tokens=2) for rid in (7, 8, 9)))
    bench.turn()
    assert bench.core.scheduler.slots.latest_rid == [7, 8, -1, -1]
    bench.run()
    assert sorted(bench.core.scheduler.slots.latest_rid)[-1] == 9

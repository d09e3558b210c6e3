"""Requests that may be what crashes gpu_runner, one at a time, and what waits meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.engine_core import EngineCore
from support.paged_model import expected_output

from asyncengine.sampling import SamplingParams
from asyncengine.wire.requests import PROVEN_TOKENS, Generate, Resume
from gpu_runner.schedule.limits import Backlog
from gpu_runner.trials import Trials

LONG = 60


def message(rid: int, *, n: int = 1, suspect: bool = False, max_tokens: int = LONG, had: int = 0) -> Generate:
    """had: tokens that it comes with, if it comes again."""
    params = SamplingParams(n=n, max_tokens=max_tokens)
    prompt = np.arange(rid, rid + 20, dtype=np.int32) % 50
    output = expected_output(prompt, limit=len(prompt) + had, vocab_size=50, stop_ids=())
    again = tuple(Resume(choice, np.array(output, np.int32).tobytes(), 0, suspect) for choice in range(n))
    return Generate(rid, prompt.tobytes(), params, max_tokens, b"", "", again if suspect or had else ())


class Bench:
    """Trials in front of a scheduler and a device. log: the rids on trial, in order, with those that ran beside."""

    def __init__(self, **options: Any) -> None:
        self.core = EngineCore(eos_ids=(), num_pages=256, **options)
        self.note = [0, 0]
        self.trials = Trials(self.core.scheduler, note=self.note, start=self._start)
        self.log: list[tuple[int, list[int]]] = []

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
        if count and first not in [rid for rid, _ in self.log]:
            own = range(first, first + count)
            self.log.append((first, [rid for rid in self.core.scheduler.slots.slot_of if rid not in own]))
        return self.core.turn() or self.trials.busy

    def run(self) -> None:
        while self.turn():
            pass
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


def test_suspects_run_one_after_the_other_beside_those_that_passed_and_all_others_wait() -> None:
    bench = Bench()
    bench.send(message(1, suspect=True), message(2, had=5), message(3, suspect=True, had=4), message(4))
    assert bench.trials.held("interactive") == Backlog(2, 40)
    assert bench.trials.held_rids() == {1, 2, 3, 4}
    while len(bench.log) != 2:
        bench.turn()
    assert bench.log == [(1, []), (3, [1])]
    # and the next one of a step that was in flight, and that of the same turn
    assert len(bench.core.outputs[1]) == PROVEN_TOKENS + 2
    assert not bench.core.scheduler.knows(2)
    while bench.trials.busy:
        bench.turn()
    assert len(bench.core.outputs[3]) == 4 + PROVEN_TOKENS + 1
    assert bench.core.scheduler.knows(2)
    assert bench.core.scheduler.knows(4)
    bench.run()
    assert sorted(bench.core.finish) == [1, 2, 3, 4]


def test_a_trial_begins_when_what_had_started_before_has_come_as_far() -> None:
    bench = Bench()
    bench.send(message(1))
    bench.turn()
    bench.send(message(2, suspect=True))
    while not bench.log:
        bench.turn()
    assert bench.log == [(2, [1])]
    # all but what is in flight
    assert len(bench.core.outputs[1]) >= PROVEN_TOKENS - bench.core.depth
    bench.run()


def test_a_trial_ends_with_its_request_whichever_way_that_ends() -> None:
    bench = Bench()
    bench.send(*(message(rid, suspect=True, max_tokens=LONG if rid == 3 else 2) for rid in (1, 2, 3, 4)))
    while len(bench.log) < 3:
        bench.turn()
    bench.turn()
    bench.abort(3)
    bench.run()
    assert [rid for rid, _ in bench.log] == [1, 2, 3, 4]
    assert all(beside == [] for _, beside in bench.log)


def test_what_is_aborted_while_it_is_held_is_never_started() -> None:
    bench = Bench()
    bench.send(message(1, suspect=True), message(2, suspect=True), message(3), message(4, n=3))
    bench.turn()
    for rid in (2, 3, 5):
        bench.abort(rid)
    bench.run()
    assert bench.log == [(1, [])]
    assert sorted(bench.core.finish) == [1, 4, 6]


def test_a_trial_does_not_wait_for_what_waited_before_it_and_has_not_run() -> None:
    bench = Bench(max_num_seqs=2)
    scheduler = bench.core.scheduler
    bench.send(message(1), message(2), *(message(rid) for rid in range(3, 8)))
    bench.turn()
    bench.send(message(8, suspect=True))
    bench.abort(4)
    assert scheduler.queue.backlog("interactive") == Backlog(4, 80)
    assert scheduler.gauges()["waiting"] == 4
    assert scheduler.rids() == {1, 2, 3, 5, 6, 7}
    assert all(map(scheduler.knows, (1, 3, 7)))
    assert not scheduler.knows(4)
    while bench.trials.busy:
        bench.turn()
        scheduler.check_integrity()
    assert [rid for rid, _ in bench.log] == [8]
    assert not any(rid in bench.core.outputs for rid in (3, 5, 6, 7))
    bench.run()
    assert sorted(bench.core.finish) == [1, 2, 3, 5, 6, 7, 8]


def test_what_nobody_waits_for_any_more_takes_no_room_from_others() -> None:
    bench = Bench()
    bench.send(message(1, suspect=True), message(3), message(4, n=3))
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
    bench.send(message(10, n=3, suspect=True, max_tokens=30), message(20, suspect=True, max_tokens=30))
    bench.turn()
    assert bench.note == [10, 3]
    bench.run()
    assert [rid for rid, _ in bench.log] == [10, 20]
    assert len(bench.core.finish) == 4


def test_a_suspect_that_loses_its_pages_to_others_stays_on_trial() -> None:
    bench = Bench(policy="priority")
    bench.send(message(1, suspect=True))
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

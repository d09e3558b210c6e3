"""gpu_runner's pipes when a detokenizer, or gpu_runner itself, is in the place of a lost one: real pipes, no device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Failed, ToEngine
from asyncengine.wire.engine_pipes import ApiProcess
from asyncengine.wire.frames import StepFrame, ToDetokenizer
from asyncengine.wire.pipes import Pipes, Receiver, make_run_dir
from asyncengine.wire.requests import Abort, Generate, Relink, Resume, StopHit
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import MAX_BACKLOG, Outbox
from gpu_runner.schedule.limits import Backlog, QueueLimits
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.schedule.step_output import StepOutput, aborted_rows

LONG_MS = 20_000


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    yield pipes
    pipes.close()
    shutil.rmtree(run_dir)


def int32(*values: int) -> Int32:
    return np.array(values, np.int32)


def output(step: int, *slots: int) -> StepOutput:
    rows = int32(*slots)
    return StepOutput(step, rows, rows, rows, np.zeros(len(rows), np.uint8), ())


def next_message(receiver: Receiver) -> Any:
    assert receiver.wait(LONG_MS)
    (message,) = receiver.drain(1)
    return message


class Ends:
    """An inbox and its outbox over two detokenizers, and whoever writes to them."""

    def __init__(self, pipes: Pipes, *, life: int = 0, lives: dict[str, int] | None = None, name: str = "") -> None:
        self.outbox = Outbox(pipes=pipes, detokenizers=2, life=life, lives=lives)
        self.scheduler = Scheduler(num_pages=8, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16)
        limits = QueueLimits(100, 10_000)
        self.inbox = Inbox(
            pipes=pipes, scheduler=self.scheduler, outbox=self.outbox, vocab_size=50, limits=limits, life=life
        )
        self.requests = pipes.sender(f"runner.requests{name}")
        self.control = pipes.sender(f"runner.control{name}")
        self._sent = 0

    def hear(self, *messages: Any) -> None:
        """Have the inbox take these in."""
        prompt = int32(1).tobytes()
        for message in (*messages, Generate(1_000 + self._sent, prompt, SamplingParams(), 5, b"", "")):
            self.requests.send(message)
        self._sent += 1
        while 999 + self._sent not in self.scheduler.queue:
            assert self.inbox.wait(LONG_MS)
            self.inbox.drain()


def test_after_a_relink_frames_go_to_the_new_detokenizer_and_none_to_the_old(pipes: Pipes) -> None:
    ends = Ends(pipes)
    old, other = (pipes.receiver(f"detokenizer.{index}", StepFrame) for index in range(2))
    new = pipes.receiver("detokenizer.0.1", StepFrame)
    ends.outbox.send(output(1, 0, 1))
    assert [next_message(receiver).step for receiver in (old, other)] == [1, 1]
    ends.hear(Relink("detokenizer_proc", 0, 1))
    ends.outbox.send(output(2, 4, 5))
    frame = next_message(new)
    assert (frame.step, frame.slots, frame.life) == (2, int32(4).tobytes(), 0)
    assert next_message(other).step == 2, "the other one's link is the same as before"
    assert not old.pending()


def test_what_waits_for_a_lost_detokenizer_is_dropped_and_the_loop_goes_on(pipes: Pipes) -> None:
    ends = Ends(pipes)
    step = 0
    while ends.outbox.flush():  # nobody reads
        step += 1
        ends.outbox.send(output(step, 0))
    assert step > MAX_BACKLOG
    ends.hear(Relink("detokenizer_proc", 0, 3))
    assert ends.outbox.flush()
    old, new = (pipes.receiver(name, StepFrame) for name in ("detokenizer.0", "detokenizer.0.3"))
    ends.outbox.send(output(step + 1, 0))
    assert next_message(new).step == step + 1
    assert not new.pending()
    assert not old.pending()


@pytest.mark.parametrize(
    "stale",
    [
        *(("detokenizer_proc", 0, 2), ("detokenizer_proc", 0, 1), ("gpu_runner", 0, 9)),
        *(("detokenizer_proc", index, 3) for index in (2, 2**40, -1, -2)),
    ],
)
def test_a_relink_that_is_no_news_changes_nothing(pipes: Pipes, stale: tuple[Any, int, int]) -> None:
    ends = Ends(pipes)
    new = pipes.receiver("detokenizer.0.2", StepFrame)
    ends.hear(Relink("detokenizer_proc", 0, 2))
    ends.outbox.send(output(1, 0))
    ends.hear(Relink(*stale))
    ends.outbox.send(output(2, 0))
    assert [next_message(new).step for _ in range(2)] == [1, 2], "nothing that had been sent before it was lost"


def test_a_gpu_runner_in_the_place_of_a_lost_one_reads_and_writes_under_its_own_life(pipes: Pipes) -> None:
    before = Ends(pipes)
    first, second = (pipes.receiver(name, StepFrame) for name in ("detokenizer.0", "detokenizer.1.4"))
    ends = Ends(pipes, life=2, lives={"detokenizer_proc.1": 4, "detokenizer_proc.7": 1}, name=".2")
    for receiver in (first, second):
        assert next_message(receiver) == StepFrame(0, b"", b"", b"", b"", life=2), "it begins with an empty frame"
    ends.outbox.send(output(1, 0))
    ends.outbox.send(aborted_rows(1, [(1, 5)]))
    assert [next_message(receiver).life for receiver in (first, second)] == [2, 2]
    ends.hear()
    ends.control.send(Abort(1_000))
    ends.control.send(StopHit(0, 0))
    while len(ends.scheduler.queue):
        assert ends.inbox.wait(LONG_MS)
        ends.inbox.drain()
    before.inbox.drain()
    assert before.scheduler.queue.backlog("interactive").tokens == 0, (
        "nothing of it reached the pipes of the life before"
    )


def test_frames_of_a_first_life_say_so_and_none_is_sent_before_the_first_step(pipes: Pipes) -> None:
    receiver = pipes.receiver("detokenizer.0", StepFrame)
    Ends(pipes).outbox.send(output(7, 0))
    frame = next_message(receiver)
    assert (frame.step, frame.life) == (7, 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 50], "token id 50 at position 1 is outside the model's vocabulary of 50"),
        ([-1], "token id -1 at position 0 is outside the model's vocabulary of 50"),
        ([3, 4, 5], "a request that may have 3 tokens of output cannot go on behind 3"),
        ([3, 4, 5, 6], "a request that may have 3 tokens of output cannot go on behind 4"),
    ],
)
def test_a_request_that_cannot_go_on_behind_its_output_fails(pipes: Pipes, ids: list[int], message: str) -> None:
    engine = pipes.receiver("engine.0", ToEngine)
    ends = Ends(pipes)
    resume = (Resume(0, b"", 0), Resume(2, int32(*ids).tobytes(), 0))
    ends.hear(Generate(5, int32(1, 2).tobytes(), SamplingParams(n=3), 3, b"", "", resume))
    assert next_message(engine) == Failed(5, 400, message, "", "resume")
    assert 5 not in ends.scheduler.queue
    assert 6 not in ends.scheduler.queue


def test_only_the_choices_that_were_lost_are_taken_up_again(pipes: Pipes) -> None:
    ends = Ends(pipes)
    resume = (Resume(1, b"", 0), Resume(3, int32(7, 8).tobytes(), 6))
    ends.hear(Generate(5, int32(1, 2).tobytes(), SamplingParams(n=4, seed=100), 3, b"", "", resume))
    lost = [request for request in ends.scheduler.queue if request.rid < 1_000]
    assert [(request.rid, request.seed, request.resumed.tolist(), request.shown) for request in lost] == [
        (5, 101, [], 0),
        (6, 103, [7, 8], 6),
    ]
    assert [request.limit for request in lost] == [5, 5]
    assert ends.scheduler.queue.backlog("interactive").tokens == 2 + 4 + 1
    ends.control.send(Abort(6))
    while 6 in ends.scheduler.queue:
        assert ends.inbox.wait(LONG_MS)
        ends.inbox.drain()
    assert 5 in ends.scheduler.queue


def test_a_choice_that_was_lost_alone_is_not_taken_for_its_neighbour(pipes: Pipes) -> None:
    ends = Ends(pipes)
    params, prompt = SamplingParams(n=4, seed=100), int32(1, 2).tobytes()
    later, sooner = (Generate(rid, prompt, params, 3, b"", "", (Resume(1, b"", 0),)) for rid in (6, 5))
    ends.hear(later, sooner, sooner)
    assert [request.rid for request in ends.scheduler.queue if request.rid < 1_000] == [6, 5]
    assert ends.inbox.malformed == 1


def test_all_that_a_lost_api_worker_asked_for_ends_and_what_comes_of_it_later_is_nobodys(pipes: Pipes) -> None:
    detokenizers = [pipes.receiver(f"detokenizer.{index}", ToDetokenizer) for index in range(2)]
    engines = [pipes.receiver(process.pipe, ToEngine) for process in (ApiProcess(3), ApiProcess(3, 2))]
    ends = Ends(pipes)
    scheduler = ends.scheduler
    lost, new, other = (process.first_rid for process in (ApiProcess(3), ApiProcess(3, 2), ApiProcess(4)))

    def generate(rid: int, token: int = 1) -> Generate:
        return Generate(rid, int32(token, 2).tobytes(), SamplingParams(), 5, b"", "")

    ends.hear(generate(lost), generate(other), generate(lost + 1))
    assert scheduler.plan() is not None
    assert scheduler.num_running == 2, "one of them is the lost worker's"
    relink = Relink("api_worker", 3, 2)
    ends.hear(relink, generate(lost + 2), generate(lost + 3, 50), generate(new), generate(new + 1, 50), relink)
    assert scheduler.rids() == {other, new, 1_000, 1_001}
    assert scheduler.gauges()["aborted"] == 2
    scheduler.check_integrity()
    assert [next_message(receiver) for receiver in detokenizers] == [relink, relink]
    assert next_message(engines[1]).rid == new + 1, "the successor is told what was refused"
    assert not any(receiver.pending() for receiver in (*detokenizers, *engines))
    for rid in scheduler.rids():
        scheduler.abort(rid)
    scheduler.check_integrity()
    gauges = scheduler.gauges()
    assert (gauges["running"], gauges["waiting"]) == (0, 0)


def test_a_lost_api_workers_requests_end_wherever_a_trial_has_them_wait(pipes: Pipes) -> None:
    ends = Ends(pipes)
    inbox, scheduler = ends.inbox, ends.scheduler
    lost, other = (ApiProcess(worker).first_rid for worker in (3, 4))

    def hear(*messages: Any) -> None:
        for message in messages:
            ends.requests.send(message)
        while messages[-1].rid not in scheduler.rids() | inbox._trials.held_rids():
            assert inbox.wait(LONG_MS)
            inbox.drain()

    def generate(rid: int, *resume: Resume) -> Generate:
        return Generate(rid, int32(1, 2, 3, 4).tobytes(), SamplingParams(), 5, b"", "", resume)

    suspect = Resume(0, b"", 0, trial_tokens=16)
    hear(generate(lost), generate(other), generate(lost + 1, suspect), generate(other + 1, suspect))
    hear(generate(lost + 2), generate(other + 2))
    assert set(scheduler.queue.withheld) == {lost, other}
    assert [request.rid for request in scheduler.queue] == [lost + 1], "it is on trial"
    assert inbox._backlog("interactive") == Backlog(5, 20)
    hear(Relink("api_worker", 3, 1), generate(other + 3))
    assert [request.rid for request in scheduler.queue] == [other + 1]
    assert scheduler.rids() == {other, other + 1}
    assert inbox._backlog("interactive") == Backlog(4, 16)
    scheduler.check_integrity()
    ends.control.send(Abort(other + 1))
    while inbox._trials.busy:
        assert inbox.wait(LONG_MS)
        inbox.drain()
    assert [request.rid for request in scheduler.queue] == [other, other + 2, other + 3]
    scheduler.check_integrity()

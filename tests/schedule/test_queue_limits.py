"""More than may wait is turned away at once, and what was taken is never turned away later."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from asyncengine.errors import QueueFullError
from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Failed, ToEngine
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Abort, Generate, Resume
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import QueueLimits
from gpu_runner.schedule.scheduler import Scheduler


class Desk:
    """An inbox with its pipes' other ends: `max_num_seqs` 2, so many may wait besides."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.run_dir = make_run_dir()
        self.pipes = Pipes(self.run_dir)
        self.engine = self.pipes.receiver("engine.0", ToEngine)
        self.scheduler = Scheduler(num_pages=64, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
        self.inbox = Inbox(
            pipes=self.pipes,
            scheduler=self.scheduler,
            outbox=Outbox(pipes=self.pipes, detokenizers=1),
            vocab_size=50,
            limits=QueueLimits(requests, tokens),
        )
        self.tokenizer = self.pipes.sender("runner.requests")
        self.control = self.pipes.sender("runner.control")
        self.barriers = 0

    def send(self, rid: int, length: int = 4, n: int = 1, resume: tuple[Resume, ...] = ()) -> None:
        prompt = np.zeros(length, np.int32).tobytes()
        self.tokenizer.send(Generate(rid, prompt, SamplingParams(n=n), 5, b"", "", resume))

    def refused(self) -> list[Failed]:
        """Have the inbox take in all that was sent; what it refused."""
        self.barriers += 1
        barrier = 10**6 + self.barriers
        self.tokenizer.send(Generate(barrier, b"\xff\xff\xff\xff", SamplingParams(), 5, b"", "", (Resume(0, b"", 0),)))
        found: list[Failed] = []
        while not found or found[-1].rid != barrier:
            self.inbox.drain()
            if self.engine.wait(20):
                found += self.engine.drain()
        return found[:-1]

    @property
    def waiting(self) -> list[int]:
        return sorted(request.rid for request in self.scheduler.queue)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(requests=8, tokens=1000)
    yield desk
    desk.pipes.close()
    shutil.rmtree(desk.run_dir)


def test_of_fifty_at_once_those_that_fill_the_rows_and_the_queue_are_taken(desk: Desk) -> None:
    for rid in range(50):
        desk.send(rid)
    refused = desk.refused()
    assert desk.waiting == list(range(10))  # eight, and two whose rows are free
    assert [failed.rid for failed in refused] == list(range(10, 50))
    assert {(failed.status, failed.code) for failed in refused} == {(429, "queue_full")}
    assert refused[0].message == "10 requests wait already, and 8 may; this one has 1"
    desk.scheduler.plan()
    assert (desk.scheduler.num_running, len(desk.scheduler.queue)) == (2, 8)
    desk.send(60)
    assert [failed.rid for failed in desk.refused()] == [60]
    desk.control.send(Abort(9))
    while 9 in desk.waiting:
        desk.inbox.drain()
    desk.send(61)
    assert desk.refused() == []


def test_each_choice_counts(desk: Desk) -> None:
    desk.send(0, n=6)
    desk.send(16, n=5)
    desk.send(32, n=4)
    assert [failed.rid for failed in desk.refused()] == [16]
    assert len(desk.waiting) == 10


def test_tokens_of_prompts_count_with_each_choice_and_a_long_one_may_wait_alone(desk: Desk) -> None:
    desk.send(0, length=200, n=6)
    desk.send(16, length=1)
    assert desk.waiting == []
    refused = desk.refused()
    assert [failed.rid for failed in refused] == [16]
    assert refused[0].message == "the requests that wait have 1200 tokens already, and 1000 may wait; this one has 1"
    assert desk.waiting == list(range(6))


def test_what_goes_on_after_a_loss_is_never_turned_away(desk: Desk) -> None:
    for rid in range(10):
        desk.send(rid)
    desk.send(20, resume=(Resume(0, b"", 0),))
    assert desk.refused() == []
    assert desk.waiting == [*range(10), 20]


def test_choices_that_are_there_already_are_not_taken_twice_whatever_n_says(desk: Desk) -> None:
    desk.send(2)
    desk.send(0, resume=(Resume(0, b"", 0), Resume(1, b"", 0), Resume(2, b"", 0)))
    assert desk.refused() == []
    assert desk.waiting == [2]
    assert desk.inbox.malformed == 1
    desk.scheduler.check_integrity()


def test_a_choice_that_is_sent_again_has_one_rid_and_the_next_may_be_anothers(desk: Desk) -> None:
    desk.send(1)
    desk.send(0, n=3, resume=(Resume(2, b"", 0),))
    assert desk.refused() == []
    assert sorted(desk.waiting) == [0, 1]
    assert desk.inbox.malformed == 0


def test_no_queue_at_all_is_allowed() -> None:
    limits = QueueLimits(requests=0, tokens=0)
    limits.check(waiting=0, waiting_tokens=0, n=2, prompt_len=5, rows=2)
    with pytest.raises(QueueFullError):
        limits.check(waiting=0, waiting_tokens=0, n=1, prompt_len=5, rows=0)

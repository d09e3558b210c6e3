"""More than may wait is turned away at once, and what was taken is never turned away later."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from asyncengine.errors import QueueFullError
from asyncengine.sampling import SamplingParams
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.wire.answers import Failed, ToEngine
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Abort, Generate, Resume
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import Backlog, QueueLimits
from gpu_runner.schedule.scheduler import Scheduler

BACKGROUND = Terms(service_class="background")
NOTHING = Backlog(0, 0)


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

    def send(
        self,
        rid: int,
        length: int = 4,
        n: int = 1,
        resume: tuple[Resume, ...] = (),
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        prompt = np.zeros(length, np.int32).tobytes()
        self.tokenizer.send(Generate(rid, prompt, SamplingParams(n=n), 5, b"", "", resume, terms))

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
    assert refused[0].message == (
        "10 interactive and 0 background requests wait already, and --max-queued-requests is 8; this one has 1"
    )
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
    assert refused[0].message == (
        "the interactive requests that wait have 1200 tokens and the background ones 0 already, and "
        "--max-queued-tokens is 1000; this one has 1"
    )
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
    for is_background in (False, True):
        limits.check(Backlog(2, 10), is_background=is_background, interactive=NOTHING, background=NOTHING, rows=2)
        with pytest.raises(QueueFullError):
            limits.check(Backlog(1, 5), is_background=is_background, interactive=NOTHING, background=NOTHING, rows=0)


def test_rows_that_interactive_requests_are_about_to_take_are_no_room_for_background() -> None:
    limits = QueueLimits(requests=9, tokens=1000)  # four for the background
    check = partial(limits.check, interactive=Backlog(2, 8), background=Backlog(3, 12), rows=3)
    check(Backlog(2, 8), is_background=True)
    with pytest.raises(QueueFullError, match="3 background requests wait already, and 4 may, half of"):
        check(Backlog(3, 12), is_background=True)
    check(Backlog(7, 28), is_background=False)
    with pytest.raises(QueueFullError, match="--max-queued-requests is 9; this one has 8"):
        check(Backlog(8, 32), is_background=False)


def test_a_flood_of_background_requests_leaves_half_of_the_queue_to_interactive_ones(desk: Desk) -> None:
    for rid in range(50):
        desk.send(rid, terms=BACKGROUND)
    refused = desk.refused()
    assert desk.waiting == list(range(6))  # four, and two whose rows are free
    assert [failed.rid for failed in refused] == list(range(6, 50))
    assert {(failed.status, failed.code) for failed in refused} == {(429, "queue_full")}
    assert refused[0].message == (
        "6 background requests wait already, and 4 may, half of --max-queued-requests; this one has 1"
    )
    for rid in range(100, 110):
        desk.send(rid)
    assert [failed.rid for failed in desk.refused()] == list(range(106, 110))  # four wait, and two take the rows
    desk.scheduler.plan()
    assert sorted(desk.scheduler.slots.slot_of) == [100, 101]
    assert desk.waiting == [*range(6), *range(102, 106)]
    gauges = desk.scheduler.gauges()
    assert (gauges["waiting"], gauges["waiting_background"]) == (10, 6)
    desk.control.send(Abort(102))
    while 102 in desk.waiting:
        desk.inbox.drain()
    desk.send(60, terms=BACKGROUND)
    desk.send(110)
    assert [failed.rid for failed in desk.refused()] == [60]


def test_interactive_requests_may_fill_the_whole_queue(desk: Desk) -> None:
    for rid in range(10):
        desk.send(rid)
    desk.send(20, terms=BACKGROUND)
    (refused,) = desk.refused()
    assert refused.message == (
        "10 interactive and 0 background requests wait already, and --max-queued-requests is 8; this one has 1"
    )
    desk.scheduler.plan()
    desk.control.send(Abort(9))
    while 9 in desk.waiting:
        desk.inbox.drain()
    desk.send(21, terms=BACKGROUND)
    assert desk.refused() == []
    assert desk.waiting == [*range(2, 9), 21]
    desk.send(22, terms=BACKGROUND)
    (refused,) = desk.refused()
    assert refused.message == (
        "7 interactive and 1 background requests wait already, and --max-queued-requests is 8; this one has 1"
    )


def test_background_prompts_have_half_of_the_tokens_and_interactive_ones_the_rest(desk: Desk) -> None:
    for rid in (0, 1, 2):
        desk.send(rid, length=200, terms=BACKGROUND)
    for rid in (10, 11, 12, 13):
        desk.send(rid, length=200)
    refused = desk.refused()
    assert [failed.rid for failed in refused] == [2, 13]
    assert refused[0].message == (
        "the background requests that wait have 400 tokens already, and 500 may wait, half of --max-queued-tokens; "
        "this one has 200"
    )
    assert refused[1].message == (
        "the interactive requests that wait have 600 tokens and the background ones 400 already, and "
        "--max-queued-tokens is 1000; this one has 200"
    )


def test_a_long_background_prompt_may_wait_alone_in_its_class_and_takes_no_more_than_half(desk: Desk) -> None:
    desk.send(0, length=200, n=4, terms=BACKGROUND)
    desk.send(4, length=1, terms=BACKGROUND)
    desk.send(10, length=250)
    desk.send(11, length=250)
    desk.send(12, length=1)
    assert [failed.rid for failed in desk.refused()] == [4, 12]


def test_the_first_interactive_request_may_be_of_any_length_whatever_waits_in_the_background(desk: Desk) -> None:
    desk.send(0, length=200, n=2, terms=BACKGROUND)
    desk.send(10, length=200, n=6)
    desk.send(20, length=1)
    desk.send(21, length=1, terms=BACKGROUND)
    assert [failed.rid for failed in desk.refused()] == [20, 21]


def test_background_requests_that_go_on_after_a_loss_are_taken_and_keep_no_interactive_one_out(desk: Desk) -> None:
    for rid in range(20):
        desk.send(rid, length=100, resume=(Resume(0, b"", 0),), terms=BACKGROUND)
    for rid in range(100, 107):
        desk.send(rid, length=80)
    desk.send(200, terms=BACKGROUND)
    assert [failed.rid for failed in desk.refused()] == [106, 200]
    assert desk.waiting == [*range(20), *range(100, 106)]


def test_what_is_held_for_a_trial_or_a_verdict_counts_as_waiting(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = desk.inbox._trials

    def hold(rid: int, *, n: int = 1, suspect: bool = False, terms: Terms = DEFAULT_TERMS) -> None:
        resume = tuple(Resume(choice, b"", 0, True) for choice in range(n)) if suspect else ()
        assert trials.take(Generate(rid, bytes(16), SamplingParams(n=n), 5, b"", "", resume, terms))

    hold(0, suspect=True)
    hold(1, n=2, suspect=True)
    hold(3, suspect=True, terms=BACKGROUND)
    hold(4, n=2)
    hold(6, terms=BACKGROUND)
    assert desk.inbox.gauges() == {"waiting": 7, "waiting_background": 2}
    for rid in (2, 3, 5):
        trials.abort(rid)
    assert desk.inbox.gauges() == {"waiting": 4, "waiting_background": 1}
    parked = {"interactive": 3, "background": 1}
    monkeypatch.setattr(desk.inbox, "_grammar", SimpleNamespace(num_parked=parked.get))
    assert desk.inbox.gauges() == {"waiting": 8, "waiting_background": 2}

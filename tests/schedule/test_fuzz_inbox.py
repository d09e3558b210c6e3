"""Whatever comes out of gpu_runner's pipes: the schedule stays whole, and the requests behind it are taken."""

from __future__ import annotations

import shutil

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, read_frame, slice_of, strange_frame
from support.wire_examples import FRAME, GENERATE, ints

from asyncengine.sampling import SamplingParams, Structured
from asyncengine.terms import Terms
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import (
    Abort,
    Generate,
    ReleaseSession,
    Relink,
    Resume,
    StopHit,
    ToRunner,
    ToRunnerControl,
)
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import QueueLimits
from gpu_runner.schedule.scheduler import Scheduler

FAR = 2**40
"""Rids from here on are those of valid requests."""
REQUESTS: list[msgspec.Struct] = [
    GENERATE,
    Generate(1, ints(1, 2, 3), SamplingParams(), 5, b"", ""),
    Generate(2, ints(*range(40)), SamplingParams(n=3, seed=5, logprobs=3, logit_bias=((5, 1.0),)), 5, b"", "x"),
    Generate(3, ints(4), SamplingParams(), 5, b"", "", (Resume(0, ints(4, 5), 3), Resume(1, b"", 0))),
    Generate(4, ints(4), SamplingParams(structured=Structured("regex", "a")), 5, b"", ""),
    Generate(5, ints(*range(20)), SamplingParams(), 5, b"", "", (), Terms("a", "background", "s", 5.0)),
    Generate(6, ints(5), SamplingParams(), 5, b"", "", (Resume(0, ints(4), 1, trial_tokens=16),)),
    Abort(7),
    Relink("detokenizer_proc", 0, 1),
    FRAME,
]
CONTROL: list[msgspec.Struct] = [StopHit(0, 1), Abort(1), Abort(8), ReleaseSession("a", "s"), FRAME]


def test_a_running_inbox_takes_any_frame_and_the_requests_behind_it() -> None:
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    scheduler = Scheduler(num_pages=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    inbox = Inbox(
        pipes=pipes,
        scheduler=scheduler,
        outbox=Outbox(pipes=pipes, detokenizers=1),
        vocab_size=50,
        limits=QueueLimits(10**6, 10**9),
    )
    tokenizer, control = pipes.sender("runner.requests"), pipes.sender("runner.control")
    malformed = 0

    @slice_of(120)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        nonlocal malformed
        for valid, types, sender in ((REQUESTS, ToRunner, tokenizer), (CONTROL, ToRunnerControl, control)):
            for _ in range(data.draw(st.integers(1, 6))):
                raw = strange_frame(valid, data.draw)
                malformed += read_frame(raw, types) is None
                sender.socket.send(raw)
                tried.append(1)
        rid = FAR + len(tried)
        for sender in (tokenizer, control):
            sender.send(Abort(rid + 1))
        tokenizer.send(Generate(rid, np.zeros(4, np.int32).tobytes(), SamplingParams(), 5, b"", ""))
        while not scheduler.knows(rid):
            for known in (*(request.rid for request in scheduler.queue), *scheduler.slots.slot_of):
                scheduler.abort(known)  # what is on trial keeps all behind it waiting
            inbox.wait(20)
            inbox.drain()
        scheduler.check_integrity()
        plan = scheduler.plan()
        scheduler.check_integrity()
        assert plan is None or plan.num_rows >= 0
        for known in (rid, *range(-2, 20)):
            scheduler.abort(known)
        if plan is not None:
            scheduler.rows.pool.complete(plan.step)  # no trial begins before that
        scheduler.check_integrity()

    try:
        with counted("running inbox") as tried:
            fuzz()
        while inbox.wait(50):
            inbox.drain()
        assert inbox._requests.malformed + inbox._control.malformed == malformed
        assert malformed > 10
    finally:
        pipes.close()
        shutil.rmtree(run_dir)

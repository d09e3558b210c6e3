"""A model without an end-of-sequence token cannot end a text where its structure does."""

from __future__ import annotations

import shutil

import numpy as np

from asyncengine.sampling import SamplingParams, Structured
from asyncengine.wire.answers import Failed, ToEngine
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Generate
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import QueueLimits
from gpu_runner.schedule.scheduler import Scheduler


def test_structured_output_is_refused_and_other_requests_are_not() -> None:
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    engine = pipes.receiver("engine.0", ToEngine)
    scheduler = Scheduler(num_pages=8, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16)
    outbox = Outbox(pipes=pipes, detokenizers=1)
    limits = QueueLimits(100, 10_000)
    inbox = Inbox(pipes=pipes, scheduler=scheduler, outbox=outbox, vocab_size=50, limits=limits)
    tokenizer = pipes.sender("runner.requests")
    prompt = np.arange(3, dtype=np.int32).tobytes()
    tokenizer.send(Generate(1, prompt, SamplingParams(structured=Structured("regex", "a")), 5, b"", ""))
    tokenizer.send(Generate(2, prompt, SamplingParams(), 5, b"", ""))
    while not scheduler.has_work:
        assert inbox.wait(5000)
        inbox.drain()
    assert engine.wait(5000)
    (failed,) = engine.drain()
    assert isinstance(failed, Failed)
    assert (failed.rid, failed.status, failed.param) == (1, 400, "structured_outputs")
    assert "end-of-sequence" in failed.message
    assert [request.rid for request in scheduler.queue] == [2]
    pipes.close()
    shutil.rmtree(run_dir)

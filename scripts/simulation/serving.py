"""The closed loop of `bench_step.py` on a simulated engine, which tells the step model beside the scheduler."""

from __future__ import annotations

from typing import NamedTuple

from simulation.records import Records
from simulation.replica import Replica, ReplicaConfig
from simulation.step_model import StepModel
from simulation.traces import TraceRequest

NO_TARGET_MS = 1e6
MOST_REQUESTS = 4
"""Of a stream: the first, those that begin within an answer's steps after it, and some to spare."""


class Served(NamedTuple):
    """Over as many steps as an answer has tokens, from when all requests that were there at first have ended."""

    step_ms: float
    prompt_tokens_per_step: float


def serve(
    model: StepModel, *, streams: int, prompt_tokens: int, answer_tokens: int, max_num_batched_tokens: int
) -> Served:
    """So many requests at all times, of which the first end evenly from the start: as `step_engine.ClosedLoop`."""
    first = [1 + answer_tokens * (index + 1) // streams for index in range(streams)]
    answers = first + [answer_tokens] * (streams * (MOST_REQUESTS - 1))
    requests = [TraceRequest(n, 0, prompt_tokens, answer, n * prompt_tokens) for n, answer in enumerate(answers)]
    longest = prompt_tokens + answer_tokens
    config = ReplicaConfig(
        kv_cache_tokens=2 * streams * longest,
        max_model_len=2 * longest,
        max_num_seqs=streams,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=False,
        interactive_gap_ms=NO_TARGET_MS,
    )
    records = Records(requests)
    replica = Replica(config, model, records)
    rest = iter(requests)

    def submit(count: int) -> None:
        for _ in range(count):
            replica.submit(next(rest), replica.now_ns)

    submit(streams)
    while not records.ran[:streams].all():
        submit(len(replica.turn()))
    counters = replica.scheduler.counters
    began_ns, steps, prompts = replica.now_ns, replica.steps, counters.prefill_tokens
    while replica.steps < steps + answer_tokens:
        submit(len(replica.turn()))
    return Served(
        (replica.now_ns - began_ns) / 1e6 / answer_tokens, (counters.prefill_tokens - prompts) / answer_tokens
    )

"""The first steps of a process take several times as long as later ones: they are run before anybody waits for them."""

from __future__ import annotations

from collections import deque

import numpy as np

from asyncengine.config import PAGE_SIZE
from asyncengine.sampling import SamplingParams
from gpu_runner.loop import STEPS_IN_FLIGHT, Executor
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.scheduler import Scheduler

MAX_TOKENS, ANSWER_TOKENS = 4 * PAGE_SIZE, 3
"""Of the prompt and its answer together, and of the answer."""


def warm_up(executor: Executor, *, max_model_len: int, max_step_tokens: int) -> None:
    """Answer a prompt with a scheduler of its own. What that leaves on the device no later row reads: each begins with
    a state and pages of its own. max_model_len, max_step_tokens: what the device has room for."""
    tokens = min(MAX_TOKENS, max_model_len)
    prompt = np.zeros(max(1, tokens - ANSWER_TOKENS), np.int32)
    scheduler = Scheduler(
        num_pages=1 + -(-tokens // PAGE_SIZE),
        max_model_len=tokens,
        max_num_seqs=1,
        max_num_batched_tokens=max_step_tokens,
        enable_prefix_caching=False,
    )
    answer = tokens - len(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    scheduler.add(rid=0, prompt=prompt, params=params, max_tokens=answer)
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        plan = scheduler.plan()
        if plan is not None:
            executor.launch(plan)
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == STEPS_IN_FLIGHT):
            scheduler.commit(in_flight.popleft(), executor.collect())

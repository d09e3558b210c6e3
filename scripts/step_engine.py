"""The engine that benchmarks of steps drive: scheduler and executor of one model in this thread, without HTTP.

Steps run in the loop's order, two in flight, so the time between two that were collected is what a stream would see,
host work included:

    host    plan N | launch N | wait for N-1 | commit N-1 | plan N+1 | launch N+1 | wait for N | commit N | ...
    device  ----------- step N-1 ----------][-------------------- step N --------------------][--- step N+1 --

Rows come in two ways: `start_rows` has so many decode at once, all from the same length of prompt, until `end_rows`;
in a `ClosedLoop` another one follows each that ends.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.config import EngineConfig
from asyncengine.sampling import SamplingParams
from gpu_runner.device.build import build_executor
from gpu_runner.device.executor import Executor
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.scheduler import Scheduler, num_slots_for

DATA = Path(__file__).parent / "data"
"""Folders with a config.json: shapes of models, for random weights."""
WARM_STEPS = 20
"""Of rows that all decode, before the first that is measured."""
SPARE_STEPS = 400
"""So many more than they are asked for can rows decode: the first do while others prefill."""


class HostTimes(NamedTuple):
    """Seconds of one turn by what the host did; waiting for the device is none of it."""

    plan: float
    launch: float
    commit: float


class Engine:
    """Scheduler and executor of one model; `turn` is one round of the GPU loop."""

    def __init__(self, model: Path, config: EngineConfig, *, graphs: bool = True) -> None:
        """graphs: as of `build_executor`."""
        started = time.perf_counter()
        phases: dict[str, float] = {}

        def progress(phase: str, done: int, total: int) -> None:
            phases.setdefault(phase, time.perf_counter() - started)

        self.config = config
        self.executor: Executor = build_executor(
            config, str(model), progress, num_slots=num_slots_for(config.max_num_seqs), graphs=graphs
        )
        print(f"ready after {time.perf_counter() - started:.1f} s; phases began at", end=" ")
        print(", ".join(f"{name} {at:.1f} s" for name, at in phases.items()), flush=True)
        self.reset()

    def reset(self) -> None:
        self.scheduler = Scheduler(
            num_pages=self.executor.num_pages,
            max_model_len=self.executor.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.executor.max_step_tokens,
            enable_prefix_caching=False,
        )
        self.in_flight: deque[StepPlan] = deque()
        self.host_s = HostTimes(0.0, 0.0, 0.0)

    def add(self, rid: int, prompt: np.ndarray, max_tokens: int, *, temperature: float = 0.0, **sampling: Any) -> None:
        """sampling: as of `SamplingParams`."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=max_tokens)

    def turn(self) -> StepPlan | None:
        """Plan and launch a step, then collect the one before; returns the collected step's plan."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        if plan is not None:
            self.executor.launch(plan)
            self.in_flight.append(plan)
        launched = time.perf_counter()
        self.host_s = HostTimes(planned - begin, launched - planned, 0.0)
        if not self.in_flight or (plan is not None and len(self.in_flight) < 2):
            return None
        collected = self.in_flight.popleft()
        result = self.executor.collect()
        begin = time.perf_counter()
        self.scheduler.commit(collected, result)
        self.host_s = self.host_s._replace(commit=time.perf_counter() - begin)
        return collected

    def drain(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.turn()


def prompts(count: int, length: int, vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length, dtype=np.int32) for _ in range(count)]


def start_rows(engine: Engine, batch: int, length: int, steps: int) -> float:
    """Decodes until all rows do, from prompts of `length` tokens; each row decodes `SPARE_STEPS` times more often than
    `steps`, those while others prefill among them. Returns the mean context of the first step in which all do. Raises
    InvalidRequestError if that is more than the context holds, SystemExit if the rows never all decode."""
    engine.reset()
    for rid, prompt in enumerate(prompts(batch, length, engine.executor.model_config.vocab_size)):
        engine.add(rid, prompt, steps + SPARE_STEPS)
    while (plan := engine.turn()) is None or plan.num_decode_rows < batch:
        if not engine.scheduler.has_work and not engine.in_flight:
            raise SystemExit(
                f"{batch} rows with prompts of {length} tokens never decode all at once: the first have ended, or the "
                f"KV cache of {engine.scheduler.rows.usable_tokens} tokens is full, before the last begin"
            )
    return mean_context(plan)


def end_rows(engine: Engine, batch: int) -> None:
    for rid in range(batch):
        engine.scheduler.abort(rid)
    engine.drain()


def mean_context(plan: StepPlan) -> float:
    """Of a step of decode rows: tokens that each attends to, its own included."""
    return float(plan.row_start.mean()) + 1.0


class ClosedLoop:
    """So many requests at all times: whenever one ends, the next comes. Their ends are spread evenly from the start."""

    def __init__(self, engine: Engine, streams: int, prompt_tokens: int, answer_tokens: int) -> None:
        engine.reset()
        self.engine = engine
        self._prompts = prompts(streams, prompt_tokens, engine.executor.model_config.vocab_size)
        self._answer_tokens = answer_tokens
        self._open: set[int] = set()
        self._added = 0
        for index in range(streams):
            self._add(1 + answer_tokens * (index + 1) // streams)

    def _add(self, max_tokens: int) -> None:
        self.engine.add(self._added, self._prompts[self._added % len(self._prompts)], max_tokens)
        self._open.add(self._added)
        self._added += 1

    def turn(self) -> StepPlan | None:
        plan = self.engine.turn()
        scheduler = self.engine.scheduler
        if scheduler.num_running + len(scheduler.queue) < len(self._open):
            for rid in self._open - scheduler.rids():
                self._open.remove(rid)
                self._add(self._answer_tokens)
        return plan

    def warm_up(self) -> None:
        """Until all requests that were there at first have ended."""
        while min(self._open) < len(self._open):
            self.turn()

    def end(self) -> None:
        for rid in self._open:
            self.engine.scheduler.abort(rid)
        self.engine.drain()

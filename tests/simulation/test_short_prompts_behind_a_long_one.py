"""A prompt that has to wait for pages, with short ones behind it, on a simulated H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from simulation.replica import ReplicaConfig
from simulation.run import Run, simulate
from simulation.step_model import StepModel, read_step_model
from simulation.traces import TraceRequest

FILE = read_step_model(Path(__file__).parents[2] / "scripts" / "step_models" / "h200-llama-3.1-8b.json")
CONFIG = ReplicaConfig(kv_cache_tokens=26_000, max_model_len=FILE.max_model_len)
RUNNING, LONG, SHORT = 10_000, 16_384, 1_024
OUTPUT = 64
LONG_ENDS = 1_000


def run_of(prompts: list[int]) -> Run:
    """A request that holds pages for seconds, and half a second later these prompts."""
    arrivals = [(0, RUNNING, LONG_ENDS), *((500_000_000, prompt, OUTPUT) for prompt in prompts)]
    trace = [TraceRequest(n, at, p, o, first_id=n * LONG) for n, (at, p, o) in enumerate(arrivals)]
    return simulate(trace, CONFIG, StepModel(FILE.coefficients))


def ttft_s(run: Run) -> np.ndarray:
    """[prompts], of those that came second."""
    seconds: np.ndarray = (run.records.first - run.records.arrival)[1:] / 1e9
    return seconds


def test_short_prompts_pass_one_that_waits_for_pages_and_it_waits_hardly_longer_than_without_them() -> None:
    alone = ttft_s(run_of([LONG]))[0]
    long, *short = ttft_s(run_of([LONG, *[SHORT] * 8]))
    assert alone > 3  # until the one that ran has ended
    assert np.median(short) < 2
    assert long <= 1.15 * alone

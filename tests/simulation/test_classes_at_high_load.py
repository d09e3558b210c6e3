"""Interactive requests beside as many of the background, at 90 % of what a simulated H200 can take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from simulation.replica import ReplicaConfig
from simulation.run import Run, capacity_ns, simulate
from simulation.step_model import StepModel, read_step_model
from simulation.terms import with_terms
from simulation.traces import TraceRequest, from_jobs, scaled

from asyncengine.bench.workload import Load

FILE = read_step_model(Path(__file__).parents[2] / "scripts" / "step_models" / "h200-llama-3.1-8b.json")
MODEL = StepModel(FILE.coefficients)
CONFIG = ReplicaConfig(kv_cache_tokens=FILE.kv_cache.tokens, max_model_len=FILE.max_model_len, max_num_seqs=64)
LOAD = 0.9


class Trace(NamedTuple):
    """capacity_ns: what all requests take that are there at once, in one queue."""

    requests: list[TraceRequest]
    capacity_ns: int


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Lengths of Azure's conversation trace; in the middle third they come three times as often as in the others."""
    drawn = from_jobs(Load(requests=500, rate=1.0, lengths="conversation").jobs())
    last = drawn[-1].at_ns
    at = np.interp([each.at_ns for each in drawn], (0, last / 5, 4 * last / 5, last), (0, last / 3, 2 * last / 3, last))
    requests = [replace(request, at_ns=int(ns)) for request, ns in zip(drawn, at, strict=True)]
    capacity = capacity_ns(requests, CONFIG, MODEL)
    return Trace(scaled(requests, capacity / LOAD / last), capacity)


def interactive(run: Run) -> np.ndarray:
    return ~run.records.is_background


def ttft_p99_ms(run: Run, members: np.ndarray) -> float:
    return float(np.percentile((run.records.first - run.records.arrival)[members] / 1e6, 99))


def output_per_s(run: Run) -> float:
    return float(run.records.output_tokens.sum() / run.records.end.max() * 1e9)


def test_interactive_requests_keep_their_targets_and_throughput_is_that_of_one_queue(trace: Trace) -> None:
    mixed = simulate(with_terms(trace.requests, background=0.5), CONFIG, MODEL)
    plain = simulate(with_terms(trace.requests, background=1.0), CONFIG, MODEL)
    everyone = np.ones(len(trace.requests), np.bool_)
    gaps, of_interactive = np.concatenate(mixed.records.gaps) / 1e6, interactive(mixed)[mixed.records.later()[0]]
    assert ttft_p99_ms(mixed, interactive(mixed)) <= 1000 < ttft_p99_ms(plain, everyone)
    assert np.percentile(gaps[of_interactive], 99) <= 50 < np.percentile(np.concatenate(plain.records.gaps) / 1e6, 99)
    assert output_per_s(mixed) == pytest.approx(output_per_s(plain), rel=0.03)


def test_with_all_there_at_once_throughput_is_that_of_one_queue(trace: Trace) -> None:
    mixed = simulate(with_terms(scaled(trace.requests, 0.0), background=0.5), CONFIG, MODEL)
    assert mixed.records.end.max() <= 1.03 * trace.capacity_ns

"""What a tenant with a request a second sees of another that sends 200 long prompts at once, on a simulated H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulation.replica import ReplicaConfig
from simulation.run import Run, simulate
from simulation.step_model import StepModel, read_step_model
from simulation.traces import TraceRequest

from asyncengine.config import ServiceClass
from asyncengine.terms import Terms

FILE = read_step_model(Path(__file__).parents[2] / "scripts" / "step_models" / "h200-llama-3.1-8b.json")
MODEL = StepModel(FILE.coefficients)
ROOMY = ReplicaConfig(kv_cache_tokens=FILE.kv_cache.tokens, max_model_len=FILE.max_model_len)
TIGHT = ROOMY._replace(kv_cache_tokens=200_000)
LONG, SECONDS = 8192, 30


def ttft_ms(run: Run, trace: list[TraceRequest], *, since_start: bool = False) -> np.ndarray:
    """Of tenant b's requests; of those that came before a's last prompt was computed, where there is an a."""
    of_b = np.array([request.terms.tenant == "b" for request in trace])
    records = run.records
    if not of_b.all():
        of_b &= records.arrival < records.first[~of_b].max()
        assert of_b.sum() >= SECONDS
    ms: np.ndarray = ((records.started if since_start else records.first) - records.arrival)[of_b] / 1e6
    return ms


def run_of(config: ReplicaConfig, prompt: int, *, crowd: ServiceClass | None) -> tuple[Run, list[TraceRequest]]:
    """Tenant b sends one prompt a second, each at a random moment of it; a its 200, if there is a `crowd`."""
    moments = np.random.default_rng(0).random(SECONDS)
    wanted = [(round(1e9 * (second + at)), prompt, 64, Terms(tenant="b")) for second, at in enumerate(moments)]
    if crowd is not None:
        wanted += [(0, LONG, 128, Terms(tenant="a", service_class=crowd))] * 200
    wanted.sort(key=lambda each: each[0])
    trace = [TraceRequest(n, at, p, o, first_id=n * LONG, terms=terms) for n, (at, p, o, terms) in enumerate(wanted)]
    return simulate(trace, config, MODEL), trace


@pytest.mark.parametrize(("config", "crowd"), [(ROOMY, "interactive"), (TIGHT, "interactive"), (TIGHT, "background")])
def test_a_light_tenants_p99_ttft_is_at_most_twice_what_it_is_alone(config: ReplicaConfig, crowd: ServiceClass) -> None:
    alone = ttft_ms(*run_of(config, LONG, crowd=None))
    crowded = ttft_ms(*run_of(config, LONG, crowd=crowd))
    assert np.percentile(crowded, 99) <= 2 * np.percentile(alone, 99)


@pytest.mark.parametrize("prompt", [512, 2048])
def test_a_light_tenants_short_prompt_is_in_the_first_step_planned_behind_its_arrival(prompt: int) -> None:
    """Where pages have to come back first, it is in the one that is planned when they have."""
    run, trace = run_of(ROOMY, prompt, crowd="interactive")
    longest_step_ms = 90.0  # 2048 tokens behind the longest context, beside the rows that decode
    assert np.concatenate(run.records.gaps).max() / 1e6 <= longest_step_ms
    assert ttft_ms(run, trace, since_start=True).max() <= longest_step_ms
    assert ttft_ms(run, trace).max() <= 3 * longest_step_ms

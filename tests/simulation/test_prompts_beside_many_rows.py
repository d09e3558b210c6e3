"""What it is worth, and what it costs, that prompts beside many rows wait for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulation.records import Target, Targets
from simulation.replica import ReplicaConfig
from simulation.run import simulate_closed_loop
from simulation.step_model import StepModel, read_step_model
from simulation.traces import load_trace

from gpu_runner.schedule import prompt_batches
from gpu_runner.schedule.prompt_batches import HOLD_NS

MODELS = Path(__file__).parents[2] / "scripts" / "step_models"
TARGETS: Targets = {"interactive": Target(1000, 50), "background": Target(60_000, 500)}


def streams(name: str, concurrency: int, *, requests: int = 1000) -> dict[str, Any]:
    file = read_step_model(MODELS / f"{name}.json")
    config = ReplicaConfig(
        kv_cache_tokens=file.kv_cache.tokens, max_model_len=8192, max_num_seqs=256, prefix_caching=False
    )
    trace = load_trace("sharegpt", limit=requests)
    run = simulate_closed_loop(trace, config, StepModel(file.coefficients), concurrency=concurrency)
    return run.figures(TARGETS)


@pytest.mark.parametrize(("name", "gain"), [("h200-qwen3-0.6b-served", 1.05), ("h200-llama-3.1-8b-served", 1.028)])
def test_256_streams_get_more_tokens_a_second_for_20_ms_of_ttft(
    name: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = streams(name, 256)
    monkeypatch.setattr(prompt_batches, "MANY_ROWS", 1_000_000)
    at_once = streams(name, 256)
    assert held["output_tokens_per_s"] > gain * at_once["output_tokens_per_s"]
    assert held["ttft_ms"]["p50"] < at_once["ttft_ms"]["p50"] + HOLD_NS / 1e6 + held["gap_ms"]["p50"]  # steps are whole
    assert held["gap_ms"]["p50"] < at_once["gap_ms"]["p50"]
    assert held["gap_ms"]["p99"] <= at_once["gap_ms"]["p99"]


def test_32_streams_are_served_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    held = streams("h200-qwen3-0.6b-served", 32, requests=300)
    monkeypatch.setattr(prompt_batches, "MANY_ROWS", 1_000_000)
    at_once = streams("h200-qwen3-0.6b-served", 32, requests=300)
    assert held | {"cpu_s": 0} == at_once | {"cpu_s": 0}

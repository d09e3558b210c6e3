"""Streams that decode on a simulated H200 while prompts of 64k tokens are computed beside them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from simulation.records import Records
from simulation.replica import Replica, ReplicaConfig
from simulation.step_model import StepModel, read_step_model
from simulation.traces import TraceRequest

from gpu_runner.schedule.plan import StepPlan

MODELS = Path(__file__).parents[2] / "scripts" / "step_models"
STREAMS, PROMPT = 32, 64 * 1024
LLAMA_8B, QWEN_600M = "h200-llama-3.1-8b", "h200-qwen3-0.6b"


class ChangingModel(StepModel):
    """Whose steps take `factor` as long."""

    factor = 1.0

    def step_ns(self, plan: StepPlan) -> int:
        return round(self.factor * super().step_ns(plan))


class Prefilled(NamedTuple):
    """One long prompt: what the streams waited meanwhile, in ms, of each step, and how long it took."""

    gaps_ms: np.ndarray
    seconds: float

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.gaps_ms, 99))


class Streams:
    """An engine on which 32 interactive requests with 1,000 tokens each decode, and have for a while."""

    def __init__(self, name: str, *, gap_ms: float = 50.0) -> None:
        file = read_step_model(MODELS / f"{name}.json")
        self.model = ChangingModel(file.coefficients)
        config = ReplicaConfig(kv_cache_tokens=file.kv_cache.tokens, max_model_len=131_072, interactive_gap_ms=gap_ms)
        requests = [TraceRequest(index, 0, 1000, 30_000, first_id=index * 10**6) for index in range(STREAMS)]
        self.prompts = [TraceRequest(STREAMS + n, 0, PROMPT, 1, first_id=(STREAMS + n) * 10**6) for n in range(3)]
        self.records = Records(requests + self.prompts)
        self.replica = Replica(config, self.model, self.records)
        for request in requests:
            self.replica.submit(request, 0)
        for _ in range(100):
            self.replica.turn()

    def prefill(self) -> Prefilled:
        records, replica, prompt = self.records, self.replica, self.prompts.pop()
        records.gaps.clear()
        replica.submit(prompt, replica.now_ns)
        while not records.ran[prompt.index]:
            replica.turn()
        gaps = np.array([step[0] for step in records.gaps]) / 1e6  # all streams see the same
        seconds = float(records.end[prompt.index] - records.arrival[prompt.index]) / 1e9
        return Prefilled(gaps, seconds)


@pytest.mark.parametrize("name", [LLAMA_8B, QWEN_600M])
def test_streams_keep_their_gap_while_a_prompt_of_64k_tokens_is_computed(name: str) -> None:
    limited, free = Streams(name), Streams(name, gap_ms=10_000)
    first, second, without = limited.prefill(), limited.prefill(), free.prefill()
    assert np.count_nonzero(first.gaps_ms > 50.0) <= 1, "no such prompt was seen before"
    assert first.gaps_ms.max() < 53
    assert second.gaps_ms.max() <= 50.0
    assert limited.replica.scheduler.gauges()["step_time_error_permille"] <= 5
    assert without.p99_ms > 60
    # each further step decodes once more for all streams
    more = len(second.gaps_ms) - len(without.gaps_ms)
    decode_s = float(second.gaps_ms.min()) / 1e3
    assert second.seconds < 1.08 * without.seconds
    assert second.seconds - more * decode_s < 1.01 * without.seconds


@pytest.mark.parametrize("name", [LLAMA_8B, QWEN_600M])
def test_a_device_that_becomes_three_times_slower_is_known_again_within_a_few_steps(name: str) -> None:
    streams = Streams(name)
    streams.prefill()
    streams.model.factor = 3.0
    during, after = streams.prefill(), streams.prefill()
    assert np.count_nonzero(during.gaps_ms > 50.0) < 10
    assert during.gaps_ms[20:].max() <= 50.5
    assert after.gaps_ms.max() <= 50.0


def test_streams_keep_their_gap_though_no_step_was_ever_without_a_prompt() -> None:
    file = read_step_model(MODELS / f"{LLAMA_8B}.json")
    config = ReplicaConfig(kv_cache_tokens=file.kv_cache.tokens, max_model_len=8192)
    requests = [TraceRequest(index, 0, 4000, 100, first_id=index * 10**4) for index in range(100)]
    records = Records(requests)
    replica = Replica(config, StepModel(file.coefficients), records)
    for request in requests:
        replica.submit(request, 0)
    while replica.busy:
        replica.turn()
    assert np.percentile(np.concatenate(records.gaps) / 1e6, 99) <= 50.05

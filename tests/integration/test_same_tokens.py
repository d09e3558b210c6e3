"""Scheduling must not show in the tokens: SmolLM2's greedy answers are the same however they were computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.shallow_model import shallow_model_file

from asyncengine.config import EngineConfig
from asyncengine.sampling import SamplingParams
from asyncengine.tokenizer_file import load_tokenizer
from gpu_runner.device import build
from gpu_runner.device.build import build_executor
from gpu_runner.device.executor import Executor
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import load_model
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.scheduler import Scheduler, num_slots_for

pytestmark = pytest.mark.timeout(300)

MAX_TOKENS = 16
SHORT = 10
MAX_NUM_SEQS = 8
STORY = "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote one line in his book. "
TEXTS = (
    "What is the capital of France?",
    STORY * 2,
    STORY * 2 + "One night the line he wrote was different:",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\n",
    STORY * 3 + "The end of the story is that",
)


@cache
def prompts() -> tuple[np.ndarray, ...]:
    tokenizer = load_tokenizer(str(shallow_model_file())).tokenizer
    return tuple(np.array(tokenizer.encode(text).ids, np.int32) for text in TEXTS)


class LocalEngine:
    """Scheduler and executor of one configuration, in the loop's order, two steps deep."""

    def __init__(
        self, *, kv_cache_tokens: int, max_num_batched_tokens: int, enable_prefix_caching: bool = True
    ) -> None:
        config = EngineConfig(
            device="cpu",
            kv_cache_tokens=kv_cache_tokens,
            max_model_len=min(512, kv_cache_tokens),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.executor: Executor = build_executor(
            config, str(shallow_model_file()), lambda *_: None, num_slots=num_slots_for(MAX_NUM_SEQS)
        )
        self.scheduler = Scheduler(
            num_pages=self.executor.num_pages,
            max_model_len=self.executor.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_ids=self.executor.model_config.eos_ids,
            enable_prefix_caching=enable_prefix_caching,
        )

    def run(self, batch: tuple[np.ndarray, ...], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
        """Greedy answers to prompts that arrive together."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for rid, prompt in enumerate(batch):
            self.scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=max_tokens)
        answers: dict[int, list[int]] = {rid: [] for rid in range(len(batch))}
        rid_of: dict[tuple[int, int], int] = {}
        in_flight: deque[StepPlan] = deque()
        while self.scheduler.has_work or in_flight:
            plan = self.scheduler.plan()
            if plan is not None:
                self.executor.launch(plan)
                in_flight.append(plan)
            if in_flight and (plan is None or len(in_flight) == 2):
                output = self.scheduler.commit(in_flight.popleft(), self.executor.collect())
                rid_of.update({(row.slot, row.gen): row.rid for row in output.opens})
                for slot, gen, token in zip(output.slots, output.gens, output.tokens, strict=True):
                    answers[rid_of[int(slot), int(gen)]].append(int(token))
        self.scheduler.check_integrity()
        return list(answers.values())

    def close(self) -> None:
        self.executor.close()


@cache
def answers_alone() -> list[list[int]]:
    """The reference: no prefix cache, every prompt alone and in one chunk."""
    engine = LocalEngine(kv_cache_tokens=4096, max_num_batched_tokens=512, enable_prefix_caching=False)
    answers = [engine.run((prompt,))[0] for prompt in prompts()]
    engine.close()
    return answers


@pytest.fixture(scope="module", autouse=True)
def one_load() -> Iterator[None]:
    """Weights are the same in every configuration, and are read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_model", cached_load)
        yield
        loaded.cache_clear()


@cache
def loaded(path: str) -> Decoder:
    return load_model(path, device=torch.device("cpu"), dtype=torch.float32, progress=lambda *_: None)


def cached_load(path: str, *, dtype: torch.dtype, **options: Any) -> Decoder:
    assert dtype == torch.float32
    return loaded(path)


@pytest.mark.parametrize(
    ("chunk_tokens", "enable_prefix_caching"),
    [(16, True), (512, True), (512, False)],
    ids=["short chunks and a prefix cache", "long chunks and a prefix cache", "no prefix cache"],
)
def test_in_a_batch_of_8_with_any_chunk_size_and_prefix_cache_on_or_off(
    chunk_tokens: int, enable_prefix_caching: bool
) -> None:
    engine = LocalEngine(
        kv_cache_tokens=4096, max_num_batched_tokens=chunk_tokens, enable_prefix_caching=enable_prefix_caching
    )
    expected = [answer[:SHORT] for answer in answers_alone()]
    assert engine.run(prompts(), SHORT) == expected
    if enable_prefix_caching:
        hits = engine.scheduler.counters.prefix_hit_tokens
        assert engine.run(prompts(), SHORT) == expected, "and again, with what is cached now"
        assert engine.scheduler.counters.prefix_hit_tokens > hits
    else:
        assert engine.scheduler.counters.prefix_hit_tokens == 0
    engine.close()


def test_with_rows_retracted_and_resumed() -> None:
    engine = LocalEngine(kv_cache_tokens=112, max_num_batched_tokens=64)
    assert engine.run(prompts()) == answers_alone()
    assert engine.scheduler.counters.preemptions > 0
    engine.close()

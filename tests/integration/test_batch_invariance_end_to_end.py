"""SmolLM2's first layers in the batch-invariant mode, through all processes: bit for bit the same log-probabilities."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from support.eventually import eventually
from support.shallow_model import shallow_model_file

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.logprobs import PromptLogprob, TokenLogprob

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

PROMPT = "The river had been rising for three days, and nobody in the village slept. In the morning the miller"
ASKED = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1, max_tokens=6, ignore_eos=True),
    "seeded": SamplingParams(seed=5, top_p=0.9, logprobs=2, max_tokens=6, ignore_eos=True),
}
OTHER = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
Told = tuple[list[int], list[TokenLogprob], list[PromptLogprob] | None]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=str(shallow_model_file()),
        device="cpu",
        batch_invariant=True,
        kv_cache_tokens=4096,
        max_model_len=256,
        max_num_seqs=32,
        max_crashes=1000,
    )
    async with AsyncEngine.start(config) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(engine: AsyncEngine) -> dict[str, Told]:
    assert engine.info.batch_invariant
    assert engine.info.fingerprint.endswith("/float32/cpu/batch-invariant")
    return {name: await ask(engine, name) for name in ASKED}


async def ask(engine: AsyncEngine, name: str, heard: Callable[[int], None] = lambda tokens: None) -> Told:
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt = None
    async for delta in engine.generate(PROMPT, ASKED[name], namespace=name):
        ids += delta.token_ids
        logprobs += delta.logprobs
        prompt = delta.prompt_logprobs if delta.prompt_logprobs is not None else prompt
        heard(len(delta.token_ids))
    return ids, logprobs, prompt


async def other(engine: AsyncEngine, number: int) -> None:
    async for _ in engine.generate(f"{number} of" * (1 + number % 3), OTHER):
        pass


async def test_answers_beside_31_others_and_from_the_prefix_cache_are_those_alone(
    engine: AsyncEngine, alone: dict[str, Told]
) -> None:
    others = [other(engine, number) for number in range(30)]
    *_, greedy, seeded = await asyncio.gather(*others, *(ask(engine, name) for name in ASKED))
    assert {"greedy": greedy, "seeded": seeded} == alone
    for ids, logprobs, _ in alone.values():
        assert len(ids) == len(logprobs) == 6
    assert alone["greedy"][2] is not None


async def test_answers_are_the_same_when_gpu_runner_is_killed_while_they_are_written(
    engine: AsyncEngine, alone: dict[str, Told]
) -> None:
    before = engine._supervisor.pids()["gpu_runner"]
    left = 5  # of 12 tokens, which may come in as few as two deltas

    def heard(tokens: int) -> None:
        nonlocal left
        if 0 < left <= tokens:
            os.kill(before, signal.SIGKILL)
        left -= tokens

    others = [other(engine, number) for number in range(3)]
    answers = await asyncio.gather(*(ask(engine, name, heard) for name in ASKED), *others)
    assert answers[: len(ASKED)] == list(alone.values())
    await eventually(lambda: engine._supervisor.pids()["gpu_runner"] != before)

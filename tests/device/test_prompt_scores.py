"""Log-probabilities of prompts, chunk by chunk and among other rows, against the logits of a plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.device_engine import DeviceEngine, device_engine, greedy, random_prompts
from support.engine_core import EngineCore
from support.random_model import VOCAB_SIZE, write_config
from support.reference_logits import ReferenceLogits

from asyncengine.config import Device
from asyncengine.sampling import SamplingParams
from asyncengine.wire.frames import PromptLogprobs

pytestmark = pytest.mark.timeout(400)

MAX_NUM_SEQS = 6
"""And so many tokens are scored in a step of 32 at most."""
LENGTHS = [1, 2, 33, 16, 17, 80]
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    name: Device = request.param
    return name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine(model: str, device: Device) -> Iterator[DeviceEngine]:
    options: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "max_num_seqs": MAX_NUM_SEQS}
    with device_engine(model, device=device, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(model: str, device: Device) -> ReferenceLogits:
    return ReferenceLogits(model, dtype=torch.float32, device=torch.device(device))


def ask(prompt_logprobs: int | None, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 4, "ignore_eos": True, "temperature": 0.0, "prompt_logprobs": prompt_logprobs, **params}
    )


def items(prompt: PromptLogprobs) -> list[tuple[int, float, int, list[int], list[float]]]:
    """Of each token: id, log-probability, rank, most likely ids and theirs."""
    ids, logprobs = np.frombuffer(prompt.ids, np.int32).tolist(), np.frombuffer(prompt.logprobs, np.float32).tolist()
    begin, tokens = 0, []
    ends, ranks = (np.frombuffer(numbers, np.int32).tolist() for numbers in (prompt.item_ends, prompt.ranks))
    for end, rank in zip(ends, ranks, strict=True):
        tokens.append((ids[begin], logprobs[begin], rank, ids[begin + 1 : end], logprobs[begin + 1 : end]))
        begin = end
    assert begin == len(ids) == len(logprobs)
    return tokens


def check(core: EngineCore, rid: int, num_top: int, reference: ReferenceLogits) -> None:
    prompt = core.prompts[rid].tolist()
    (first, first_logprob, first_rank, *tops), *rest = items(core.prompt_logprobs[rid])
    assert (first, first_rank, tops) == (prompt[0], 0, [[], []])
    assert np.isnan(first_logprob)
    assert [token for token, *_ in rest] == prompt[1:]
    logits = reference(prompt)[:-1]
    expected = logits.log_softmax(dim=1)
    for row, (token, logprob, rank, top_ids, top_logprobs) in zip(expected, rest, strict=True):
        own = float(row[token])
        assert logprob == pytest.approx(own, abs=TOLERANCE)
        assert int((row > own + TOLERANCE).sum()) < rank <= int((row >= own - TOLERANCE).sum())
        assert len(set(top_ids)) == num_top
        assert top_logprobs == pytest.approx(row[top_ids].tolist(), abs=TOLERANCE)
        assert top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=TOLERANCE)
        assert top_logprobs == sorted(top_logprobs, reverse=True)
        if token in top_ids:
            assert rank == 1 + top_ids.index(token)
            assert logprob == top_logprobs[rank - 1]


def test_prompts_of_all_lengths_are_scored_a_few_tokens_a_step_beside_rows_that_decode(
    engine: DeviceEngine, reference: ReferenceLogits
) -> None:
    core = engine.core()
    plain = random_prompts([5, 40], VOCAB_SIZE, seed=9)
    for rid, prompt in enumerate(plain):
        core.add_request(100 + rid, prompt, greedy(60))
    for _ in range(4):
        core.turn()
    counts = [0, 1, 5, 20, 3, 2]
    for rid, (prompt, count) in enumerate(zip(random_prompts(LENGTHS, VOCAB_SIZE), counts, strict=True)):
        core.add_request(rid, prompt, ask(count, logprobs=1 if rid % 2 else None))
    core.run()
    core.assert_nothing_held()
    for rid, count in enumerate(counts):
        check(core, rid, count, reference)
        assert len(core.outputs[rid]) == 4
    scored = [len(plan.scores) for plan in core.plans]
    assert sum(scored) == sum(LENGTHS) - len(LENGTHS)
    assert max(scored) == MAX_NUM_SEQS
    assert any(len(plan.scores) and plan.num_decode_rows for plan in core.plans)
    assert set(core.prompt_logprobs) == set(range(6))
    for rid, prompt in enumerate(plain, start=100):
        assert reference.gaps(prompt, core.outputs[rid]).max() < TOLERANCE


def test_a_cached_prompt_is_computed_again_for_its_scores_and_may_be_used_by_others(
    engine: DeviceEngine, reference: ReferenceLogits
) -> None:
    core = engine.core()
    (prompt,) = random_prompts([50], VOCAB_SIZE, seed=2)
    core.add_request(1, prompt, greedy(3))
    core.run()
    core.add_request(2, prompt, ask(2, n=3))
    core.run()
    for choice in (2, 3, 4):
        check(core, choice, 2, reference)
    assert core.scheduler.gauges()["prefix_hit_tokens"] == 0
    core.add_request(10, prompt, greedy(3))
    core.run()
    assert core.scheduler.gauges()["prefix_hit_tokens"] == 48
    assert reference.gaps(prompt, core.outputs[10]).max() < TOLERANCE
    core.assert_nothing_held()


@pytest.mark.parametrize("num_pages", [10, 13])
def test_retracted_rows_score_each_token_once(engine: DeviceEngine, reference: ReferenceLogits, num_pages: int) -> None:
    core = EngineCore(
        num_pages=num_pages,
        max_model_len=engine.executor.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=engine.executor.max_step_tokens,
        vocab_size=VOCAB_SIZE,
        device=engine.executor,
    )
    prompts = random_prompts([30, 44, 60], VOCAB_SIZE, seed=3)
    for rid, prompt in enumerate(prompts):
        core.add_request(rid, prompt, ask(rid, max_tokens=40))
    core.run()
    core.assert_nothing_held()
    assert core.scheduler.counters.preemptions > 0
    assert sum(len(plan.scores) for plan in core.plans) == sum(map(len, prompts)) - 3
    for rid in range(3):
        check(core, rid, rid, reference)


def test_the_scores_of_aborted_rows_go_nowhere(engine: DeviceEngine, reference: ReferenceLogits) -> None:
    core = engine.core()
    prompts = random_prompts([40, 40], VOCAB_SIZE, seed=4)
    core.add_request(1, prompts[0], ask(1))
    core.turn()
    core.turn()
    core.abort(1)
    core.add_request(2, prompts[1], ask(1))
    core.run()
    assert set(core.prompt_logprobs) == {2}
    check(core, 2, 1, reference)
    core.assert_nothing_held()

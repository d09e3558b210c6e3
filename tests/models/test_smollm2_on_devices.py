"""The embedded model's real weights in whole steps on a GPU, in its captured graphs.

That the CPU gives transformers' tokens is shown elsewhere, so here too transformers in float32 says which are right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.device_engine import device_engine, greedy
from torch import Tensor

from asyncengine.config import DType
from asyncengine.sampling import SamplingParams

pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
from smollm2 import model_file, random_prompts, transformers_model

MAX_GAP: dict[DType, float] = {"float32": 0.05, "bfloat16": 0.5}
"""Of the reference's logits, whose deviation is about 4: by how much a chosen token may be worse than the best. In
bfloat16 transformers' own choices are by up to 0.2 over these prompts, and the plain operations' by up to 0.3."""
MAX_FLIPS: dict[DType, float] = {"float32": 0.002, "bfloat16": 0.03}
"""Share of tokens that are not the reference's best. In bfloat16 it is 1.4 % for transformers itself."""
MAX_ERROR: dict[DType, float] = {"float32": 1e-3, "bfloat16": 2e-2}
"""Of all logits' norm, against transformers in the same type on the same device. For one prompt transformers' own
bfloat16 logits are farther than that from its float32 ones."""
BFLOAT16_SLACK = 1.25
"""How much farther from float32's logits ours may be than transformers' own in the same type."""


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_answers_are_the_references_but_where_it_hardly_prefers_one(dtype: DType) -> None:
    path, num_tokens = model_file(), 64
    prompts = random_prompts(20)
    with device_engine(str(path), device="cuda", dtype=dtype, max_num_seqs=8, step_tokens=32) as engine:
        answers = engine.run_with_logits(
            [np.array(prompt, np.int32) for prompt in prompts], [greedy(num_tokens)] * len(prompts)
        )
    exact = transformers_model(path).to("cuda")
    gaps: list[Tensor] = []
    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        logits = logits_before(exact, prompt, tokens)
        gaps.append(logits.amax(dim=1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    gap = torch.cat(gaps)
    assert gap.shape == (len(prompts) * num_tokens,)
    assert gap.max() < MAX_GAP[dtype]
    assert (gap > 0).float().mean() <= MAX_FLIPS[dtype]

    truths = [logits_before(exact, prompt, tokens) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    same_type = exact.to(getattr(torch, dtype))
    difference = size = own_error = reference_error = 0.0
    for prompt, (tokens, logits), truth in zip(prompts, answers, truths, strict=True):
        expected = logits_before(same_type, prompt, tokens)
        difference += float((logits - expected).square().sum())
        size += float(expected.square().sum())
        own_error += float((logits - truth).square().sum())
        reference_error += float((expected - truth).square().sum())
    assert difference <= MAX_ERROR[dtype] ** 2 * size
    if dtype == "bfloat16":
        assert own_error <= BFLOAT16_SLACK**2 * reference_error


@torch.inference_mode()
def logits_before(model: Any, prompt: list[int], output: list[int]) -> Tensor:
    """[len(output), vocab] float32: from which the model would choose each of these tokens, given those before it."""
    tokens = torch.tensor([prompt + output[:-1]], device=model.device)
    logits: Tensor = model(tokens).logits[0, len(prompt) - 1 :].float().cpu()
    return logits


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_in_the_batch_invariant_mode_answers_beside_31_others_are_those_alone_bit_for_bit() -> None:
    params = SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=1, max_tokens=48, ignore_eos=True)
    prompts = [np.array(prompt, np.int32) for prompt in random_prompts(32)]
    with device_engine(
        str(model_file()), device="cuda", batch_invariant=True, max_num_seqs=32, step_tokens=256
    ) as engine:
        together, alone = engine.core(), engine.core(enable_prefix_caching=False)
        for rid, prompt in enumerate(prompts):
            together.add_request(rid, prompt, params)
        together.run()
        for rid in range(0, 32, 5):
            alone.add_request(rid, prompts[rid], params)
            alone.run()
    for rid in alone.outputs:
        assert together.outputs[rid] == alone.outputs[rid]
        assert together.logprobs[rid] == alone.logprobs[rid]
        assert together.prompt_logprobs[rid] == alone.prompt_logprobs[rid]

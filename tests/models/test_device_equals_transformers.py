"""Whole steps on a device, a GPU's captured graphs among them, against transformers on the same device and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_engine import DeviceEngine, device_engine, greedy, random_prompts
from torch import Tensor

from asyncengine.config import DType

transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
from tiny_models import GPU_DEVIATION, GPU_SHAPE, make_tiny  # noqa: E402 - needs transformers

pytestmark = pytest.mark.timeout(400)

PROMPT_LENGTHS = [1, 5, 16, 33, 47, 80]
"""With steps of 32 tokens, whole prompts and chunks, alone and beside decoding rows."""
NUM_TOKENS = 64
MAX_GAP = 0.05
BFLOAT16_ERROR, FLOAT32_ERROR = 2e-2, 1e-4
HEADS_OF_128: dict[str, Any] = {**GPU_SHAPE, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-rope-llama3", GPU_SHAPE),
    "mistral": ("mistral-window", GPU_SHAPE),
    "qwen2": ("qwen2-window", {key: value for key, value in GPU_SHAPE.items() if key != "head_dim"}),
    "qwen3": ("qwen3", GPU_SHAPE),
    "qwen3-128": ("qwen3", HEADS_OF_128),
}
ON_CPU = [("llama", "bfloat16"), ("qwen3-128", "float32")]
ON_GPU = [*((name, "bfloat16") for name in MODELS), ("qwen3", "float32"), ("qwen3-128", "float32")]


@dataclass(frozen=True, slots=True)
class Pair:
    engine: DeviceEngine
    reference: Any  # the transformers model, in the engine's dtype
    exact: Any  # the same weights in float32
    dtype: DType
    device: torch.device


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((device, *case), id=f"{device}-{case[0]}-{case[1]}", marks=marks)
        for device, cases, marks in (("cpu", ON_CPU, ()), ("cuda", ON_GPU, pytest.mark.gpu))
        for case in cases
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    device, model, dtype = request.param
    name, shape = MODELS[model]
    folder = tmp_path_factory.mktemp(model)
    make_tiny(name, shape=shape, deviation=GPU_DEVIATION).to(torch.bfloat16).save_pretrained(folder)
    with device_engine(str(folder), device=device, dtype=dtype) as engine:
        yield Pair(
            engine=engine,
            reference=read_model(folder, getattr(torch, dtype), device),
            exact=read_model(folder, torch.float32, device),
            dtype=dtype,
            device=torch.device(device),
        )


def read_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


@torch.inference_mode()
def logits_before(model: Any, prompt: list[int], output: list[int], device: torch.device) -> Tensor:
    """[len(output), vocab] float32: from which the model would choose each of these tokens, given those before it."""
    tokens = torch.tensor([prompt + output[:-1]], device=device)
    logits: Tensor = model(tokens).logits[0, len(prompt) - 1 :].float().cpu()
    return logits


def test_every_token_is_chosen_from_the_references_logits(pair: Pair) -> None:
    prompts = random_prompts(PROMPT_LENGTHS, 1000)
    answers = pair.engine.run_with_logits(prompts, [greedy(NUM_TOKENS)] * len(prompts))
    limit = FLOAT32_ERROR if pair.dtype == "float32" else BFLOAT16_ERROR
    for prompt, (tokens, logits) in zip(prompts, answers, strict=True):
        assert (len(tokens), logits.shape[0]) == (NUM_TOKENS, NUM_TOKENS)
        assert tokens == logits.argmax(dim=1).tolist(), "the tokens are the best of the step's own logits"
        expected = logits_before(pair.reference, prompt.tolist(), tokens, pair.device)
        assert (logits - expected).norm() <= limit * expected.norm()
        exact = logits_before(pair.exact, prompt.tolist(), tokens, pair.device)
        gap = exact.amax(dim=1) - exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if pair.dtype == "float32":
            assert tokens == exact.argmax(dim=1).tolist()
        assert gap.max() < MAX_GAP

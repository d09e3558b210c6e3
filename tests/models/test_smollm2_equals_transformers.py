"""The embedded model, read from its GGUF file, against transformers on weights dequantised here."""

from __future__ import annotations

import pytest
import torch
from paged_driver import PagedDriver
from smollm2 import model_file, random_prompts, transformers_model

from gpu_runner.models.registry import load_model

NUM_TOKENS = 64


@pytest.mark.timeout(400)
@torch.inference_mode()
def test_prompts_of_1_to_37_tokens_give_the_64_greedy_tokens_of_transformers() -> None:
    path = model_file()
    prompts = random_prompts(20)[
        ::6
    ]  # of 1, 13, 25 and 37 tokens, so that answers cross borders of pages at many places
    seen: list[tuple[int, int]] = []
    decoder = load_model(
        str(path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert decoder.config.tied_embeddings
    assert decoder.config.eos_ids == (2,)
    assert decoder.weight_bytes == 134_515_008 * 4
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    answers = PagedDriver(decoder, num_slots=len(prompts), max_tokens=112).greedy(prompts, NUM_TOKENS)
    model = transformers_model(path)
    for tokens, answer in zip(prompts, answers, strict=True):
        # Greedy by induction: given the same tokens before it, transformers chooses each of ours.
        logits = model(torch.tensor([tokens + answer[:-1]]), logits_to_keep=len(answer)).logits
        assert answer == logits[0].argmax(dim=-1).tolist()

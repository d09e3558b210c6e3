"""The decoder against transformers in float32 on the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import load_model


@pytest.fixture(scope="module", params=TINY_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(request.param, folder), load(folder)


def load(folder: Path) -> Decoder:
    return load_model(str(folder), device=torch.device("cpu"), dtype=torch.float32, progress=lambda done, total: None)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    difference = actual - expected
    assert difference.norm() <= 1e-4 * expected.norm()
    assert difference.abs().max() <= 1e-4 * expected.abs().max()


def test_whole_prompt_prefill_gives_the_same_logits(pair: tuple[PreTrainedModel, Decoder]) -> None:
    model, decoder = pair
    tokens = prompt(61, seed=1)
    assert_close(
        PagedDriver(decoder, num_slots=1, max_tokens=64).prefill(0, tokens, chunk=64), reference_logits(model, tokens)
    )


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunked_prefill_gives_the_same_logits(pair: tuple[PreTrainedModel, Decoder], chunk: int) -> None:
    model, decoder = pair
    tokens = prompt(53, seed=2)
    assert_close(
        PagedDriver(decoder, num_slots=1, max_tokens=64).prefill(0, tokens, chunk=chunk),
        reference_logits(model, tokens),
    )


def test_decode_and_prefill_rows_in_one_step_give_the_same_logits(pair: tuple[PreTrainedModel, Decoder]) -> None:
    model, decoder = pair
    texts = {0: prompt(17, seed=3), 1: prompt(33, seed=4), 2: prompt(1, seed=5), 3: prompt(48, seed=6), 4: prompt(3, 7)}
    driver = PagedDriver(decoder, num_slots=6, max_tokens=64)
    driver.step([(0, texts[0][:16]), (3, texts[3][:20]), (1, texts[1][:32])], num_decode_rows=0)
    mixed = [(1, texts[1][32:]), (0, texts[0][16:]), (3, texts[3][20:]), (2, texts[2]), (4, texts[4])]
    results = driver.step(mixed, num_decode_rows=2)
    for (slot, tokens), logits in zip(mixed, results, strict=True):
        assert_close(logits, reference_logits(model, texts[slot])[-len(tokens) :])


def test_64_greedy_tokens_are_equal_in_a_ragged_batch(pair: tuple[PreTrainedModel, Decoder]) -> None:
    model, decoder = pair
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 17, 40)]
    answers = PagedDriver(decoder, num_slots=5, max_tokens=112).greedy(prompts, 64)
    for tokens, answer in zip(prompts, answers, strict=True):
        # Greedy by induction: given the same tokens before it, transformers chooses each of ours.
        chosen = reference_logits(model, tokens + answer[:-1])[len(tokens) - 1 :].argmax(dim=-1)
        assert answer == chosen.tolist()


def test_a_sliding_window_changes_the_logits_of_late_positions_only(tmp_path: Path) -> None:
    tokens = prompt(40, seed=8)
    logits = []
    for name in ("mistral", "mistral-window"):
        save_tiny(name, tmp_path / name)
        logits.append(PagedDriver(load(tmp_path / name), num_slots=1, max_tokens=48).prefill(0, tokens, chunk=48))
    assert_close(logits[1][:19], logits[0][:19])
    assert (logits[1][19:] - logits[0][19:]).abs().amax(dim=-1).min() > 1e-3


def test_bfloat16_weights_are_widened_exactly(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    decoder = load(tmp_path)
    tokens = prompt(30, seed=9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(
        PagedDriver(decoder, num_slots=1, max_tokens=32).prefill(0, tokens, chunk=32), reference_logits(model, tokens)
    )

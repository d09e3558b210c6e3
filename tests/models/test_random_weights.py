"""Random weights of a model's shapes, for which a config.json is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import TINY_MODELS, make_tiny

from asyncengine.errors import StartupError
from gpu_runner.models.registry import load_model, random_model, read_model_config
from gpu_runner.models.weights import empty_weights, linear_shapes

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(TINY_MODELS))
def test_a_config_alone_gives_a_model_of_the_checkpoints_size(name: str, tmp_path: Path) -> None:
    make_tiny(name).save_pretrained(tmp_path)
    real = load_model(str(tmp_path), device=CPU, dtype=torch.float32, progress=lambda *_: None)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    random = random_model(str(tmp_path), device=CPU, dtype=torch.float32)
    assert random.weight_bytes == real.weight_bytes
    assert random.config == real.config


@pytest.mark.parametrize("name", list(TINY_MODELS))
def test_a_config_tells_the_shapes_of_the_weights_that_a_decoder_multiplies_by(name: str, tmp_path: Path) -> None:
    make_tiny(name).save_pretrained(tmp_path)
    config = read_model_config(str(tmp_path))
    weights = empty_weights(config, device=torch.device("meta"), dtype=torch.bfloat16)
    layer = weights.layers[0]
    multiplied = (layer.qkv, layer.o, layer.gate_up, layer.down, weights.lm_head)
    assert linear_shapes(config) == tuple(tuple(weight.shape) for weight in multiplied)


def test_random_weights_are_the_same_each_time_and_gains_are_one(tmp_path: Path) -> None:
    make_tiny("qwen3").save_pretrained(tmp_path)
    hidden = torch.randn(3, 48)
    first, second = (random_model(str(tmp_path), device=CPU, dtype=torch.float32).logits(hidden) for _ in range(2))
    assert torch.equal(first, second)
    assert 0.05 < float(first.std()) < 0.3


def test_a_folder_without_a_config_is_refused_for_random_weights_too(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        random_model(str(tmp_path), device=CPU, dtype=torch.float32)

"""A decoder whose norms are parts of the kernels around them, against the reference, with attention left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_model import write_config
from torch import Tensor

from gpu_runner.kernels import norm_rope
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.linear import SplitScratch
from gpu_runner.kernels.linear_config import DotConfig, FmaConfig, LinearConfig, TileConfig
from gpu_runner.kernels.ops import ModelOps
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.kernels.residual import NormedLinear, Residual
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder, DecoderWeights
from gpu_runner.models.registry import read_model_config
from gpu_runner.models.weights import random_weights

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter does not know bf16 products.
DTYPE, TOLERANCE = (torch.bfloat16, 1e-2) if ON_GPU else (torch.float32, 1e-5)
LAYERS = 3

FMA = FmaConfig(rows=32, block_k=64, depth=1, num_warps=1)
DOT = DotConfig(rows=16, block_k=32, stages=2, num_warps=2)
SPLIT = DotConfig(rows=64, block_k=16, stages=2, num_warps=4, split_k=2, weight_first=True)
TILE = TileConfig(tokens=16, rows=32, block_k=32, stages=2, num_warps=4, group=2)
Ways = dict[str, LinearConfig | None]


def attend(
    self: Any, residual: Residual, linear: NormedLinear, *_: Any, inv_freq: Tensor, num_heads: int, **__: Any
) -> Tensor:
    """The queries."""
    qkv = self.norm_linear(residual, linear)
    head_dim = 2 * len(inv_freq)
    return qkv[:, : num_heads * head_dim].contiguous().view(len(qkv), num_heads, head_dim)


class Reference(ReferenceOps):
    attend = attend


class Kernels(CudaOps):
    attend = attend


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Every linear layer has a shape of its own."""
    folder = write_config(
        tmp_path,
        hidden_size=72,
        intermediate_size=88,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
    )
    return read_model_config(folder)


@pytest.fixture
def weights(config: ModelConfig) -> DecoderWeights:
    """Gains are no two alike."""
    torch.manual_seed(0)
    weights = random_weights(config, device=DEVICE, dtype=DTYPE)
    for layer in weights.layers:
        for gain in (layer.input_norm, layer.post_attention_norm):
            gain.copy_(1 + 0.3 * torch.randn(len(gain)))
    return weights


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each norm kernel."""
    launched: list[int] = []
    rms_norm = norm_rope.rms_norm

    def counted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        launched.append(len(x))
        return rms_norm(x, weight, eps)

    monkeypatch.setattr(norm_rope, "rms_norm", counted)
    return launched


def kernels(weights: DecoderWeights, ways: Ways) -> Kernels:
    """Each linear layer as `ways` names it."""
    by_shape = {tuple(getattr(weights.layers[0], name).shape): way for name, way in ways.items()}
    assert len(by_shape) == 4
    choose: Callable[[Tensor, Tensor], LinearConfig | None] = lambda x, weight: by_shape[tuple(weight.shape)]  # noqa: E731
    scratch = SplitScratch.allocate(max_values=1 << 16, max_tiles=64, device=DEVICE)
    return Kernels(scratch=scratch, choose=choose)


@torch.inference_mode()
def last_residual(config: ModelConfig, weights: DecoderWeights, ops: ModelOps, tokens: int, **options: Any) -> Tensor:
    decoder = Decoder(config, weights, ops)
    token_ids = (7 * torch.arange(tokens, device=DEVICE) % config.vocab_size).to(torch.int32)
    kv_cache = torch.empty(LAYERS, 0, device=DEVICE)
    return decoder.forward(token_ids, None, kv_cache, **options)


def ways(
    qkv: LinearConfig | None, o: LinearConfig | None, gate_up: LinearConfig | None, down: LinearConfig | None
) -> Ways:
    return {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}


CASES = {
    "all": (ways(DOT, DOT, DOT, DOT), 0),
    "split": (ways(SPLIT, SPLIT, SPLIT, SPLIT), 0),
    "mixed": (ways(DOT, SPLIT, SPLIT, DOT), 0),
    "readers that norm themselves": (ways(FMA, DOT, FMA, TILE), 0),
    "a writer of multiply-adds in front of gate and up": (ways(DOT, FMA, DOT, DOT), LAYERS),
    "a library's product in front of gate and up": (ways(DOT, None, DOT, SPLIT), LAYERS),
    "a library's product in front of qkv": (ways(DOT, SPLIT, SPLIT, None), LAYERS - 1),
    "a library's product for qkv": (ways(None, DOT, SPLIT, DOT), LAYERS),
    "a library's product for gate and up": (ways(SPLIT, DOT, None, DOT), LAYERS),
    "tiles for o and down": (ways(DOT, TILE, SPLIT, TILE), 2 * LAYERS - 1),
    "tiles for qkv, and for gate and up": (ways(TILE, SPLIT, TILE, DOT), 2 * LAYERS),
}


@pytest.mark.parametrize("tokens", [3, 21])
@pytest.mark.parametrize("case", CASES)
def test_layers_equal_the_reference_and_norms_run_where_a_neighbour_cannot_take_them(
    config: ModelConfig, weights: DecoderWeights, norms: list[int], case: str, tokens: int
) -> None:
    chosen, num_norms = CASES[case]
    out = last_residual(config, weights, kernels(weights, chosen), tokens)
    assert norms == [tokens] * num_norms
    expected = last_residual(config, weights, Reference(), tokens)
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < TOLERANCE


@pytest.mark.parametrize("case", ["split", "mixed"])
def test_runs_repeat_exactly_into_memory_that_is_given(config: ModelConfig, weights: DecoderWeights, case: str) -> None:
    ops = kernels(weights, CASES[case][0])
    first = last_residual(config, weights, ops, 21)
    given = torch.full_like(first, torch.nan)
    assert last_residual(config, weights, ops, 21, residual=given) is given
    assert torch.equal(first, given)


def test_float16_holds_large_residuals_because_no_norm_lacks_its_root(norms: list[int]) -> None:
    table = torch.full((2, 64), 30_000.0, dtype=torch.float16, device=DEVICE)
    gain, weight = torch.full_like(table[0], 8.0), torch.eye(64, dtype=torch.float16, device=DEVICE)
    reader = NormedLinear(gain, 1e-6, weight, None)
    ops = CudaOps(choose=lambda x, weight: DOT)
    residual = ops.embed(torch.zeros(3, dtype=torch.int32, device=DEVICE), table, reader)
    ops.linear_add(torch.full_like(residual.values, 992.0), weight, None, residual, reader)
    assert residual.values.unique().tolist() == [30_992.0]
    assert ops.norm_linear(residual, reader).unique().tolist() == [8.0]
    assert norms == [3]

"""Layers of a tiny shape in steps of every size under the interpreter; on a GPU those of models are, in files of their
own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shape_checks import HeadCheck
from support.layer_shapes import LayerShape, layers_of
from support.layer_steps import LayerSteps
from support.long_steps import make_long_from
from support.ragged_rows import RaggedRows
from torch import Tensor

from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.head_config import HeadConfig
from gpu_runner.kernels.invariant_cuda_ops import InvariantCudaOps
from gpu_runner.kernels.linear import SplitScratch
from gpu_runner.kernels.linear_config import DotConfig, FmaConfig, LinearConfig, TileConfig
from gpu_runner.models.config import RopeConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels take tensors of the GPU here")

CPU = torch.device("cpu")
ROPE = RopeConfig(base=10_000.0)
ROWS = RaggedRows(
    max_rows=3,
    max_tokens=8,
    odd_sizes=(3,),
    vocab_size=50,
    decode_contexts=(37, 0, 15),
    prefill_contexts=(0, 20),
    other_contexts=9,
)
FEW = FmaConfig(rows=4, block_k=32, depth=2, num_warps=1)
SPLIT = DotConfig(rows=16, block_k=16, stages=2, num_warps=2, split_k=2)
SHARED = TileConfig(tokens=16, rows=32, block_k=32, stages=2, num_warps=4, group=2, programs=5)
SHAPES = {
    "query and key norms": LayerShape(
        hidden=64, inner=96, heads=2, kv_heads=1, head_dim=32, vocab=50, rope=ROPE, qk_norm=True, windows=(None, 18)
    ),
    "biases, a group of three": LayerShape(
        hidden=48, inner=80, heads=3, kv_heads=1, head_dim=32, vocab=50, rope=ROPE, qkv_bias=True
    ),
}


def choose(x: Tensor, weight: Tensor) -> LinearConfig | None:
    """Each kind of kernel for some sizes."""
    ways = ((1, FEW), (2, SPLIT), (4, SHARED))
    return next((way for tokens, way in ways if len(x) <= tokens), None)


def ops(device: torch.device) -> CudaOps:
    scratch = SplitScratch.allocate(max_values=1 << 14, max_tiles=64, device=device)
    return CudaOps(scratch=scratch, choose=choose)


@pytest.mark.parametrize("name", SHAPES)
def test_steps_of_every_size_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_long_from(monkeypatch, 1)
    config = layers_of(SHAPES[name])
    layers = LayerSteps(config, ROWS, ops, device=CPU, dtype=torch.float32)
    assert layers.has_long == (not any(config.layer_windows))
    for step in ROWS.steps():
        assert layers.wrongs(step, row_error=1e-5, value_error=1e-4) == []


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of padding, whose attention is not written
def test_steps_whose_rows_do_not_depend_on_others_equal_the_reference() -> None:
    config, rows = layers_of(SHAPES["biases, a group of three"]), replace(ROWS, max_tokens=4, odd_sizes=())
    layers = LayerSteps(
        config, rows, lambda device: InvariantCudaOps(), device=CPU, dtype=torch.float32, invariant=True
    )
    for step in rows.steps():
        assert layers.wrongs(step, row_error=1e-5, value_error=1e-4) == []


def test_heads_of_every_number_of_rows_equal_the_reference() -> None:
    tile = HeadConfig(tokens=16, ids=32, block_k=32, stages=2, num_warps=4)
    check = HeadCheck(101, 72, max_rows=16, device=CPU, dtype=torch.float32, choose=lambda *shape: tile)
    assert check.wrongs() == []

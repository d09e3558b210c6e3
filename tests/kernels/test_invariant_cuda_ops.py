"""A token's bits among any number of others, on the GPU or under the interpreter; and that a model's kernels which sum
are the same for every number of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.attention_step import AttentionStep, exact_attention, make_step
from support.random_model import write_config
from support.without_gpu import WithoutGpu
from torch import Tensor

from gpu_runner.kernels.attention_prefill import prefill_attention
from gpu_runner.kernels.invariant_cuda_ops import InvariantCudaOps
from gpu_runner.kernels.linear_config import TileConfig, choose_invariant
from gpu_runner.kernels.residual import NormedLinear, Residual
from gpu_runner.kernels.work_list import allocate_work_list

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter does not know bf16 products.
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float32]
TOLERANCE = 1e-2 if ON_GPU else 1e-5
NUM_TOKENS = (1, 3, 16, 17, 64, 130)
N, K = 72, 136
EPS = 1e-6


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


OF_SOME_NUMBERS = ("linear_fma_kernel", "linear_dot_kernel", "linear_heads_kernel", "head_argmax_kernel")
"""Kernels that the default operations choose by the number of tokens or rows."""

Operation = Callable[[InvariantCudaOps, Tensor], Tensor]


def operations(dtype: torch.dtype, n: int) -> dict[str, Operation]:
    """Of a token's residual, [T, K], to what a layer makes of it."""
    weight, bias = normal(n, K, dtype=dtype, seed=1) / K**0.5, normal(n, dtype=dtype, seed=2)
    norm = normal(K, dtype=dtype, seed=3)
    normed = NormedLinear(norm, EPS, weight, bias)
    behind = NormedLinear(bias, EPS, weight.t().contiguous(), None)

    def added(ops: InvariantCudaOps, x: Tensor) -> Tensor:
        residual = Residual(x[:, :1].repeat(1, n))
        ops.linear_add(x, weight, bias, residual, behind)
        assert residual.gained is None  # its parts would depend on the kernel
        return residual.values

    return {
        "norm and linear": lambda ops, x: ops.norm_linear(Residual(x), normed),
        "linear and sum": added,
        "norm, gate and up": lambda ops, x: ops.norm_gate_up(Residual(x), normed),
        "logits": lambda ops, x: ops.logits(ops.rms_norm(x, norm, EPS), weight),
    }


@pytest.mark.parametrize("n", [N, *([4096, 9000] if ON_GPU else [])])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype: torch.dtype, n: int) -> None:
    ops = InvariantCudaOps()
    x = normal(max(NUM_TOKENS), K, dtype=dtype, seed=4)
    for name, operation in operations(dtype, n).items():
        whole = operation(ops, x)
        for count in NUM_TOKENS:
            for first in {0, (len(x) - count) // 3}:
                part = operation(ops, x[first : first + count].clone())
                assert torch.equal(part, whole[first : first + count]), f"{name}: {count} tokens from {first}"


def test_weights_of_every_width_have_one_tile_each_that_shares_no_sums() -> None:
    for element_bytes in (2, 4):
        for n in (1, 100, 2048, 2049, 8192, 8193, 150_000):
            config = choose_invariant(n, 1024, element_bytes)
            assert isinstance(config, TileConfig)
            assert config.programs == 0
    with pytest.raises(ValueError, match="rows of 1025 values of 2 bytes are no multiple of 16 bytes"):
        choose_invariant(1024, 1025, 2)


# ------------------------------------------------------------------------------------------------------------ attention

LENGTH = 70
CUTS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    # how many rows decode; starts and lengths, in any order
    "two chunks": (0, [(0, 33), (33, 37)]),
    "chunks before and behind each other": (0, [(50, 20), (0, 1), (1, 49)]),
    "decode rows at borders": (5, [(0, 1), (15, 1), (16, 1), (64, 1), (69, 1)]),
    "decode rows beside chunks": (3, [(31, 1), (32, 1), (69, 1), (2, 5), (40, 27)]),
}


def cut(step: AttentionStep, num_decode_rows: int, rows: list[tuple[int, int]]) -> tuple[AttentionStep, Tensor]:
    """A step of those parts of the only row of `step`; and which of its tokens they are."""
    token = torch.cat([torch.arange(start, start + length) for start, length in rows]).to(DEVICE)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    starts, lengths = [start for start, _ in rows], [length for _, length in rows]
    first = [sum(lengths[:row]) for row in range(len(rows))]
    parts = replace(
        step,
        q=step.q[token].contiguous(),
        counts=column([num_decode_rows, len(rows), len(token), 0]),
        row_slot=column([int(step.row_slot[0])] * len(rows)),
        row_start=column(starts),
        row_len=column(lengths),
        row_token=column(first),
    )
    return parts, token


def attend(step: AttentionStep, window: int | None) -> Tensor:
    _, heads, head_dim = step.q.shape
    work = allocate_work_list(
        max_rows=8,
        max_tokens=len(step.q) + 8,
        num_heads=heads,
        num_kv_heads=step.kv_layer.shape[2],
        head_dim=head_dim,
        window=window,
        device=DEVICE,
        all_rows=True,
    )
    step.list_work(work, prefill=False)
    out = torch.full_like(step.q, -7.0)
    prefill_attention(step.q, step.kv_layer, out, work, page_table=step.page_table, scale=head_dim**-0.5)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (6, 2)])
def test_a_query_has_the_same_bits_in_any_chunk_and_as_a_decode_row(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    step = make_step(
        decode_lens=[], chunks=[(0, LENGTH)], heads=heads, kv_heads=kv_heads, head_dim=64, max_rows=8, dtype=dtype,
        device=DEVICE.type,
    )  # fmt: skip
    whole = attend(step, window)
    exact = exact_attention(step, scale=64**-0.5, window=window)
    assert float((whole.cpu().double() - exact).norm()) <= TOLERANCE * float(exact.norm())
    for name, (num_decode_rows, rows) in CUTS.items():
        parts, token = cut(step, num_decode_rows, rows)
        assert torch.equal(attend(parts, window), whole[token]), name


def test_an_overshoot_row_behind_its_last_page_reads_none_but_its_own() -> None:
    step = make_step(
        decode_lens=[], chunks=[(0, 48)], heads=2, kv_heads=1, head_dim=64, max_rows=8, dtype=DTYPES[0],
        device=DEVICE.type,
    )  # fmt: skip
    step = replace(step, page_table=step.page_table[:, :3].contiguous())
    parts, _ = cut(step, 1, [(47, 1)])
    behind = replace(parts, row_start=torch.full_like(parts.row_start, 48))
    assert torch.equal(attend(behind, None), attend(parts, None))


# -------------------------------------------------------------------------------------------------- a model's kernels


def test_all_numbers_of_tokens_and_rows_are_computed_by_the_same_kernels(compiler: WithoutGpu, tmp_path: Path) -> None:
    kernels = Counter(compiler(write_config(tmp_path), "--batch-invariant"))
    weights = 5  # of a layer, and the head
    assert kernels["linear_tile_kernel"] == weights
    once = ("_rms_norm_kernel", "_qk_norm_rope_write_kernel", "_prefill_kernel", "parts_kernel")
    assert {name: kernels[name] for name in once} == dict.fromkeys(once, 1)
    assert not [name for name in kernels if "decode" in name or name in OF_SOME_NUMBERS]

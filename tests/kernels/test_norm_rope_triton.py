"""The row-wise Triton kernels against the plain-torch references, at shapes no block divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_runner.kernels import norm_rope, reference
from gpu_runner.kernels.residual import Gained

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
INTERPRETED = DEVICE.type == "cpu"
PAGE = 16


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Sums in another order may move a value to the next number of its dtype, once for each rounding. The interpreter
    does not round to bfloat16, it truncates: there a value may be off by one number at every rounding."""
    if actual.dtype == torch.float32:
        each, overall = 1e-5, 2e-6
    else:
        each, overall = (5e-2, 1.5e-2) if INTERPRETED else (1.6e-2, 2e-3)
    torch.testing.assert_close(actual, expected, rtol=each, atol=each)
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < overall


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (5, 576), (3, 1024), (2, 48), (1, 4096)])
def test_rms_norm_equals_the_reference(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight, out = rand(rows, hidden, dtype=dtype), rand(hidden, dtype=dtype), poisoned(rows, hidden, dtype=dtype)
    assert norm_rope.rms_norm(x, weight, 1e-5, out=out) is out
    assert_close(out, reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(norm_rope.rms_norm(x, weight, 1e-5), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1536), (3, 1000), (2, 48)])
def test_silu_mul_equals_the_reference(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up, out = rand(rows, 2 * inner, dtype=dtype), poisoned(rows, inner, dtype=dtype)
    assert norm_rope.silu_mul(gate_up, out=out) is out
    assert_close(out, reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 1024, 1500])
def test_embedding_gathers_rows_and_multiplies_them_by_a_gain(hidden: int, dtype: torch.dtype) -> None:
    table = rand(11, hidden, dtype=dtype)
    token_ids = torch.tensor([10, 0, 3, 3, 0], dtype=torch.int32, device=DEVICE)
    out = poisoned(5, hidden, dtype=dtype)
    assert norm_rope.embedding(token_ids, table, out=out) is out
    assert torch.equal(out, table[token_ids.long()])

    parts = norm_rope.embedding_parts(hidden)
    gained = Gained(
        gain=rand(hidden, dtype=dtype, seed=1),
        values=poisoned(5, hidden, dtype=dtype),
        squares=poisoned(parts, 5, dtype=torch.float32),
    )
    assert torch.equal(norm_rope.embedding(token_ids, table, gained=gained), out)
    assert_close(gained.values, out * gained.gain)
    squares = out.double().square().sum(dim=1)
    torch.testing.assert_close(gained.squares.double().sum(dim=0), squares, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 8, 128), (3, 1, 24)])
@pytest.mark.parametrize("shape", [{}, {"programs_per_token": 1}, {"programs_per_token": 2}])
def test_queries_keys_and_values_equal_the_reference(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, shape: dict[str, int]
) -> None:
    positions = torch.tensor([0, 15, 16, 131_071, 4097, 0], dtype=torch.int32, device=DEVICE)
    # The last two are padding: both write to the dummy page, where nothing counts.
    kv_index = torch.tensor([PAGE, 2 * PAGE + 15, 4 * PAGE, 4 * PAGE + 5, 0, 0], dtype=torch.int32, device=DEVICE)
    rows = len(positions)
    qkv = rand(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = [1 + 0.3 * rand(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)] if normed else [None, None]
    inv_freq = (500_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)).to(DEVICE)
    kv_layer, expected_kv = (poisoned(2, 6, kv_heads, PAGE, head_dim, dtype=dtype) for _ in range(2))
    q = poisoned(rows, heads, head_dim, dtype=dtype)
    norm: dict[str, Any] = {"num_heads": heads, "q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6}
    launch = {**norm, "out": q, **shape}
    assert norm_rope.qk_norm_rope_write(qkv, positions, kv_index, inv_freq, kv_layer, **launch) is q
    cos_sin = reference.rope_cos_sin(positions, inv_freq)
    expected_q = reference.qk_norm_rope_write(qkv, cos_sin, expected_kv, kv_index.long(), **norm)
    assert_close(q, expected_q)
    written = ~expected_kv[:, 1:].isnan()
    assert torch.equal(~kv_layer[:, 1:].isnan(), written)
    assert_close(kv_layer[:, 1:][written], expected_kv[:, 1:][written])
    assert torch.equal(kv_layer[1, 1:][written[1]], expected_kv[1, 1:][written[1]])


def test_rotation_is_exact_at_the_largest_positions() -> None:
    """A one in the first half and a zero in the second leave cosines and sines; float64 of the same float32 angles."""
    positions = torch.tensor([1, 4096, 105_616, 131_071, 1_000_003], dtype=torch.int32, device=DEVICE)
    inv_freq = torch.tensor([1.0, 0.7, 0.01, 1e-5], device=DEVICE)
    qkv = torch.zeros(len(positions), 3 * 8, device=DEVICE)
    qkv[:, :4] = 1.0
    kv_layer = torch.zeros(2, 1, 1, PAGE, 8, device=DEVICE)
    q = norm_rope.qk_norm_rope_write(
        qkv,
        positions,
        torch.zeros_like(positions),
        inv_freq,
        kv_layer,
        num_heads=1,
        q_norm=None,
        k_norm=None,
        eps=1e-6,
    )
    angles = (positions.float()[:, None] * inv_freq).double()
    torch.testing.assert_close(q[:, 0, :4].double(), angles.cos(), rtol=0, atol=3e-7)
    torch.testing.assert_close(q[:, 0, 4:].double(), angles.sin(), rtol=0, atol=3e-7)


def test_inputs_that_are_not_plain_matrices_are_refused() -> None:
    x = rand(4, 32, dtype=torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        norm_rope.silu_mul(x[:, :16])
    with pytest.raises(ValueError, match="4 heads of 16 need 64"):
        norm_rope.qk_norm_rope_write(
            *(x, x, x, x, torch.zeros(2, 1, 1, PAGE, 16, device=DEVICE)),
            num_heads=2,
            q_norm=None,
            k_norm=None,
            eps=1e-6,
        )

"""The CPU's batch-invariant operations: the bits of a token among any number of others, and the reference's values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attention_step import exact_attention, make_step
from torch import Tensor

from gpu_runner.kernels.invariant_reference_ops import TILE, InvariantReferenceOps, rows_are_alike
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.kernels.residual import NormedLinear, Residual

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MOST = 600
EPS = 1e-5
K = 45


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [24, 97])
def test_a_row_of_a_product_has_the_same_bits_at_every_place_of_any_number_of_rows(n: int, dtype: torch.dtype) -> None:
    """The last rows of all, and 13 has no factor in common with a tile: so each of 300 has been at all its places."""
    ops, weight = InvariantReferenceOps(), normal(n, K, dtype=dtype, seed=1)
    assert rows_are_alike(weight)
    x = normal(MOST, K, dtype=dtype, seed=2)
    whole = ops.logits(x, weight)
    torch.testing.assert_close(whole, ReferenceOps().logits(x, weight), rtol=0, atol=TOLERANCE[dtype] * K**0.5)
    for count in (*range(1, 3 * TILE + 2), *range(3 * TILE + 2, MOST, 13), MOST):
        assert torch.equal(ops.logits(x[-count:], weight), whole[-count:]), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_layers_other_operations_has_the_same_bits_among_any_number(dtype: torch.dtype) -> None:
    weight, bias = normal(2 * 40, K, dtype=dtype, seed=1) / K**0.5, normal(2 * 40, dtype=dtype, seed=2)
    norm, x = normal(K, dtype=dtype, seed=3), normal(MOST, K, dtype=dtype, seed=4)
    linear = NormedLinear(norm, EPS, weight, bias)

    def results(ops: ReferenceOps, rows: Tensor) -> list[Tensor]:
        residual, own, normed = (
            Residual(rows[:, :1].repeat(1, len(weight))),
            Residual(rows),
            ops.rms_norm(rows, norm, EPS),
        )
        ops.linear_add(rows, weight, bias, residual, None)
        return [normed, ops.norm_linear(own, linear), ops.norm_gate_up(own, linear), residual.values]

    whole = results(InvariantReferenceOps(), x)
    for ours, reference in zip(whole, results(ReferenceOps(), x), strict=True):
        torch.testing.assert_close(ours, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for count in (*range(1, 2 * TILE + 2), 100, 599):
        for own, all_rows in zip(results(InvariantReferenceOps(), x[-count:]), whole, strict=True):
            assert torch.equal(own, all_rows[-count:]), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("normed", [False, True])
def test_attention_has_the_same_bits_in_any_chunk_and_as_a_decode_row(
    window: int | None, normed: bool, dtype: torch.dtype
) -> None:
    """Keys of earlier chunks are written by them, as in steps; a row's own by the call that reads them."""
    heads, kv_heads, head_dim, length = 6, 2, 24, 70
    x, norm = normal(length, K, dtype=dtype, seed=1), normal(K, dtype=dtype, seed=4)
    rows = (heads + 2 * kv_heads) * head_dim
    weight, bias = normal(rows, K, dtype=dtype, seed=5) / K**0.5, normal(rows, dtype=dtype, seed=6)
    inv_freq = 10_000.0 ** -torch.arange(0, 1, 2 / head_dim)
    norms = [1 + 0.1 * normal(head_dim, dtype=dtype, seed=seed) if normed else None for seed in (2, 3)]
    pages = torch.tensor([[3, 1, 5, 2, 4]], dtype=torch.int32)

    def attend(ops: ReferenceOps, kv_layer: Tensor, num_decode_rows: int, rows: list[tuple[int, int]]) -> Tensor:
        position = torch.cat([torch.arange(start, start + count) for start, count in rows])
        starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        meta = BatchMeta(
            num_decode_rows=num_decode_rows,
            row_start=starts,
            row_len=counts,
            row_slot=torch.zeros(len(rows), dtype=torch.int64),
            positions=position,
            kv_index=pages[0, position // 16].long() * 16 + position % 16,
            page_table=pages,
        )
        return ops.attend(
            *(Residual(x[position]), NormedLinear(norm, EPS, weight, bias), kv_layer, meta),
            inv_freq=inv_freq,
            num_heads=heads,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=EPS,
            scale=head_dim**-0.5,
            window=window,
        )

    def empty() -> Tensor:
        return torch.full((2, 6, kv_heads, 16, head_dim), torch.nan, dtype=dtype)

    ops, cache = InvariantReferenceOps(), empty()
    whole = attend(ops, cache, 0, [(0, length)])
    torch.testing.assert_close(
        whole, attend(ReferenceOps(), empty(), 0, [(0, length)]), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    for steps in (
        [(0, [(0, 33)]), (0, [(33, 37)])],
        [(0, [(0, 1)]), (0, [(1, 47)]), *[(1, [(own, 1)]) for own in range(48, length)]],
        [(0, [(0, 16), (16, 1), (17, 30)]), (2, [(47, 1), (48, 1), (49, 21)])],
    ):
        other = empty()
        parts = [attend(ops, other, *step) for step in steps]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(other.view(torch.uint8), cache.view(torch.uint8))


def test_attention_is_softmax_over_a_rows_own_keys() -> None:
    step = make_step(decode_lens=[1, 33], chunks=[(0, 20), (31, 18)], heads=4, kv_heads=2, head_dim=16, max_rows=4)
    rows = step.rows
    meta = BatchMeta(
        num_decode_rows=step.num_decode_rows,
        row_start=np.array([start for _, start, _ in rows], np.int32),
        row_len=np.array([length for *_, length in rows], np.int32),
        row_slot=step.row_slot.long(),
        positions=torch.empty(0),
        kv_index=torch.empty(0),
        page_table=step.page_table,
    )
    out = InvariantReferenceOps()._paged_attention(step.q, step.kv_layer, meta, scale=0.25, window=None)
    torch.testing.assert_close(out.double(), exact_attention(step, scale=0.25, window=None), rtol=1e-5, atol=1e-5)


def test_a_library_whose_products_depend_on_a_rows_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.linear

    def uneven(x: Tensor, weight: Tensor) -> Tensor:
        out = plain(x, weight)
        out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))
        return out

    weight = normal(8, 8, dtype=torch.float32, seed=1)
    assert rows_are_alike(weight)
    monkeypatch.setattr(F, "linear", uneven)
    assert not rows_are_alike(weight)

"""Decode attention against softmax in float64, on the GPU or under the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from support.attention_step import AttentionStep, exact_attention, make_step
from torch import Tensor

from gpu_runner.kernels.attention_decode import DecodeTiling, decode_attention
from gpu_runner.kernels.work_list import RangeCut, WorkList, allocate_work_list

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter does not know bf16 products.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5
POISON = -7.0
BORDERS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100]


def work_for(
    step: AttentionStep, *, max_rows: int, window: int | None = None, target_programs: int = 64
) -> tuple[WorkList, float]:
    """A list for the step, built, its scratch poisoned; and the scale."""
    heads, head_dim = step.q.shape[1:]
    work = allocate_work_list(
        max_rows=max_rows,
        max_tokens=max(max_rows, len(step.q)),
        num_heads=heads,
        num_kv_heads=step.kv_layer.shape[2],
        head_dim=head_dim,
        window=window,
        device=torch.device(DEVICE),
        cut=RangeCut(target_programs, split_step=64),
    )
    work.partial_out.fill_(torch.nan)
    work.partial_lse.fill_(torch.nan)
    step.list_work(work, prefill=False)
    return work, head_dim**-0.5


def run(step: AttentionStep, work: WorkList, scale: float, tiling: DecodeTiling | None = None) -> Tensor:
    out = torch.full_like(step.q, POISON)
    decode_attention(
        step.q,
        step.kv_layer,
        out,
        work,
        counts=step.counts,
        page_table=step.page_table,
        scale=scale,
        tiling=tiling,
    )
    return out.cpu().to(torch.float64)


def check(step: AttentionStep, work: WorkList, scale: float, tiling: DecodeTiling | None = None) -> None:
    """Every element of the output, and that the kernel left no arrival behind."""
    out = run(step, work, scale, tiling)
    rows = step.num_decode_rows
    exact = exact_attention(step, scale=scale, window=work.window)[:rows]
    assert not rows or float((out[:rows] - exact).norm() / exact.norm()) < TOLERANCE
    assert not rows or float((out[:rows] - exact).abs().max()) < 5 * TOLERANCE
    assert bool((out[rows : step.num_tokens] == POISON).all())
    assert bool((out[step.num_tokens :] == 0).all())
    assert not bool(work.arrived.any())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 128), (6, 2, 64), (4, 1, 128), (8, 1, 64), (7, 1, 64)]
)
def test_rows_at_page_and_tile_borders_equal_softmax(heads: int, kv_heads: int, head_dim: int) -> None:
    step = make_step(
        decode_lens=BORDERS, chunks=[], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=16, padding=3,
        dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    work, scale = work_for(step, max_rows=16)
    check(step, work, scale)


MIXED = [1, 513, 64, 130]


@pytest.mark.parametrize(
    ("block_tokens", "lens", "kv_heads"), [(16, [700], 1), (16, MIXED, 1), (64, MIXED, 2), (128, MIXED, 2)]
)
def test_rows_in_many_ranges_are_merged(block_tokens: int, lens: list[int], kv_heads: int) -> None:
    step = make_step(
        decode_lens=lens, chunks=[], heads=3 * kv_heads, kv_heads=kv_heads, head_dim=64, max_rows=5, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    work, scale = work_for(step, max_rows=5, target_programs=16 * kv_heads)
    splits = work.items[: int(work.lengths[0]), 6]
    assert int(splits.max()) >= 8
    check(step, work, scale, DecodeTiling(block_tokens=block_tokens, num_warps=4, num_stages=2, prefetch_pages=64))


def test_a_list_serves_many_layers_one_after_the_other() -> None:
    step = make_step(
        decode_lens=[300, 20], chunks=[], heads=4, kv_heads=2, head_dim=64, max_rows=2, dtype=DTYPE, device=DEVICE
    )
    work, scale = work_for(step, max_rows=2)
    first = run(step, work, scale)
    work.partial_out.fill_(torch.nan)
    assert bool((run(step, work, scale) == first).all())


@pytest.mark.parametrize("window", [1, 16, 50, 64, 200])
def test_a_window_hides_all_earlier_keys(window: int) -> None:
    lens = [1, 16, 17, 64, 65, 290]
    step = make_step(
        decode_lens=lens, chunks=[], heads=4, kv_heads=2, head_dim=64, max_rows=7, dtype=DTYPE, device=DEVICE
    )
    for row, length in enumerate(lens):
        # Pages wholly before the window may belong to others by now.
        gone = max(0, length - window) // 16
        pages = step.page_table[int(step.row_slot[row]), :gone].to(torch.int64)
        step.kv_layer[:, pages] = torch.nan
    work, scale = work_for(step, max_rows=7, window=window)
    check(step, work, scale)


@pytest.mark.parametrize("padding", [0, 1, 40])
def test_a_step_without_decode_rows_writes_its_padding_only(padding: int) -> None:
    step = make_step(
        decode_lens=[], chunks=[(0, 5), (3, 2)], heads=2, kv_heads=1, head_dim=64, max_rows=3, padding=padding,
        dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    work, scale = work_for(step, max_rows=3, target_programs=2)
    check(step, work, scale)


def test_prefill_rows_of_a_mixed_step_are_left_alone() -> None:
    step = make_step(
        decode_lens=[70, 3], chunks=[(16, 17), (0, 1)], heads=3, kv_heads=1, head_dim=64, max_rows=6, padding=2,
        dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    work, scale = work_for(step, max_rows=6)
    check(step, work, scale)


def test_a_row_past_its_last_page_reads_no_further_than_its_table() -> None:
    step = make_step(
        decode_lens=[32, 20], chunks=[], heads=2, kv_heads=1, head_dim=64, max_rows=2, dtype=DTYPE, device=DEVICE
    )
    table = step.page_table[:, :2].contiguous()
    want = exact_attention(step, scale=0.125, window=None)
    step.row_start[0] = 32  # one past what two pages hold
    work, _ = work_for(step, max_rows=2)
    step.list_work(work, prefill=False, page_table=table)
    out = torch.full_like(step.q, POISON)
    decode_attention(step.q, step.kv_layer, out, work, counts=step.counts, page_table=table, scale=0.125)
    assert float((out.cpu().to(torch.float64) - want).abs().max()) < 5 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("context", [256, 1000, 8192])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_long_ragged_steps_are_right_in_a_replayed_graph(rows: int, context: int) -> None:
    generator = torch.Generator().manual_seed(rows + context)
    lens = torch.randint(1, context + 1, (rows,), generator=generator).tolist()
    lens[0] = context
    step = make_step(
        decode_lens=lens, chunks=[], heads=16, kv_heads=8, head_dim=128, max_rows=256, padding=4, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    work, scale = work_for(step, max_rows=256, target_programs=132 * 8)
    exact = exact_attention(step, scale=scale, window=None)
    run(step, work, scale)
    out = torch.full_like(step.q, POISON)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.list_work(work, prefill=False)
        out.fill_(POISON)  # between the list's writer and the kernel that reads it ahead of its wait
        for _ in range(4):
            decode_attention(
                step.q, step.kv_layer, out, work, counts=step.counts, page_table=step.page_table, scale=scale
            )
    for _ in range(20):
        graph.replay()
        got = out.cpu().to(torch.float64)
        assert float((got[:rows] - exact).norm() / exact.norm()) < TOLERANCE
        assert bool((got[rows:] == 0).all())
    assert not bool(work.arrived.any())
    assert math.isfinite(float(out.float().sum()))

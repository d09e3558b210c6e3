"""Prefill attention against softmax in float64, on the GPU or under the interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.attention_step import AttentionStep, exact_attention, make_step
from torch import Tensor

from gpu_runner.kernels.attention_decode import decode_attention
from gpu_runner.kernels.attention_prefill import PrefillTiling, prefill_attention, prefill_tiling
from gpu_runner.kernels.work_list import RangeCut, WorkList, allocate_work_list

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter does not know bf16 products.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5
POISON = -7.0
CHUNKS = [(0, 1), (0, 15), (0, 16), (0, 17), (16, 33), (15, 1), (63, 2), (5, 100)]
MAX_ROWS = 12


def work_for(step: AttentionStep, *, window: int | None = None, tile_rows: int = 128) -> WorkList:
    heads, head_dim = step.q.shape[1:]
    work = allocate_work_list(
        max_rows=MAX_ROWS,
        max_tokens=max(MAX_ROWS, len(step.q)),
        num_heads=heads,
        num_kv_heads=step.kv_layer.shape[2],
        head_dim=head_dim,
        window=window,
        device=torch.device(DEVICE),
        cut=RangeCut(8, split_step=512),
        tile_rows=tile_rows,
    )
    step.list_work(work, prefill=True)
    return work


def prefill(step: AttentionStep, work: WorkList, out: Tensor, tiling: PrefillTiling | None = None) -> None:
    scale = step.q.shape[-1] ** -0.5
    prefill_attention(step.q, step.kv_layer, out, work, page_table=step.page_table, scale=scale, tiling=tiling)


def check(step: AttentionStep, work: WorkList, tiling: PrefillTiling | None = None) -> None:
    out = torch.full_like(step.q, POISON)
    prefill(step, work, out, tiling)
    got = out.cpu().to(torch.float64)
    own = slice(step.num_decode_rows, step.num_tokens)
    exact = exact_attention(step, scale=step.q.shape[-1] ** -0.5, window=work.window)[own]
    assert float((got[own] - exact).norm()) <= TOLERANCE * float(exact.norm())
    assert not exact.numel() or float((got[own] - exact).abs().max()) < 5 * TOLERANCE
    assert bool((got[: own.start] == POISON).all())
    assert bool((got[own.stop :] == POISON).all())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 128), (9, 3, 64), (4, 1, 128), (8, 1, 64), (7, 1, 64)]
)
def test_chunks_at_page_and_tile_borders_equal_softmax(heads: int, kv_heads: int, head_dim: int) -> None:
    step = make_step(
        decode_lens=[], chunks=CHUNKS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=MAX_ROWS, padding=3,
        dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    check(step, work_for(step))


@pytest.mark.parametrize(("tile_rows", "block_tokens", "programs"), [(16, 16, 1), (32, 64, 3), (64, 128, 7)])
def test_tiles_of_any_size_are_dealt_to_any_number_of_programs(
    tile_rows: int, block_tokens: int, programs: int
) -> None:
    step = make_step(
        decode_lens=[], chunks=[(40, 21), (0, 90), (130, 3)], heads=6, kv_heads=2, head_dim=64, max_rows=MAX_ROWS,
        dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    tiling = PrefillTiling(block_tokens=block_tokens, num_warps=4, num_stages=2, programs=programs)
    check(step, work_for(step, tile_rows=tile_rows), tiling)


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_chunks_begin_and_end_at_borders_of_blocks_of_keys(block_tokens: int) -> None:
    block = block_tokens
    chunks = [(0, block), (block, 1), (block - 1, 1), (block, block), (2 * block - 1, 2), (block + 1, block - 1)]
    step = make_step(
        decode_lens=[], chunks=chunks, heads=4, kv_heads=2, head_dim=64, max_rows=MAX_ROWS, dtype=DTYPE, device=DEVICE
    )
    check(step, work_for(step), PrefillTiling(block_tokens=block, num_warps=8, num_stages=2, programs=5))


FEW, MANY = 3 * 132 - 1, 3 * 132


def test_two_programs_share_a_multiprocessor_where_tasks_are_many_and_registers_suffice() -> None:
    few, many = prefill_tiling(tasks=FEW, head_dim=128), prefill_tiling(tasks=MANY, head_dim=128)
    assert (few.programs, few.max_registers) == (132, None)
    # 65,536 registers of a multiprocessor.
    assert (many.programs, many.max_registers) == (264, 65536 // (2 * 32 * many.num_warps))
    assert prefill_tiling(tasks=10 * MANY, head_dim=128) == prefill_tiling(tasks=MANY, head_dim=64) == many
    assert prefill_tiling(tasks=10 * MANY, head_dim=256) == prefill_tiling(tasks=1, head_dim=256)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("all_rows", [False, True])
def test_queries_and_the_pipeline_of_keys_and_values_fit_the_shared_memory(all_rows: bool, head_dim: int) -> None:
    for tasks, element_bytes in itertools.product((FEW, MANY), (2, 4)):
        tiling = prefill_tiling(tasks=tasks, head_dim=head_dim, element_bytes=element_bytes, all_rows=all_rows)
        rows = (64 if all_rows else 128) + 2 * tiling.num_stages * tiling.block_tokens
        assert rows * head_dim * element_bytes <= 227 << 10  # of an SM


@pytest.mark.parametrize("all_rows", [False, True])
def test_the_number_of_tasks_matters_neither_to_batch_invariance_nor_to_float32(all_rows: bool) -> None:
    for element_bytes in (2, 4) if all_rows else (4,):
        few, many = (
            prefill_tiling(tasks=tasks, head_dim=128, element_bytes=element_bytes, all_rows=all_rows)
            for tasks in (1, 10 * MANY)
        )
        assert few == many


@pytest.mark.parametrize("tasks", [FEW, MANY])
@pytest.mark.parametrize("programs", [None, 5, 6])
def test_both_tilings_equal_softmax(tasks: int, programs: int | None) -> None:
    tiling = prefill_tiling(tasks=tasks, head_dim=64)
    step = make_step(
        decode_lens=[], chunks=[(0, 130), (64, 64), (100, 1), (63, 66)], heads=4, kv_heads=2, head_dim=64,
        max_rows=MAX_ROWS, dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    check(step, work_for(step), replace(tiling, programs=programs or tiling.programs))


@pytest.mark.parametrize("tasks", [FEW, MANY])
@pytest.mark.parametrize("window", [1, 5, 16, 50, 64])
def test_a_window_hides_all_earlier_keys(window: int, tasks: int) -> None:
    # The third of a block's pages is the last, and not full; with the least windows it is all that is seen.
    chunks = [*CHUNKS, (200, 70), (37, 2)]
    step = make_step(
        decode_lens=[], chunks=chunks, heads=4, kv_heads=2, head_dim=64, max_rows=MAX_ROWS, dtype=DTYPE, device=DEVICE
    )
    for row, (start, _) in enumerate(chunks):
        # Pages wholly before the window may belong to others by now.
        gone = max(0, start + 1 - window) // 16
        pages = step.page_table[int(step.row_slot[row]), :gone].to(torch.int64)
        step.kv_layer[:, pages] = torch.nan
    check(step, work_for(step, window=window), prefill_tiling(tasks=tasks, head_dim=64))


def test_a_step_without_prefill_rows_writes_nothing() -> None:
    step = make_step(
        decode_lens=[5, 40], chunks=[], heads=2, kv_heads=1, head_dim=64, max_rows=MAX_ROWS, padding=2, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    check(step, work_for(step))


def test_both_kernels_write_every_token_of_a_mixed_step() -> None:
    step = make_step(
        decode_lens=[5, 200, 17], chunks=[(3, 30), (0, 70)], heads=9, kv_heads=3, head_dim=64, max_rows=MAX_ROWS,
        padding=5, dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    work = work_for(step)
    check(step, work)
    out = torch.full_like(step.q, torch.nan)
    prefill(step, work, out)
    decode_attention(
        step.q, step.kv_layer, out, work, counts=step.counts, page_table=step.page_table, scale=step.q.shape[-1] ** -0.5
    )
    exact = exact_attention(step, scale=step.q.shape[-1] ** -0.5, window=None)
    assert float((out[: step.num_tokens].cpu() - exact).abs().max()) < 5 * TOLERANCE
    assert bool((out[step.num_tokens :] == 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [[(0, 2048)], [(6000, 500), (0, 700), (1, 1), (8000, 192)], [(0, 64)] * 12])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8)])
def test_long_chunks_are_right_in_a_replayed_graph(chunks: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    step = make_step(
        decode_lens=[], chunks=chunks, heads=heads, kv_heads=kv_heads, head_dim=128, max_rows=MAX_ROWS, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    work = work_for(step)
    exact = exact_attention(step, scale=128**-0.5, window=None)
    out = torch.full_like(step.q, POISON)
    prefill(step, work, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.list_work(work, prefill=True)
        for _ in range(3):
            prefill(step, work, out)
    for _ in range(5):
        out.fill_(POISON)
        graph.replay()
        assert float((out.cpu().to(torch.float64) - exact).norm() / exact.norm()) < TOLERANCE

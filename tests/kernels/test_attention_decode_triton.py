"""Decode attention against softmax in float64, on the GPU or under the interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_step import AttentionStep, exact_attention, make_step
from support.rotating_step import DEVICE, DTYPE, EPS, POISON, TOLERANCE, RotatingStep
from torch import Tensor

from gpu_runner.kernels.attention_decode import DecodeTiling, decode_attention, rotating_decode_attention
from gpu_runner.kernels.norm_rope import qk_norm_rope_write
from gpu_runner.kernels.work_list import WorkList, allocate_work_list, build_work_list

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
        target_programs=target_programs,
        split_step=64,
    )
    work.partial_out.fill_(torch.nan)
    work.partial_lse.fill_(torch.nan)
    build_work_list(
        work,
        counts=step.counts,
        row_slot=step.row_slot,
        row_start=step.row_start,
        row_len=step.row_len,
        row_token=step.row_token,
        page_table=step.page_table,
        prefill=False,
    )
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
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 128), (9, 3, 64), (4, 1, 128), (16, 2, 64)]
)
def test_rows_at_page_and_tile_borders_equal_softmax(heads: int, kv_heads: int, head_dim: int) -> None:
    step = make_step(
        decode_lens=BORDERS, chunks=[], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=16, padding=3,
        dtype=DTYPE, device=DEVICE,
    )  # fmt: skip
    work, scale = work_for(step, max_rows=16)
    check(step, work, scale)


@pytest.mark.parametrize("block_tokens", [16, 64, 128])
@pytest.mark.parametrize("lens", [[700], [1, 513, 64, 130]])
def test_rows_in_many_ranges_are_merged(block_tokens: int, lens: list[int]) -> None:
    step = make_step(
        decode_lens=lens, chunks=[], heads=6, kv_heads=2, head_dim=64, max_rows=5, dtype=DTYPE, device=DEVICE
    )
    work, scale = work_for(step, max_rows=5, target_programs=32)
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
    step = make_step(
        decode_lens=[*BORDERS, 290], chunks=[], heads=4, kv_heads=2, head_dim=64, max_rows=12, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    for row, length in enumerate([*BORDERS, 290]):
        # Pages wholly before the window may belong to others by now.
        gone = max(0, length - window) // 16
        pages = step.page_table[int(step.row_slot[row]), :gone].to(torch.int64)
        step.kv_layer[:, pages] = torch.nan
    work, scale = work_for(step, max_rows=12, window=window)
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
    build_work_list(
        work, counts=step.counts, row_slot=step.row_slot, row_start=step.row_start, row_len=step.row_len,
        row_token=step.row_token, page_table=table, prefill=False,
    )  # fmt: skip
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
        build_work_list(
            work, counts=step.counts, row_slot=step.row_slot, row_start=step.row_start, row_len=step.row_len,
            row_token=step.row_token, page_table=step.page_table, prefill=False,
        )  # fmt: skip
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


def rotating(lens: list[int], **shape: Any) -> RotatingStep:
    return RotatingStep(lens, attend=rotating_decode_attention, **shape)


def check_rotating(case: RotatingStep, tiling: DecodeTiling | None = None) -> None:
    """Every element of the output, and every bit of the pages, which are what the kernel that only writes leaves."""
    if DEVICE == "cpu":
        # The interpreter's sines, which differ from torch's in their last bits.
        angles = (torch.arange(len(case.rotation))[:, None].float() * case.inv_freq).numpy()
        case.rotation = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), axis=-1))
    step, pages = case.step, case.step.kv_layer.clone()
    rows, heads = step.num_decode_rows, step.q.shape[1]
    qk_norm_rope_write(
        case.qkv[:rows].contiguous(), case.positions, case.kv_index, case.inv_freq, pages, num_heads=heads,
        q_norm=case.norms[0], k_norm=case.norms[1], eps=EPS,
    )  # fmt: skip
    case.check(tiling)
    torch.testing.assert_close(step.kv_layer[:, 1:], pages[:, 1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "normed"),
    [(2, 2, 64, True), (4, 2, 128, True), (9, 3, 64, False), (4, 1, 128, False), (16, 1, 32, True)],
)
def test_rotating_rows_at_page_and_tile_borders_equal_the_parts(
    heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    check_rotating(
        rotating(
            [*BORDERS, 2], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=16, padding=3, normed=normed
        )
    )


@pytest.mark.parametrize("block_tokens", [16, 128])
@pytest.mark.parametrize("lens", [[700], [1, 513, 64, 130, 641, 65]])
def test_rotating_rows_in_many_ranges_are_merged(block_tokens: int, lens: list[int]) -> None:
    case = rotating(lens, heads=6, kv_heads=2, head_dim=64, max_rows=6, target_programs=32)
    items = case.work.items[: int(case.work.lengths[0])]
    assert int(items[:, 6].max()) >= 6
    if len(lens) > 1:
        assert [640, 641] in items[:, 2:4].tolist()  # a range of the newest key alone
    check_rotating(case, DecodeTiling(block_tokens=block_tokens, num_warps=4, num_stages=2, prefetch_pages=64))


def test_only_the_program_of_the_last_range_writes_the_newest_key() -> None:
    case = rotating([300], heads=2, kv_heads=1, head_dim=64, max_rows=1)
    before = case.step.kv_layer.clone()
    case.work.lengths[0] -= 1
    case.run()
    torch.testing.assert_close(case.step.kv_layer, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [1, 2, 16, 50, 64, 200])
def test_a_window_hides_all_earlier_keys_of_rotating_rows(window: int) -> None:
    lens = [*BORDERS, 290]
    case = rotating(lens, heads=4, kv_heads=2, head_dim=64, max_rows=12, window=window)
    step = case.step
    for row, length in enumerate(lens):
        # Pages wholly before the window may belong to others by now.
        pages = step.page_table[int(step.row_slot[row]), : max(0, length - window) // 16].to(torch.int64)
        step.kv_layer[:, pages] = torch.nan
        case.expected_kv[:, pages] = torch.nan
    check_rotating(case)


def test_the_rotated_key_of_a_row_that_has_ended_goes_to_the_dummy_page() -> None:
    case = rotating([49, 20, 33], heads=2, kv_heads=1, head_dim=64, max_rows=4, padding=1, done=(0, 2))
    check_rotating(case)
    assert int(case.step.kv_layer[:, 0].isfinite().sum()) == 2 * 1 * 64  # both at the first place


def test_a_rotating_row_past_its_last_page_reads_no_further_than_its_table() -> None:
    case = rotating([33, 20], heads=2, kv_heads=1, head_dim=64, max_rows=2, done=(0,))
    case.step = replace(case.step, page_table=case.step.page_table[:, :2].contiguous())
    case.build(case.work)
    assert int(case.work.items[0, 3]) == 32
    check_rotating(case)


@pytest.mark.parametrize("padding", [1, 40])
def test_a_rotating_step_without_rows_writes_its_padding_only(padding: int) -> None:
    case = rotating([5], heads=2, kv_heads=1, head_dim=64, max_rows=3, padding=padding - 1, target_programs=2)
    case.step.counts.zero_()
    case.build(case.work)
    before = case.step.kv_layer.clone()
    assert bool((case.run() == 0).all())
    torch.testing.assert_close(case.step.kv_layer, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (64, 8, 128)])
def test_rotating_rows_of_every_shape_compile_and_are_right(heads: int, kv_heads: int, head_dim: int) -> None:
    lens = [1, 40, 700, 257, 33]
    check_rotating(rotating(lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=8, padding=1))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "context"), [(33, 1000), (64, 8192), (300, 500)])
def test_rotating_layers_of_a_replayed_graph_do_not_see_each_others_haste(rows: int, context: int) -> None:
    """The qkv of each layer is written by the kernel just before, over poison."""
    generator = torch.Generator().manual_seed(rows + context)
    lens = torch.randint(1, context + 1, (rows,), generator=generator).tolist()
    case = rotating(lens, heads=16, kv_heads=8, head_dim=128, max_rows=512, padding=4, target_programs=132 * 8)
    qkv, case.qkv = case.qkv, case.qkv.clone()
    out = torch.full_like(case.step.q, POISON)
    case.launch(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.build(case.work)
        for _ in range(4):
            out.fill_(POISON)  # between the list's writer and the kernel that reads it ahead of its wait
            case.qkv.fill_(POISON)
            case.qkv.copy_(qkv)
            case.launch(out)
    for _ in range(20):
        graph.replay()
        got = out.cpu().to(torch.float64)
        assert float((got[:rows] - case.expected).norm() / case.expected.norm()) < TOLERANCE
        assert bool((got[rows:] == 0).all())
    assert not bool(case.work.arrived.any())

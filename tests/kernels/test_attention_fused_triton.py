"""The fused decode attention against the references of its parts and softmax in float64, on the GPU or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_step import PAGE
from support.rotating_step import BORDERS, DEVICE, POISON, TOLERANCE
from support.rotating_step import RotatingStep as Case

from gpu_runner.kernels.attention_fused import FusedTiling


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "normed"),
    [(2, 2, 64, True), (4, 2, 128, False), (9, 3, 64, False), (4, 1, 128, True), (16, 2, 64, True), (5, 1, 32, True)],
)
def test_rows_at_page_and_tile_borders_equal_the_parts(heads: int, kv_heads: int, head_dim: int, normed: bool) -> None:
    Case(
        BORDERS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=16, padding=3, normed=normed
    ).check()  # fmt: skip


MIXED = [1, 513, 64, 130, 641, 65]


@pytest.mark.parametrize(
    ("tiling", "lens"),
    [
        (FusedTiling(16, 1), [700]),
        (FusedTiling(16, 2), MIXED),
        (FusedTiling(32, 1), MIXED),
        (FusedTiling(32, 8), MIXED),
    ],
)
def test_rows_in_many_ranges_are_merged(tiling: FusedTiling, lens: list[int]) -> None:
    case = Case(lens, heads=6, kv_heads=2, head_dim=64, max_rows=6, target_programs=32)
    items = case.work.items[: int(case.work.lengths[0])]
    assert int(items[:, 6].max()) >= 6
    if len(lens) > 1:
        assert [640, 641] in items[:, 2:4].tolist()  # a range of the newest key alone
    case.check(tiling)


@pytest.mark.parametrize("window", [1, 16, 50, 64, 200])
def test_a_window_hides_all_earlier_keys(window: int) -> None:
    lens = [*BORDERS, 290]
    case = Case(lens, heads=4, kv_heads=2, head_dim=64, max_rows=13, window=window)
    step = case.step
    for row, length in enumerate(lens):
        # Pages wholly before the window may belong to others by now.
        gone = max(0, length - window) // PAGE
        pages = step.page_table[int(step.row_slot[row]), :gone].to(torch.int64)
        step.kv_layer[:, pages] = torch.nan
        case.expected_kv[:, pages] = torch.nan
    case.check(FusedTiling(16, 2))


def test_the_key_of_a_row_that_has_ended_goes_to_the_dummy_page() -> None:
    case = Case([49, 20, 33], heads=2, kv_heads=1, head_dim=64, max_rows=4, padding=1, done=(0, 2))
    case.check()
    assert int(case.step.kv_layer[:, 0].isfinite().sum()) == 2 * 1 * 64  # both at the first place


def test_a_row_past_its_last_page_reads_no_further_than_its_table() -> None:
    case = Case([33, 20], heads=2, kv_heads=1, head_dim=64, max_rows=2, done=(0,))
    case.step = replace(case.step, page_table=case.step.page_table[:, :2].contiguous())
    case.build(case.work)
    assert int(case.work.items[0, 3]) == 32
    case.check()


@pytest.mark.parametrize("padding", [1, 40])
def test_a_step_without_rows_writes_its_padding_only(padding: int) -> None:
    case = Case([5], heads=2, kv_heads=1, head_dim=64, max_rows=3, padding=padding - 1, target_programs=2)
    case.step.counts.zero_()
    case.build(case.work)
    before = case.step.kv_layer.clone()
    assert bool((case.run() == 0).all())
    torch.testing.assert_close(case.step.kv_layer, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("heads", "head_dim"), [(9, 32), (2, 16)])
def test_heads_that_do_not_fit_a_tensor_core_product_are_refused(heads: int, head_dim: int) -> None:
    case = Case([5], heads=8, kv_heads=1, head_dim=head_dim, max_rows=1)
    case.step = replace(case.step, q=torch.zeros(1, heads, head_dim, device=DEVICE))
    with pytest.raises(ValueError, match=f"{heads} query heads share 1 KV heads of {head_dim} dimensions"):
        case.run()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (64, 8, 128)])
def test_every_type_and_shape_compiles_and_is_right(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(
        [1, 40, 700, 257], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=8, padding=1, dtype=dtype
    )  # fmt: skip
    case.check(tolerance=1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [256, 1000, 8192])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_layers_of_a_replayed_graph_do_not_see_each_others_haste(rows: int, context: int) -> None:
    """The qkv of each layer is written by the kernel just before, over poison."""
    generator = torch.Generator().manual_seed(rows + context)
    lens = torch.randint(1, context + 1, (rows,), generator=generator).tolist()
    lens[0] = context
    case = Case(lens, heads=16, kv_heads=8, head_dim=128, max_rows=256, padding=4, target_programs=132 * 8)
    qkv, case.qkv = case.qkv, torch.full_like(case.qkv, POISON)
    out = torch.full_like(case.step.q, POISON)
    case.qkv.copy_(qkv)
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

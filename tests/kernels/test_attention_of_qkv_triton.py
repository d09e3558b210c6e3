"""Decode attention of the qkv product, with keys and values in registers or streamed, against the references of its
parts and softmax in float64, on the GPU or interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_step import PAGE, exact_attention, make_step
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.attention_decode import DecodeTiling, can_stream, streamed_decode_attention, streamed_tiling
from gpu_runner.kernels.attention_fused import FusedTiling, can_fuse, fused_decode_attention, fused_tiling
from gpu_runner.kernels.decode_way import choose_decode
from gpu_runner.kernels.work_list import RangeCut, WorkList, allocate_work_list

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5
POISON = -7.0
BORDERS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100]
EPS = 1e-6

Tiling = FusedTiling | DecodeTiling
"""Of the kernel that is meant; a number stands for its warps."""
STREAMED = DecodeTiling(block_tokens=32, num_warps=1, num_stages=3, prefetch_pages=0)
BOTH = pytest.mark.parametrize("tiling", [8, STREAMED], ids=["fused", "streamed"])


class Case:
    """A pure decode step whose newest keys and values are in `qkv` only: NaN in the pages."""

    def __init__(
        self, lens: list[int], *, heads: int, kv_heads: int, head_dim: int, max_rows: int, padding: int = 0,
        normed: bool = True, window: int | None = None, target_programs: int = 64, dtype: torch.dtype = DTYPE,
        done: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        step = make_step(
            decode_lens=lens, chunks=[], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=max_rows,
            padding=padding, dtype=dtype, device=DEVICE,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(len(lens) + heads)
        rows, tokens = len(lens), len(step.q)
        qkv = torch.randn((tokens, (heads + 2 * kv_heads) * head_dim), generator=generator)
        qkv[rows:] = torch.nan
        self.qkv = qkv.to(dtype).to(DEVICE)
        norms = [1 + 0.3 * torch.randn(head_dim, generator=generator) for _ in range(2)]
        self.norms = [norm.to(dtype).to(DEVICE) if normed else None for norm in norms]
        inv_freq = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        self.rotation = reference.rope_cos_sin(torch.arange(max(lens) + 1), inv_freq).to(DEVICE)
        self.scale = head_dim**-0.5
        last = torch.tensor(lens, device=DEVICE) - 1
        page = step.page_table[step.row_slot[:rows].long(), last // PAGE].long()
        page[list(done)] = 0
        self.kv_index = (page * PAGE + last % PAGE).to(torch.int32)
        self.positions = last.to(torch.int32)
        step.kv_layer[:, page, :, last % PAGE] = torch.nan
        self.step = step
        self.work = self._work(max_rows, window, target_programs)
        self.expected_kv = step.kv_layer.clone()
        self.expected = self._exact(rows)

    def _work(self, max_rows: int, window: int | None, target_programs: int) -> WorkList:
        step = self.step
        heads, head_dim = step.q.shape[1:]
        work = allocate_work_list(
            max_rows=max_rows, max_tokens=max(max_rows, len(step.q)), num_heads=heads,
            num_kv_heads=step.kv_layer.shape[2], head_dim=head_dim, window=window, device=torch.device(DEVICE),
            cut=RangeCut(target_programs, split_step=64),
        )  # fmt: skip
        work.partial_out.fill_(torch.nan)
        work.partial_lse.fill_(torch.nan)
        self.build(work)
        return work

    def build(self, work: WorkList) -> None:
        self.step.list_work(work, prefill=False)

    def _exact(self, rows: int) -> Tensor:
        """Writes the newest keys and values into `expected_kv` too."""
        step = self.step

        def rotate_and_write(kv_layer: Tensor, kv_index: Tensor) -> Tensor:
            return reference.qk_norm_rope_write(
                self.qkv[:rows], self.rotation[self.positions.long()], kv_layer, kv_index.long(),
                num_heads=step.q.shape[1], q_norm=self.norms[0], k_norm=self.norms[1], eps=EPS,
            )  # fmt: skip

        rotate_and_write(self.expected_kv, self.kv_index)
        # Rows that have ended share a place of the dummy page: here each row has a page of its own.
        own = self.expected_kv.new_zeros((2, rows, *self.expected_kv.shape[2:]))
        q = rotate_and_write(own, torch.arange(rows, device=DEVICE) * PAGE)
        newest = own[:, :, :, 0].to("cpu", torch.float64)  # [2, rows, kv_heads, head_dim]
        keys = [torch.cat([old[:-1], newest[0, row : row + 1]]) for row, old in enumerate(step.keys)]
        values = [torch.cat([old[:-1], newest[1, row : row + 1]]) for row, old in enumerate(step.values)]
        rotated = replace(step, q=torch.cat([q, step.q[rows:]]), keys=keys, values=values)
        return exact_attention(rotated, scale=self.scale, window=self.work.window)

    def launch(self, out: Tensor, tiling: Tiling | int) -> None:
        if isinstance(tiling, int):
            tiling = fused_tiling(tiling, self.step.q.shape[2] * self.qkv.element_size())
        tensors = (self.qkv, self.step.kv_layer, out, self.work)
        options: dict[str, Any] = {
            "positions": self.positions, "kv_index": self.kv_index, "counts": self.step.counts,
            "page_table": self.step.page_table, "rotation": self.rotation, "q_norm": self.norms[0],
            "k_norm": self.norms[1], "eps": EPS, "scale": self.scale,
        }  # fmt: skip
        if isinstance(tiling, DecodeTiling):
            streamed_decode_attention(*tensors, tiling=tiling, **options)
        else:
            fused_decode_attention(*tensors, tiling=tiling, **options)

    def run(self, tiling: Tiling | int) -> Tensor:
        out = torch.full_like(self.step.q, POISON)
        self.launch(out, tiling)
        return out

    def check(self, tiling: Tiling | int, tolerance: float = TOLERANCE) -> None:
        """Every element of the output and of the pages, and that the kernel left no arrival behind."""
        out = self.run(tiling).cpu().to(torch.float64)
        rows = self.step.num_decode_rows
        assert float((out[:rows] - self.expected).norm() / self.expected.norm()) < tolerance
        assert float((out[:rows] - self.expected).abs().max()) < 5 * tolerance
        assert bool((out[rows:] == 0).all())
        torch.testing.assert_close(
            self.step.kv_layer[:, 1:], self.expected_kv[:, 1:], rtol=tolerance, atol=tolerance, equal_nan=True
        )
        assert not bool(self.work.arrived.any())


SHAPES = [
    (2, 2, 64, True),
    (4, 2, 128, False),
    (6, 2, 64, False),
    (4, 1, 128, True),
    (8, 1, 64, True),
    (5, 1, 32, True),
]
LARGE_SHAPES = [(9, 1, 64, False), (16, 1, 128, True), (2, 1, 256, True)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "normed", "tiling"),
    [
        *((*shape, tiling) for shape in SHAPES for tiling in (8, STREAMED)),
        *((*each, STREAMED) for each in LARGE_SHAPES),
    ],
)
def test_rows_at_page_and_tile_borders_equal_the_parts(
    heads: int, kv_heads: int, head_dim: int, normed: bool, tiling: Tiling | int
) -> None:
    Case(
        BORDERS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=16, padding=3, normed=normed
    ).check(tiling)  # fmt: skip


MIXED = [1, 513, 64, 130, 641, 65]


@pytest.mark.parametrize(
    ("tiling", "lens", "kv_heads"),
    [
        (FusedTiling(16, 1), [700], 1),
        (FusedTiling(16, 2), MIXED, 1),
        (FusedTiling(32, 1), MIXED, 1),
        (FusedTiling(32, 8), MIXED, 2),
        (replace(STREAMED, block_tokens=16), [700], 1),
        (replace(STREAMED, block_tokens=16), MIXED, 1),
        (STREAMED, MIXED, 2),
        (replace(STREAMED, block_tokens=128), MIXED, 2),
    ],
)
def test_rows_in_many_ranges_are_merged(tiling: Tiling, lens: list[int], kv_heads: int) -> None:
    case = Case(lens, heads=3 * kv_heads, kv_heads=kv_heads, head_dim=64, max_rows=6, target_programs=16 * kv_heads)
    items = case.work.items[: int(case.work.lengths[0])]
    assert int(items[:, 6].max()) >= 6
    if len(lens) > 1:
        assert [640, 641] in items[:, 2:4].tolist()  # a range of the newest key alone
    case.check(tiling)


@pytest.mark.parametrize(("group", "head_dim"), [(5, 64), (6, 64), (7, 64), (7, 128), (3, 32), (7, 32)])
def test_groups_of_any_number_of_heads_are_merged_too(group: int, head_dim: int) -> None:
    """Of which some are not a power of two, nor a multiple of the heads that are merged at a time."""
    for tiling in (FusedTiling(16, 4), FusedTiling(32, 8), STREAMED):
        case = Case([1, 530, 65], heads=2 * group, kv_heads=2, head_dim=head_dim, max_rows=3, target_programs=16)
        assert int(case.work.items[:, 6].max()) > 1
        case.check(tiling)


@pytest.mark.parametrize("tiling", [FusedTiling(16, 2), replace(STREAMED, block_tokens=16), STREAMED])
@pytest.mark.parametrize("window", [1, 16, 50, 64, 200])
def test_a_window_hides_all_earlier_keys(window: int, tiling: Tiling) -> None:
    lens = [1, 16, 17, 64, 65, 290]
    case = Case(lens, heads=4, kv_heads=2, head_dim=64, max_rows=7, window=window)
    step = case.step
    for row, length in enumerate(lens):
        # Pages wholly before the window may belong to others by now.
        gone = max(0, length - window) // PAGE
        pages = step.page_table[int(step.row_slot[row]), :gone].to(torch.int64)
        step.kv_layer[:, pages] = torch.nan
        case.expected_kv[:, pages] = torch.nan
    case.check(tiling)


@BOTH
def test_the_key_of_a_row_that_has_ended_goes_to_the_dummy_page(tiling: Tiling | int) -> None:
    case = Case([49, 20, 33], heads=2, kv_heads=1, head_dim=64, max_rows=4, padding=1, done=(0, 2))
    case.check(tiling)
    assert int(case.step.kv_layer[:, 0].isfinite().sum()) == 2 * 1 * 64  # both at the first place


@BOTH
def test_a_row_past_its_last_page_reads_no_further_than_its_table(tiling: Tiling | int) -> None:
    case = Case([33, 20], heads=2, kv_heads=1, head_dim=64, max_rows=2, done=(0,))
    case.step = replace(case.step, page_table=case.step.page_table[:, :2].contiguous())
    case.build(case.work)
    assert int(case.work.items[0, 3]) == 32
    case.check(tiling)


@BOTH
@pytest.mark.parametrize("padding", [1, 40])
def test_a_step_without_rows_writes_its_padding_only(padding: int, tiling: Tiling | int) -> None:
    case = Case([5], heads=2, kv_heads=1, head_dim=64, max_rows=3, padding=padding - 1, target_programs=2)
    case.step.counts.zero_()
    case.build(case.work)
    before = case.step.kv_layer.clone()
    assert bool((case.run(tiling) == 0).all())
    torch.testing.assert_close(case.step.kv_layer, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "head_dim", "tiling", "refused"),
    [(9, 32, 8, "of 32 dimensions"), (2, 16, 8, "of 16 dimensions"), (17, 64, STREAMED, "in torch.float32")],
)
def test_heads_that_do_not_fit_a_tensor_core_product_are_refused(
    heads: int, head_dim: int, tiling: Tiling | int, refused: str
) -> None:
    case = Case([5], heads=8, kv_heads=1, head_dim=head_dim, max_rows=1, dtype=torch.float32)
    case.step = replace(case.step, q=torch.zeros(1, heads, head_dim, device=DEVICE))
    with pytest.raises(ValueError, match=f"{heads} query heads share 1 KV heads {refused}"):
        case.run(tiling)


def test_a_gpus_kernels_take_no_float32() -> None:
    keys = torch.empty(4, 8, 16, 128, device="meta", dtype=torch.bfloat16)
    assert can_fuse(keys, 16)
    assert not can_fuse(keys.float(), 16)
    assert can_stream(keys, 128)
    assert not can_stream(keys.float(), 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_what_is_fused_can_stream(head_dim: int, dtype: torch.dtype) -> None:
    """Steps of such models take either kernel, by their rows and contexts."""
    keys = torch.empty(4, 2, 16, head_dim, device="meta", dtype=dtype)
    groups = range(1, 33)
    fused = [can_fuse(keys, 2 * group) for group in groups]
    assert any(fused) == (head_dim >= 32 and dtype != torch.float32)
    assert all(can_stream(keys, 2 * group) for group, fuses in zip(groups, fused, strict=True) if fuses)


LONGEST = 3000 if ON_GPU else 150


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 32] if ON_GPU else [1, 3, 17])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(16, 8, 128), (32, 8, 128), (4, 1, 128), (9, 3, 64), (2, 1, 256)] if ON_GPU else [(2, 1, 64)],
)
def test_rows_are_right_as_steps_cut_and_tile_them(
    heads: int, kv_heads: int, head_dim: int, rows: int, long: bool
) -> None:
    """On a GPU with ranges of several tiles."""
    generator = torch.Generator().manual_seed(rows)
    lens = torch.randint(LONGEST // 2, LONGEST + 1, (rows,), generator=generator).tolist()
    case = Case(lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=32, target_programs=132 * 8)
    way = choose_decode(rows, prefill=False, fuses=True, long=long)
    case.work = case.work.recut(way.cut)
    case.build(case.work)
    case.check(way.fused_warps or streamed_tiling(rows * kv_heads, head_dim, case.qkv.element_size()))


STREAMED_SHAPES = [(16, 8, 128), (32, 8, 128), (16, 1, 128), (9, 3, 64), (2, 1, 256)]


@pytest.mark.parametrize("rows", [33, 64] if ON_GPU else [40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), STREAMED_SHAPES if ON_GPU else [(2, 1, 64)])
def test_many_rows_are_right_as_steps_cut_and_tile_them(heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    lens = torch.randint(1, LONGEST + 1, (rows,), generator=generator).tolist()
    case = Case(lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=256, target_programs=132 * 8)
    case.work = case.work.recut(choose_decode(rows, prefill=False, fuses=True).cut)
    case.build(case.work)
    case.check(streamed_tiling(rows * kv_heads, head_dim, case.qkv.element_size()))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (64, 8, 128)])
def test_every_type_of_two_bytes_and_shape_compiles_and_is_right(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tiling: Tiling | int
) -> None:
    case = Case(
        [1, 40, 700, 257], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=8, padding=1, dtype=dtype
    )  # fmt: skip
    case.check(tiling, tolerance=1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("context", [256, 1000, 8192])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_layers_of_a_replayed_graph_do_not_see_each_others_haste(rows: int, context: int, tiling: Tiling | int) -> None:
    """The qkv of each layer is written by the kernel just before, over poison."""
    generator = torch.Generator().manual_seed(rows + context)
    lens = torch.randint(1, context + 1, (rows,), generator=generator).tolist()
    lens[0] = context
    case = Case(lens, heads=16, kv_heads=8, head_dim=128, max_rows=256, padding=4, target_programs=132 * 8)
    qkv, case.qkv = case.qkv, torch.full_like(case.qkv, POISON)
    out = torch.full_like(case.step.q, POISON)
    case.qkv.copy_(qkv)
    case.launch(out, tiling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.build(case.work)
        for _ in range(4):
            out.fill_(POISON)  # between the list's writer and the kernel that reads it ahead of its wait
            case.qkv.fill_(POISON)
            case.qkv.copy_(qkv)
            case.launch(out, tiling)
    for _ in range(20):
        graph.replay()
        got = out.cpu().to(torch.float64)
        assert float((got[:rows] - case.expected).norm() / case.expected.norm()) < TOLERANCE
        assert bool((got[rows:] == 0).all())
    assert not bool(case.work.arrived.any())

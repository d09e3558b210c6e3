"""Who computes what in a step's attention, decided on the device once for all layers.

The kernels of attention run at fixed grids inside captured graphs, while the rows of a step and their lengths are known
to device memory only. So a list says what each program works at: ranges of keys for decode rows, tiles of queries for
prefill rows.

Decode: the step's T_d decode rows see L keys in total. They are cut into ranges of about
    size = max(split_step, L / target, longest / MAX_SPLITS), rounded up to split_step,
so that short steps fill the machine, ragged ones are balanced, and a step with rows enough is not cut at all. Where few
programs run at once, so that they end in rounds, and their starts show, it is the size from there on by which the last
round ends soonest. All of that depends on the step's tokens, and on whether their contexts are long (`decode_way`). A
row of v keys gets at most ceil(v / size) ranges. Hence
    items   <= sum(v / size + 1) <= target + T_d, and <= T_d * MAX_SPLITS,
    partial <= 2 * target: only rows with v > size are cut, and their ceil(v / size) <= 2 * v / size.
They are listed by falling length, roughly: what is begun last is short, so that programs end at about the same time.

Prefill: a row's tokens are cut into tiles of `tile_tokens`. R_p rows with N tokens have at most R_p + (N - R_p) /
tile_tokens tiles, as each row has a token. Tiles are listed by falling number of keys. Sorting takes time that is
square in the tiles; a step has tens of them, or hundreds.

A list holds for one sliding window; a model whose layers have different ones has a list for each. `step_meta` builds
the first, beside what else it does, `build_work_list` the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.work_list_kernel import CUT_ARGUMENTS, build_kernel

MULTIPROCESSORS = 132
"""Of an H200."""
SPLIT_ALIGN = 64
"""A row's ranges are equally long, up to multiples of as many tokens."""
MAX_SPLITS = 32
"""Ranges of one row, so that merging them is one tile."""
PREFILL_TILE_ROWS = 128
"""Rows of a prefill program's query tile: tokens x query heads of a KV head."""

ALL_ROWS_TILE_ROWS = 64
"""Of tiles of which most hold one token: the fewest that a warpgroup multiplies."""

ITEM_WORDS = 8
TILE_WORDS = 4
ROW_BLOCK = 256
SORT_BLOCK = 128
OTHERS_BLOCK = 32


@dataclass(frozen=True, slots=True)
class RangeCut:
    """programs: ranges x KV heads that a decode step of fewer rows is cut into, about, or at most. split_step: tokens
    of a row that are not worth cutting, at most SPLIT_ALIGN or a multiple of it: merging the results of shorter ranges
    costs more than they save. at_once: programs that run at a time, for steps of at most `FEW_ROWS` rows; 0: so many,
    and so small, that it does not matter. start_keys: as many of a program's keys take as long as its start does."""

    programs: int
    split_step: int
    at_once: int = 0
    start_keys: int = 0


FEW_ROWS = 64
"""Most decode rows of a step whose ranges are cut with an eye to rounds."""
LARGE_CUT = RangeCut(8 * MULTIPROCESSORS, 512)
"""Of steps of many tokens; no other cut has more programs."""


LIST_SHAPE = (
    *CUT_ARGUMENTS,
    *("WINDOW", "ALIGN", "MAX_SPLITS", "TILE", "ROWS", "FEW", "LISTS"),
    *("ITEM_WORDS", "TILE_WORDS", "SORT", "OTHERS", "ALL_ROWS"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """Device buffers at fixed addresses; one for each sliding window of the model, shared by all graphs and layers.

    items: a decode row, its slot, the range's first key and the one behind its last, the row's first partial result,
    the range's place among the row's, the number of the row's, the first key that the row sees. tiles: a slot, the
    first query's index in the flat batch and its position, the number of queries.
    """

    max_rows: int
    target_items: int
    tile_tokens: int
    cut: RangeCut
    window: int | None
    all_rows: bool
    items: Tensor  # [decode_items(max_rows), ITEM_WORDS] int32
    tiles: Tensor  # [prefill_tiles(max_tokens), TILE_WORDS] int32
    sort_keys: Tensor  # [prefill_tiles(max_tokens)] int64, scratch
    lengths: Tensor  # [2] int32: items, tiles
    partial_out: Tensor  # [2 * target_items, num_heads, head_dim] float32
    partial_lse: Tensor  # [2 * target_items, num_heads] float32, base 2
    arrived: Tensor  # [2 * target_items, num_kv_heads] int32, zero between kernels

    def recut(self, cut: RangeCut) -> WorkList:
        """The same buffers, for steps whose decode rows are cut so: at most into as many programs as these were made
        for."""
        target = max(1, cut.programs // self.num_kv_heads)
        return replace(self, target_items=min(self.target_items, target), cut=cut)

    @property
    def num_kv_heads(self) -> int:
        return self.arrived.shape[1]

    def decode_items(self, num_tokens: int) -> int:
        """The most items that a step of `num_tokens` tokens, padding included, can have."""
        rows = min(num_tokens, self.max_rows)
        return min(rows + self.target_items, rows * MAX_SPLITS)

    def prefill_tiles(self, num_tokens: int) -> int:
        """The most tiles that a step of `num_tokens` tokens can have."""
        rows = min(num_tokens, self.max_rows)
        return rows + (num_tokens - rows) // self.tile_tokens


def allocate_work_list(
    *,
    max_rows: int,
    max_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    device: torch.device,
    cut: RangeCut = LARGE_CUT,
    tile_rows: int | None = None,
    all_rows: bool = False,
) -> WorkList:
    """max_rows: rows of any step, below 2**16. max_tokens: of any step, at least max_rows, below 2**24. cut: the one of
    most programs, of those that there will be.

    window: tokens that a layer's queries see, their own included; None = all. all_rows: decode rows are cut into tiles
    too, as chunks of one token, and there are no ranges. tile_rows: None takes what `prefill_tiling` is made for.
    Zeroed, so that what a kernel reads ahead of time is always a valid index.
    """
    target = max(1, cut.programs // num_kv_heads)
    tile_rows = tile_rows or (ALL_ROWS_TILE_ROWS if all_rows else PREFILL_TILE_ROWS)
    tile_tokens = max(1, tile_rows // (num_heads // num_kv_heads))
    num_tiles = max_rows + (max_tokens - max_rows) // tile_tokens

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return WorkList(
        max_rows=max_rows,
        target_items=target,
        tile_tokens=tile_tokens,
        cut=cut,
        window=window,
        all_rows=all_rows,
        items=zeros(min(max_rows + target, max_rows * MAX_SPLITS), ITEM_WORDS),
        tiles=zeros(num_tiles, TILE_WORDS),
        sort_keys=zeros(num_tiles, dtype=torch.int64),
        lengths=zeros(2),
        partial_out=zeros(2 * target, num_heads, head_dim, dtype=torch.float32),
        partial_lse=zeros(2 * target, num_heads, dtype=torch.float32),
        arrived=zeros(2 * target, num_kv_heads),
    )


def build_work_list(
    work: WorkList,
    *,
    counts: Tensor,
    row_slot: Tensor,
    row_start: Tensor,
    row_len: Tensor,
    row_token: Tensor,
    page_table: Tensor,
    prefill: bool,
) -> None:
    """Fill `work` for a step. One launch of one or two programs, before the first layer.

    counts: [4] int32: decode rows, rows, tokens, 0. row_slot, row_start, row_len, row_token: [max_rows] int32, of which
    the first `counts[1]` are read; row_start: tokens in the KV cache before the step, row_token: index of the row's
    first token in the flat batch. page_table: [num_slots, pages_per_seq] int32, for its shape: a row that has ended may
    stand behind its last page, and sees what the pages hold. prefill: whether the step can have prefill rows.

    Fixed inside a graph: all addresses and shapes, the list's cut, `prefill`.
    """
    shape = list_shape(work, prefill=prefill)
    build_kernel[(shape["LISTS"],)](
        counts,
        row_slot,
        row_start,
        row_len,
        row_token,
        work.items,
        work.tiles,
        work.sort_keys,
        work.lengths,
        page_table.shape[1] * PAGE_SIZE,
        **shape,
        **launch_options(counts, 4),
    )


def list_shape(work: WorkList | None, *, prefill: bool) -> dict[str, int]:
    """What the kernels that list are told, and compiled for; `LISTS` is the number of programs that do. None: they do
    not."""
    if work is None:
        return dict.fromkeys(LIST_SHAPE, 0)
    rows = min(ROW_BLOCK, max(32, triton.next_power_of_2(work.max_rows)))
    cut = work.cut
    align = min(cut.split_step, SPLIT_ALIGN)
    lists = 2 if prefill or work.all_rows else 1
    few = FEW_ROWS if cut.at_once else 0
    told = (work.target_items, cut.split_step, cut.at_once, cut.start_keys, work.num_kv_heads)
    shape = (work.window or 0, align, MAX_SPLITS, work.tile_tokens, rows, few, lists)
    sizes = (ITEM_WORDS, TILE_WORDS, SORT_BLOCK, OTHERS_BLOCK, int(work.all_rows))
    return dict(zip(LIST_SHAPE, (*told, *shape, *sizes), strict=True))

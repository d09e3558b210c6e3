"""Who computes what in a step's attention, decided on the device by one small kernel that all layers share.

The kernels of attention run at fixed grids inside captured graphs, while the rows of a step and their lengths are known
to device memory only. So a list says what each program works at: ranges of keys for decode rows, tiles of queries for
prefill rows.

Decode: the step's T_d decode rows see L keys in total. They are cut into ranges of about
    size = max(SPLIT_STEP, L / target, longest / MAX_SPLITS), rounded up to SPLIT_STEP,
so that short steps fill the machine, ragged ones are balanced, and a step with rows enough is not cut at all. A row of
v keys gets at most ceil(v / size) ranges. Hence
    items   <= sum(v / size + 1) <= target + T_d, and <= T_d * MAX_SPLITS,
    partial <= 2 * target: only rows with v > size are cut, and their ceil(v / size) <= 2 * v / size.

Prefill: a row's tokens are cut into tiles of `tile_tokens`. R_p rows with N tokens have at most R_p + (N - R_p) /
tile_tokens tiles, as each row has a token. Tiles are listed by falling number of keys. Sorting takes time that is
square in the tiles; a step has tens of them, or hundreds.

A list holds for one sliding window; a model whose layers have different ones builds a list for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.config import PAGE_SIZE

TARGET_PROGRAMS = 132 * 8
"""Programs (ranges x KV heads) that a decode step is cut into if it has fewer rows: about two rounds of an H200."""
SPLIT_STEP = 64
"""Tokens; ranges of keys are multiples of it. Shorter ones cost more in partial results than they save."""
MAX_SPLITS = 32
"""Ranges of one row, so that merging them is one tile."""
PREFILL_TILE_ROWS = 128
"""Rows of a prefill program's query tile: tokens x query heads of a KV head."""

ITEM_WORDS = 8
TILE_WORDS = 4
ROW_BLOCK = 256
SORT_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """Device buffers at fixed addresses; one for each sliding window of the model, shared by all graphs and layers.

    items: a decode row, its slot, the range's first key and the one behind its last, the row's first partial result,
    the range's place among the row's, the number of the row's, the first key that the row sees. tiles: a slot, the
    first query's index in the flat batch and its position, the number of queries.
    """

    max_rows: int
    max_tokens: int
    num_kv_heads: int
    target_items: int
    tile_tokens: int
    window: int | None
    items: Tensor  # [decode_items(max_rows), ITEM_WORDS] int32
    tiles: Tensor  # [prefill_tiles(max_tokens), TILE_WORDS] int32
    sort_keys: Tensor  # [prefill_tiles(max_tokens)] int64, scratch
    lengths: Tensor  # [2] int32: items, tiles
    partial_out: Tensor  # [2 * target_items, num_heads, head_dim] float32
    partial_lse: Tensor  # [2 * target_items, num_heads] float32, base 2
    arrived: Tensor  # [2 * target_items, num_kv_heads] int32, zero between kernels

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
    target_programs: int = TARGET_PROGRAMS,
    tile_rows: int = PREFILL_TILE_ROWS,
) -> WorkList:
    """max_rows: rows of any step, below 2**16. max_tokens: of any step, at least max_rows, below 2**24.

    window: tokens that a layer's queries see, their own included; None = all. Zeroed, so that what a kernel reads ahead
    of time is always a valid index.
    """
    target = max(1, target_programs // num_kv_heads)
    tile_tokens = tile_rows // (num_heads // num_kv_heads)
    num_tiles = max_rows + (max_tokens - max_rows) // tile_tokens

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return WorkList(
        max_rows=max_rows,
        max_tokens=max_tokens,
        num_kv_heads=num_kv_heads,
        target_items=target,
        tile_tokens=tile_tokens,
        window=window,
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
    pdl: bool = True,
) -> None:
    """Fill `work` for a step. One launch of one or two programs, before the first layer.

    counts: [4] int32: decode rows, rows, tokens, 0. row_slot, row_start, row_len, row_token: [max_rows] int32, of which
    the first `counts[1]` are read; row_start: tokens in the KV cache before the step, row_token: index of the row's
    first token in the flat batch. page_table: [num_slots, pages_per_seq] int32, for its shape: a row that has ended may
    stand behind its last page, and sees what the pages hold. prefill: whether the step can have prefill rows.

    Fixed inside a graph: all addresses and shapes, `prefill`. The kernel lets the next one start only when it is done,
    so any later kernel of the stream may read the list, and what was written before it, without waiting.
    """
    options: dict[str, Any] = {"launch_pdl": True} if pdl and counts.is_cuda else {}
    _build_kernel[(2 if prefill else 1,)](
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
        WINDOW=work.window or 0,
        TARGET=work.target_items,
        STEP=SPLIT_STEP,
        MAX_SPLITS=MAX_SPLITS,
        TILE=work.tile_tokens,
        ITEM_WORDS=ITEM_WORDS,
        TILE_WORDS=TILE_WORDS,
        ROWS=min(ROW_BLOCK, max(32, triton.next_power_of_2(work.max_rows))),
        SORT=SORT_BLOCK,
        PDL=bool(options),
        num_warps=4,
        **options,
    )


@triton.jit
def _build_kernel(
    counts,
    row_slot,
    row_start,
    row_len,
    row_token,
    items,
    tiles,
    sort_keys,
    lengths,
    kv_capacity,
    WINDOW: tl.constexpr,
    TARGET: tl.constexpr,
    STEP: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    SORT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_decode_rows = tl.load(counts)
    if tl.program_id(0) == 0:
        _list_decode(
            num_decode_rows, row_slot, row_start, items, lengths, kv_capacity,
            WINDOW, TARGET, STEP, MAX_SPLITS, ITEM_WORDS, ROWS,
        )  # fmt: skip
    else:
        num_rows = tl.load(counts + 1)
        num_tiles = _cut_chunks(num_decode_rows, num_rows, row_start, row_len, sort_keys, WINDOW, TILE, ROWS)
        tl.debug_barrier()
        _list_tiles(num_tiles, row_slot, row_start, row_len, row_token, sort_keys, tiles, TILE, TILE_WORDS, SORT)
        tl.store(lengths + 1, num_tiles)


@triton.jit
def _visible(row, exists, row_start, kv_capacity, WINDOW: tl.constexpr, STEP: tl.constexpr):
    """First key that a decode row sees, where its ranges begin (a multiple of STEP) and the key behind its last."""
    end = tl.minimum(tl.load(row_start + row, mask=exists, other=0) + 1, kv_capacity)
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    begin = first // STEP * STEP
    return first, tl.where(exists, begin, 0), tl.where(exists, end, 0)


@triton.jit
def _list_decode(
    num_rows, row_slot, row_start, items, lengths, kv_capacity,
    WINDOW: tl.constexpr, TARGET: tl.constexpr, STEP: tl.constexpr, MAX_SPLITS: tl.constexpr,
    ITEM_WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, ROWS)
    keys = 0
    longest = 0
    for block in range(0, num_rows, ROWS):
        _, begin, end = _visible(block + place, block + place < num_rows, row_start, kv_capacity, WINDOW, STEP)
        keys += tl.sum(end - begin)
        longest = tl.maximum(longest, tl.max(end - begin))
    size = tl.maximum(tl.maximum(tl.cdiv(keys, TARGET), tl.cdiv(longest, MAX_SPLITS)), STEP)
    size = tl.cdiv(size, STEP) * STEP

    num_items = 0
    num_partial = 0
    for block in range(0, num_rows, ROWS):
        row = block + place
        exists = row < num_rows
        slot = tl.load(row_slot + row, mask=exists, other=0)
        first, begin, end = _visible(row, exists, row_start, kv_capacity, WINDOW, STEP)
        # The same number of ranges, or fewer, of equal size.
        even = tl.maximum(tl.cdiv(end - begin, tl.maximum(tl.cdiv(end - begin, size), 1)), 1)
        even = tl.cdiv(even, STEP) * STEP
        splits = tl.cdiv(end - begin, even)
        partial = tl.where(splits > 1, splits, 0)
        item = num_items + tl.cumsum(splits) - splits
        first_partial = num_partial + tl.cumsum(partial) - partial
        for split in range(0, tl.max(splits)):
            listed = split < splits
            word = items + (item + split) * ITEM_WORDS
            tl.store(word, row, mask=listed)
            tl.store(word + 1, slot, mask=listed)
            tl.store(word + 2, begin + split * even, mask=listed)
            tl.store(word + 3, tl.minimum(begin + (split + 1) * even, end), mask=listed)
            tl.store(word + 4, first_partial, mask=listed)
            tl.store(word + 5, tl.zeros_like(row) + split, mask=listed)
            tl.store(word + 6, splits, mask=listed)
            tl.store(word + 7, first, mask=listed)
        num_items += tl.sum(splits)
        num_partial += tl.sum(partial)
    tl.store(lengths, num_items)


@triton.jit
def _cut_chunks(
    first_row, num_rows, row_start, row_len, sort_keys, WINDOW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """A sort key for each tile: keys it sees (24 bits), row (16), place in the row (24). Returns their number."""
    place = tl.arange(0, ROWS)
    num_tiles = 0
    for block in range(first_row, num_rows, ROWS):
        row = block + place
        exists = row < num_rows
        start = tl.load(row_start + row, mask=exists, other=0)
        length = tl.load(row_len + row, mask=exists, other=0)
        count = tl.cdiv(length, TILE)
        first_tile = num_tiles + tl.cumsum(count) - count
        for tile in range(0, tl.max(count)):
            seen = start + tl.minimum((tile + 1) * TILE, length)
            if WINDOW > 0:
                seen = tl.minimum(seen, WINDOW + TILE)
            key = (seen.to(tl.int64) << 40) | (row.to(tl.int64) << 24) | tile
            tl.store(sort_keys + first_tile + tile, key, mask=tile < count)
        num_tiles += tl.sum(count)
    return num_tiles


@triton.jit
def _list_tiles(
    num_tiles, row_slot, row_start, row_len, row_token, sort_keys, tiles,
    TILE: tl.constexpr, TILE_WORDS: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """Write each tile to the place that the number of larger keys gives it; keys are distinct."""
    place = tl.arange(0, SORT)
    for block in range(0, num_tiles, SORT):
        exists = block + place < num_tiles
        key = tl.load(sort_keys + block + place, mask=exists, other=0)
        rank = tl.zeros((SORT,), tl.int32)
        for other in range(0, num_tiles, SORT):
            others = tl.load(sort_keys + other + place, mask=other + place < num_tiles, other=-1)
            rank += tl.sum((others[None, :] > key[:, None]).to(tl.int32), axis=1)
        row = ((key >> 24) & 0xFFFF).to(tl.int32)
        token = (key & 0xFFFFFF).to(tl.int32) * TILE
        word = tiles + rank * TILE_WORDS
        tl.store(word, tl.load(row_slot + row, mask=exists, other=0), mask=exists)
        tl.store(word + 1, tl.load(row_token + row, mask=exists, other=0) + token, mask=exists)
        tl.store(word + 2, tl.load(row_start + row, mask=exists, other=0) + token, mask=exists)
        left = tl.load(row_len + row, mask=exists, other=0) - token
        tl.store(word + 3, tl.minimum(left, TILE), mask=exists)

"""Causal attention of prefill chunks over paged keys and values: FlashAttention-2 (Dao, 2023).

A program takes tiles of the work list for one KV head each. A tile holds a few tokens' query heads that share the KV
head, tokens x group rows, so that each key and value is read once for the whole group. Programs are as many as the
machine holds; tiles come by falling number of keys, dealt out to and fro, so that all end at about the same time:

    program     0   1   2   3
    first       9   8   7   6  ->
    second      2   3   4   5  <-
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.attention_parts import LOG2_E, nearest_own
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.work_list import TILE_WORDS, WorkList

MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """block_tokens: keys of one tile. programs: of the grid, unless fewer can have work."""

    block_tokens: int
    num_warps: int
    num_stages: int
    programs: int


def prefill_tiling(element_bytes: int = 2, *, all_rows: bool = False) -> PrefillTiling:
    """Two warpgroups on 128 rows of queries; their registers leave no room for a second program, which a longer
    pipeline of keys and values makes up for. With tiles of all rows, of 64 rows of queries, one warpgroup: two programs
    fit. Float32 products run outside the tensor cores; only small tiles fit the registers."""
    if element_bytes == 4:
        return PrefillTiling(block_tokens=16, num_warps=8, num_stages=2, programs=MULTIPROCESSORS)
    if all_rows:
        return PrefillTiling(block_tokens=64, num_warps=4, num_stages=3, programs=2 * MULTIPROCESSORS)
    return PrefillTiling(block_tokens=64, num_warps=8, num_stages=3, programs=MULTIPROCESSORS)


def prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    page_table: Tensor,
    scale: float,
    tiling: PrefillTiling | None = None,
) -> None:
    """Attention of a step's prefill rows, whose keys and values are in their pages already, into `out`.

    q, out: [T, num_heads, head_dim] contiguous, of kv_layer's dtype. kv_layer: [2, num_pages, num_kv_heads, page_size,
    head_dim]. work: built for this step and the layer's window. page_table: [num_slots, pages_per_seq] int32. scale:
    positive. head_dim: a power of two.

    Writes the prefill rows' tokens only: `decode_attention` of the same step writes the others. With a list of all rows
    it writes theirs, and leaves padding; then a query's result depends on its own keys alone, not on the tile it is in:
    blocks of keys lie at the same positions and are gone through in the same way. Fixed inside a graph: all addresses
    and shapes.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = kv_layer.shape
    tiling = tiling or prefill_tiling(q.element_size(), all_rows=work.all_rows)
    group = num_heads // num_kv_heads
    _prefill_kernel[(min(tiling.programs, work.prefill_tiles(num_tokens) * num_kv_heads),)](
        q,
        kv_layer,
        out,
        page_table,
        work.tiles,
        work.lengths,
        kv_layer.stride(0),
        page_table.stride(0),
        scale * LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(work.tile_tokens * group)),
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK=tiling.block_tokens,
        STAGES=tiling.num_stages,
        WINDOW=work.window or 0,
        MASK_ALL=work.all_rows,
        TILE_WORDS=TILE_WORDS,
        num_stages=tiling.num_stages,
        **launch_options(q, tiling.num_warps),
    )


@triton.jit
def _prefill_kernel(
    q,
    kv,
    out,
    page_table,
    tiles,
    lengths,
    value_offset,
    table_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK_ALL: tl.constexpr,  # one loop for all blocks of keys, so that each is computed by the same instructions
    TILE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, HEAD_DIM)
    in_tile = tl.arange(0, ROWS) // GROUP
    in_group = tl.arange(0, ROWS) % GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tasks = tl.load(lengths + 1) * KV_HEADS
    for round_start in range(0, num_tasks, programs):
        backwards = (round_start // programs) % 2 == 1
        task = round_start + tl.where(backwards, programs - 1 - program, program)
        if task < num_tasks:
            word = tiles + task // KV_HEADS * TILE_WORDS
            kv_head = task % KV_HEADS
            table = page_table + tl.load(word).to(tl.int64) * table_stride
            token = tl.load(word + 1)
            start = tl.load(word + 2)
            count = tl.load(word + 3)

            head = kv_head * GROUP + in_group
            in_batch = ((token + in_tile).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + lane[None, :]
            exists = (in_tile < count)[:, None]
            query = tl.load(q + in_batch, mask=exists, other=0.0)
            position = start + tl.minimum(in_tile, count - 1)
            end = start + count
            heads_of = kv + kv_head * (PAGE * HEAD_DIM)

            total = tl.zeros((ROWS, HEAD_DIM), tl.float32)
            weight = tl.zeros((ROWS,), tl.float32)
            largest = tl.full((ROWS,), -1.0e30, tl.float32)
            if WINDOW > 0:
                seen_from = tl.maximum(start - WINDOW + 1, 0)
                total, weight, largest = _attend(
                    total, weight, largest, query, position, seen_from // BLOCK * BLOCK, end, seen_from, end,
                    heads_of, value_offset, table, scale_log2, True, WINDOW, KV_HEADS, HEAD_DIM, PAGE, BLOCK, STAGES,
                )  # fmt: skip
            elif MASK_ALL:
                total, weight, largest = _attend(
                    total, weight, largest, query, position, 0, end, 0, end,
                    heads_of, value_offset, table, scale_log2, True, 0, KV_HEADS, HEAD_DIM, PAGE, BLOCK, STAGES,
                )  # fmt: skip
            else:
                # Up to here all of the tile's queries see all keys.
                full = (start + 1) // BLOCK * BLOCK
                total, weight, largest = _attend(
                    total, weight, largest, query, position, 0, full, 0, end,
                    heads_of, value_offset, table, scale_log2, False, 0, KV_HEADS, HEAD_DIM, PAGE, BLOCK, STAGES,
                )  # fmt: skip
                total, weight, largest = _attend(
                    total, weight, largest, query, position, full, end, 0, end,
                    heads_of, value_offset, table, scale_log2, True, 0, KV_HEADS, HEAD_DIM, PAGE, BLOCK, STAGES,
                )  # fmt: skip
            total = total / weight[:, None]
            tl.store(out + in_batch, total.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _attend(
    total, weight, largest, query, position, first, last, seen_from, end,
    kv, value_offset, table, scale_log2,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go on over keys first .. last - 1 (first a multiple of BLOCK). MASKED: some query may not see all of them, and
    there may be none at seen_from and below or at `end` and behind: the nearest own key is read there instead."""
    key = tl.arange(0, BLOCK)
    lane = tl.arange(0, HEAD_DIM)
    page = tl.load(table + nearest_own(first + key, seen_from, end) // PAGE)
    for tile in tl.range(first, last, BLOCK, num_stages=STAGES):
        key_position = tile + key
        own = nearest_own(key_position, seen_from, end) if MASKED else key_position
        place = kv + (page.to(tl.int64) * (KV_HEADS * PAGE) + (own & (PAGE - 1)))[:, None] * HEAD_DIM + lane[None, :]
        # The next tile's, so that no load of keys waits for a load of pages.
        page = tl.load(table + nearest_own(tile + BLOCK + key, seen_from, end) // PAGE)
        score = tl.dot(query, tl.trans(tl.load(place)), input_precision="ieee")
        if MASKED:
            visible = key_position[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= key_position[None, :] > position[:, None] - WINDOW
            score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1) * scale_log2)
        share = tl.exp2(score * scale_log2 - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        weight = weight * shrink + tl.sum(share, axis=1)
        value = tl.load(place + value_offset)
        total = tl.dot(share.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return total, weight, largest

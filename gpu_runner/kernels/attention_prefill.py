"""Causal attention of prefill chunks over paged keys and values: FlashAttention-2 (Dao, 2023).

A program takes tiles of the work list for one KV head each. A tile holds a few tokens' query heads that share the KV
head, tokens x group rows, so that each key and value is read once for the whole group. Programs are as many as the
machine holds; tiles come by falling number of keys, dealt out to and fro, so that all end at about the same time. Two
programs that share a multiprocessor, if any do, are half a grid apart; the one's long tile meets the other's short one:

    program     0   1   2   3
    first       9   8   6   7
    second      2   3   5   4
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.attention_parts import LOG2_E
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.work_list import MULTIPROCESSORS, TILE_WORDS, WorkList


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """block_tokens: keys of one tile. programs: of the grid, unless fewer can have work. max_registers: of a thread;
    None: as many as the compiler takes."""

    block_tokens: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int | None = None


def prefill_tiling(*, tasks: int, head_dim: int, element_bytes: int = 2, all_rows: bool = False) -> PrefillTiling:
    """For a step of about `tasks` tasks: tiles of 128 rows of queries, for one KV head and two warpgroups each.

    With three tasks or more a multiprocessor, two programs share it: one multiplies while the other takes exponentials.
    This outweighs what half the registers cost, spills and waits for each product: 404 us instead of 442 for 4096
    queries of 16 heads behind 4096 keys. But each task takes longer, and of few the longest decides, 74 us instead of
    49 for 2000 queries: so these go to programs that have all the registers, and a longer pipeline of keys and values.
    More than 128 dimensions do not fit half the registers, nor the longer pipeline the shared memory.

    With tiles of all rows, of 64 rows of queries, one warpgroup: two programs fit, for every number of tasks. Float32
    products run outside the tensor cores; only small tiles fit the registers.
    """
    if element_bytes == 4:
        return PrefillTiling(block_tokens=16, num_warps=8, num_stages=2, programs=MULTIPROCESSORS)
    if all_rows:
        return PrefillTiling(block_tokens=64, num_warps=4, num_stages=3, programs=2 * MULTIPROCESSORS)
    if tasks >= 3 * MULTIPROCESSORS and head_dim <= 128:
        return PrefillTiling(
            block_tokens=64, num_warps=8, num_stages=2, programs=2 * MULTIPROCESSORS, max_registers=128
        )
    num_stages = 3 if head_dim <= 128 else 2
    return PrefillTiling(block_tokens=64, num_warps=8, num_stages=num_stages, programs=MULTIPROCESSORS)


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
    group = num_heads // num_kv_heads
    # Of a step of long chunks; `prefill_tiles` is far more if there can be many rows.
    tasks = triton.cdiv(num_tokens, work.tile_tokens) * num_kv_heads
    tiling = tiling or prefill_tiling(
        tasks=tasks, head_dim=head_dim, element_bytes=q.element_size(), all_rows=work.all_rows
    )
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
        maxnreg=tiling.max_registers,
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
    MASK_ALL: tl.constexpr,  # mask all blocks of keys, so that each is computed by the same instructions
    TILE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    half = programs // 2
    place = tl.where(program < half, program, programs - 1 - (program - half))
    lane = tl.arange(0, HEAD_DIM)
    in_tile = tl.arange(0, ROWS) // GROUP
    in_group = tl.arange(0, ROWS) % GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tasks = tl.load(lengths + 1) * KV_HEADS
    last_task = tl.maximum(num_tasks, 1) - 1
    next_slot, next_token, next_start, next_count = _tile_of(tiles, tl.minimum(place, last_task), KV_HEADS, TILE_WORDS)
    for round_start in range(0, num_tasks, programs):
        task = round_start + place
        place = programs - 1 - place
        slot, token, start, count = next_slot, next_token, next_start, next_count
        # The next task's, so that it does not begin with waiting for them.
        next_task = tl.minimum(round_start + programs + place, last_task)
        next_slot, next_token, next_start, next_count = _tile_of(tiles, next_task, KV_HEADS, TILE_WORDS)
        if task < num_tasks:
            kv_head = task % KV_HEADS
            table = page_table + slot.to(tl.int64) * table_stride
            head = kv_head * GROUP + in_group
            in_batch = ((token + in_tile).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + lane[None, :]
            exists = (in_tile < count)[:, None]
            attended = _attend(
                q + in_batch, exists, start + tl.minimum(in_tile, count - 1), start, start + count,
                kv + kv_head * (PAGE * HEAD_DIM), value_offset, table, scale_log2,
                KV_HEADS, ROWS, HEAD_DIM, PAGE, BLOCK, STAGES, WINDOW, MASK_ALL,
            )  # fmt: skip
            tl.store(out + in_batch, attended.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _tile_of(tiles, task, KV_HEADS: tl.constexpr, TILE_WORDS: tl.constexpr):
    word = tiles + task // KV_HEADS * TILE_WORDS
    return tl.load(word), tl.load(word + 1), tl.load(word + 2), tl.load(word + 3)


@triton.jit
def _attend(
    query_place, exists, position, start, end, kv, value_offset, table, scale_log2,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Attention of queries at `position`, [ROWS] of start .. end - 1, over the keys that they see: [ROWS, HEAD_DIM]
    float32. Blocks of keys lie at multiples of BLOCK. Where a block goes beyond the keys that some query sees, the
    nearest of those are read instead, and masked: what lies elsewhere may be NaN, which no share of 0 undoes."""
    key = tl.arange(0, BLOCK)
    lane = tl.arange(0, HEAD_DIM)
    seen_from = tl.maximum(start - WINDOW + 1, 0) if WINDOW > 0 else 0
    first = seen_from // BLOCK * BLOCK
    page = _pages(table, first, seen_from, end, WINDOW, PAGE, BLOCK)
    query = tl.load(query_place, mask=exists, other=0.0)
    total = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), -1.0e30, tl.float32)
    for block in tl.range(first, end, BLOCK, num_stages=STAGES):
        own = tl.minimum(block + key, end - 1)
        if WINDOW > 0:
            own = tl.maximum(own, seen_from)
        # Below 2**31: as many keys and values of one layer are 128 GiB at least.
        row = page * (KV_HEADS * PAGE) + (own & (PAGE - 1))
        place = kv + row.to(tl.int64)[:, None] * HEAD_DIM + lane[None, :]
        # The next block's, so that no load of keys waits for a load of pages.
        page = _pages(table, block + BLOCK, seen_from, end, WINDOW, PAGE, BLOCK)
        score = tl.dot(query, tl.trans(tl.load(place)), input_precision="ieee")
        # The first query does not see the last key, or the last query not the first one.
        partly = block + BLOCK > start + 1
        if WINDOW > 0:
            partly |= block < end - WINDOW
        if MASK_ALL or partly:
            visible = key[None, :] <= (position - block)[:, None]
            if WINDOW > 0:
                visible &= key[None, :] > (position - block - WINDOW)[:, None]
            score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1) * scale_log2)
        share = tl.exp2(score * scale_log2 - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        weight = weight * shrink + tl.sum(share, axis=1)
        value = tl.load(place + value_offset)
        total = tl.dot(share.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return total * (1.0 / weight)[:, None]


@triton.jit
def _pages(
    table, block, seen_from, end, WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The pages of a block's keys, [BLOCK]: of those with keys seen_from .. end - 1, the nearest."""
    page = tl.minimum(block // PAGE + tl.arange(0, BLOCK) // PAGE, (end - 1) // PAGE)
    if WINDOW > 0:
        page = tl.maximum(page, seen_from // PAGE)
    return tl.load(table + page)

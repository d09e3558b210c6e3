"""Attention of decode rows over paged keys and values: flash-decoding (Dao et al., 2023) with ranges cut on the device.

A program takes one range of one row's keys for one KV head, and all query heads that share it, so that keys and values
are read once. A row in one range is finished there and then. Otherwise each program leaves its normalised sum and the
base-2 logarithm of its weight, and the one that arrives last merges them: no second kernel, and no wait.

    row 3, KV head 0   | range 0 ... partial, arrived 1 |
                       | range 1 ......... partial, arrived 3 -> merge, out, arrived = 0 |
                       | range 2 ..... partial, arrived 2 |

`arrived` is zero again when the kernel ends, so every layer and step finds it so.

All keys and values of a row but the newest were written in earlier steps. So a program may load its first tile while
the kernel that writes the newest still runs, and takes that key as one more, beside the tile:

    store newest, q  |------------------|
    attention          |- list - page table - first tile -| wait | q, newest | products | out |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.attention_parts import LOG2_E, attend, held_until_here, merge_partials, nearest_own
from gpu_runner.kernels.work_list import ITEM_WORDS, MAX_SPLITS, WorkList

MULTIPROCESSORS = 132
SHARING_PROGRAMS = 5
"""Programs that a multiprocessor has room for at once, so that each one's first tile is early."""
DOT_ROWS = 16
"""The fewest rows of a tensor-core product: query heads of a group are padded to it."""


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """first_tokens: keys of the tile that is in shared memory before the kernel before has ended; 0 = none.
    block_tokens: keys of a tile of the loop over all behind it, a pipeline of `num_stages`."""

    first_tokens: int
    block_tokens: int
    num_warps: int
    num_stages: int


def decode_tiling(head_bytes: int, programs: int) -> DecodeTiling:
    """head_bytes: of a key's head. programs: rows x KV heads, padding included.

    With at most one program a multiprocessor, the time is that of one program, and its first tile may fill the shared
    memory: whole rows of 256 keys of 128 bf16 dimensions, so that what is left behind the wait is two products. With
    some rounds of programs the loop's tiles of 16 KiB, keys and values together, let several programs share a
    multiprocessor and hide each other's start.
    """
    wide = head_bytes > 128
    if programs <= MULTIPROCESSORS:
        first_tokens, block_tokens = min(256, 65536 // head_bytes), min(64, 16384 // head_bytes)
        return DecodeTiling(first_tokens, block_tokens, num_warps=8 if wide else 4, num_stages=3)
    block_tokens = 32 if wide else 64
    if programs <= SHARING_PROGRAMS * MULTIPROCESSORS:
        return DecodeTiling(first_tokens=2 * block_tokens, block_tokens=block_tokens, num_warps=2, num_stages=3)
    return DecodeTiling(first_tokens=0, block_tokens=block_tokens, num_warps=2, num_stages=3)


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    counts: Tensor,
    page_table: Tensor,
    scale: float,
    tiling: DecodeTiling | None = None,
    pdl: bool = True,
) -> None:
    """Attention of a step's decode rows, whose keys and values are in their pages already, into `out`.

    q, out: [T, num_heads, head_dim] contiguous, of kv_layer's dtype; row i of the batch is token i. kv_layer: [2,
    num_pages, num_kv_heads, page_size, head_dim]. work: built for this step and the layer's window. counts: as
    `build_work_list` takes it. page_table: [num_slots, pages_per_seq] int32. head_dim: a power of two.

    Writes the rows below counts[0] and zeros to the padding, tokens counts[2] .. T - 1; leaves the rest. Fixed inside a
    graph: all addresses and shapes. Launches decode_items(T) x num_kv_heads programs.

    pdl: list, page table and all keys and values but a row's newest are read before the wait. So the kernel launched
    just before may write the newest ones, but none of the others, and it must let this one start only behind its own
    wait, as the one that rotates and stores does. All programs let the next kernel start at once.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = kv_layer.shape
    tiling = tiling or decode_tiling(head_dim * q.itemsize, num_tokens * num_kv_heads)
    options: dict[str, Any] = {"launch_pdl": True} if pdl and q.is_cuda else {}
    group = num_heads // num_kv_heads
    _decode_kernel[(work.decode_items(num_tokens) * num_kv_heads,)](
        q,
        kv_layer,
        out,
        page_table,
        counts,
        work.items,
        work.lengths,
        work.partial_out,
        work.partial_lse,
        work.arrived,
        kv_layer.stride(0),
        page_table.stride(0),
        num_tokens,
        scale * LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=max(DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PAGE=page_size,
        FIRST=tiling.first_tokens,
        BLOCK=tiling.block_tokens,
        STAGES=tiling.num_stages,
        ITEM_WORDS=ITEM_WORDS,
        MAX_SPLITS=MAX_SPLITS,
        HOLD=q.is_cuda and q.itemsize == 2,
        PDL=bool(options),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **options,
    )


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _decode_kernel(
    q,
    kv,
    out,
    page_table,
    counts,
    items,
    lengths,
    partial_out,
    partial_lse,
    arrived,
    value_offset,
    table_stride,
    num_tokens,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    head_rows = tl.arange(0, GROUP_ROWS)
    lane = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, BLOCK)

    # Until the wait, all that is read is older than the kernel before: see the wrapper.
    # Items behind the last are those of an earlier step, so that no load waits for the number of them.
    live = index < tl.load(lengths)
    word = items + index * ITEM_WORDS
    row = tl.load(word)
    slot = tl.load(word + 1)
    first = tl.load(word + 2)
    end = tl.where(live, tl.load(word + 3), 0)
    first_partial = tl.load(word + 4)
    split = tl.load(word + 5)
    splits = tl.load(word + 6)
    seen_from = tl.load(word + 7)
    first_padding = tl.load(counts + 2)
    table = page_table + slot.to(tl.int64) * table_stride
    old_end = end
    if FIRST > 0:
        has_newest = live & (split == splits - 1)
        old_end = tl.where(has_newest, end - 1, end)
        newest_page = tl.load(table + (end - 1) // PAGE, mask=has_newest, other=0)
        newest_line = (newest_page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + ((end - 1) & (PAGE - 1))
        newest = kv + newest_line * HEAD_DIM + lane
        early = first + tl.arange(0, FIRST)
        early_seen = (early >= seen_from) & (early < old_end)
        early_page = tl.load(table + early // PAGE, mask=early_seen, other=0)
        early_line = (early_page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + (early & (PAGE - 1))
        early_place = kv + early_line[:, None] * HEAD_DIM + lane[None, :]
        early_key = tl.load(early_place, mask=early_seen[:, None], other=0.0)
        early_value = tl.load(early_place + value_offset, mask=early_seen[:, None], other=0.0)
        if HOLD:
            early_key = held_until_here(early_key)
    page = tl.load(table + nearest_own(first + FIRST + key, seen_from, end) // PAGE, mask=live, other=0)
    if (not live) & (index > 0) & (first_padding + index >= num_tokens):
        return  # and make room
    if PDL:
        # The first programs wait even without work: this kernel must not end before the one before it.
        tl.extra.cuda.gdc_wait()

    heads = KV_HEADS * GROUP
    head = kv_head * GROUP + head_rows
    member = (head_rows < GROUP)[:, None]
    for token in range(first_padding + index, num_tokens, tl.num_programs(0) // KV_HEADS):
        padding = out + ((head_rows.to(tl.int64) * 0 + token) * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(padding, tl.zeros((GROUP_ROWS, HEAD_DIM), out.dtype.element_ty), mask=member)

    if live:
        in_row = (row * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        largest = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
        weight = tl.zeros((GROUP_ROWS,), tl.float32)
        total = tl.zeros((GROUP_ROWS, HEAD_DIM), tl.float32)
        if FIRST > 0:
            # Before the query: the compiler waits for that at once. Around the first-level cache, which may hold the
            # newest key's line as it was.
            wanted = (lane < HEAD_DIM) & has_newest
            newest_key = tl.load(newest, mask=wanted, other=0.0, cache_modifier=".cg")
            newest_value = tl.load(newest + value_offset, mask=wanted, other=0.0, cache_modifier=".cg")
        query = tl.load(q + in_row, mask=member, other=0.0)
        if FIRST > 0:
            # The newest key starts the sum.
            score = tl.sum(query.to(tl.float32) * newest_key.to(tl.float32)[None, :], axis=1) * scale_log2
            largest = tl.where(has_newest, score, largest)
            weight += tl.where(has_newest, 1.0, 0.0)
            total += newest_value.to(tl.float32)[None, :]
            total, weight, largest = attend(
                total, weight, largest, query, early_key, early_value, early_seen, scale_log2
            )
        for tile in tl.range(first + FIRST, old_end, BLOCK, num_stages=STAGES):
            position = tile + key
            seen = (position >= seen_from) & (position < old_end)
            position = nearest_own(position, seen_from, end)
            line = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + (position & (PAGE - 1))
            place = kv + line[:, None] * HEAD_DIM + lane[None, :]
            # The next tile's, so that no load of keys waits for a load of pages.
            page = tl.load(table + nearest_own(tile + BLOCK + key, seen_from, end) // PAGE)
            total, weight, largest = attend(
                total, weight, largest, query, tl.load(place), tl.load(place + value_offset), seen, scale_log2
            )  # fmt: skip
        total = total / weight[:, None]
        if splits == 1:
            tl.store(out + in_row, total.to(out.dtype.element_ty), mask=member)
        else:
            partial = (first_partial + split) * heads + head
            tl.store(partial_out + partial[:, None] * HEAD_DIM + lane[None, :], total, mask=member)
            tl.store(partial_lse + partial, largest + tl.log2(weight), mask=head_rows < GROUP)
            # All threads' stores happen before the count that tells others of them.
            tl.debug_barrier()
            counter = arrived + first_partial * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                merge_partials(
                    out, partial_out, partial_lse, row, first_partial, splits, kv_head,
                    KV_HEADS, GROUP, HEAD_DIM, MAX_SPLITS,
                )  # fmt: skip

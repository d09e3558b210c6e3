"""Attention of decode rows over paged keys and values: flash-decoding (Dao et al., 2023) with ranges cut on the device.

A program takes one range of one row's keys for one KV head, and all query heads that share it, so that keys and values
are read once. A row in one range is finished there and then. Otherwise each program leaves its normalised sum and the
base-2 logarithm of its weight, and the one that arrives last merges them: no second kernel, and no wait.

    row 3, KV head 0   | range 0 ... partial, arrived 1 |
                       | range 1 ......... partial, arrived 3 -> merge, out, arrived = 0 |
                       | range 2 ..... partial, arrived 2 |

`arrived` is zero again when the kernel ends, so every layer and step finds it so.

Where every row decodes, the kernel can rotate as well, as `attention_fused` does, and needs none before it that does.
Then no program reads the newest key from memory: the one with the row's last range begins its softmax with it, and
writes it to its page. Earlier steps have written the others, so the first tiles are on their way before the wait:

    qkv linear  |------------------|
    attention      |- list - pages - first tiles asked for -| wait | qkv, norm, rotation | tile | tile | ... | out |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.attention_heads import begin_with_newest
from gpu_runner.kernels.attention_parts import LOG2_E, merge_partials, nearest_own, prefetch_pages, zero_padding
from gpu_runner.kernels.launch import launch_options, on_gpu
from gpu_runner.kernels.work_list import ITEM_WORDS, MAX_SPLITS, MULTIPROCESSORS, WorkList

DOT_ROWS = 16
"""The fewest rows of a tensor-core product: query heads of a group are padded to it."""
MAX_LEVEL_PROGRAMS = 12 * MULTIPROCESSORS
"""Up to here it pays that multiprocessors have equally many at a time; beyond, that they have more."""
MAX_STREAMED_GROUP = DOT_ROWS
"""Query heads of a KV head that `streamed_decode_attention` takes."""


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """block_tokens: keys of one tile. prefetch_pages: pages of a range, at most 32 * num_warps, that are asked into L2
    while the kernel before still runs."""

    block_tokens: int
    num_warps: int
    num_stages: int
    prefetch_pages: int


def decode_tiling(programs: int, head_dim: int, element_bytes: int = 2) -> DecodeTiling:
    """Tiles of 16 KiB for keys and values together: several programs fit on a multiprocessor and hide each other's
    start, and one warp of each keeps up with memory. While programs are few, a multiprocessor's shared memory is to
    hold four at most: they go wherever there is room, and where six fit, some get none. Float32 products run outside
    the tensor cores; only small tiles fit the registers."""
    if element_bytes == 4:
        return DecodeTiling(block_tokens=16, num_warps=4, num_stages=2, prefetch_pages=4)
    if head_dim <= 64:
        return DecodeTiling(block_tokens=64, num_warps=2, num_stages=3, prefetch_pages=4)
    num_stages = 4 if programs <= MAX_LEVEL_PROGRAMS else 3
    return DecodeTiling(block_tokens=32, num_warps=1 if head_dim <= 128 else 2, num_stages=num_stages, prefetch_pages=2)


def streamed_tiling(programs: int, head_dim: int, element_bytes: int = 2) -> DecodeTiling:
    """Of what streams: it loads its first tiles as early as they could be asked into L2. What it makes of the qkv
    product needs registers too, which with heads of 256 are those of more warps."""
    tiling = replace(decode_tiling(programs, head_dim, element_bytes), prefetch_pages=0)
    return tiling if head_dim <= 128 else replace(tiling, num_warps=4)


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
) -> None:
    """Attention of a step's decode rows, whose keys and values are in their pages already, into `out`.

    q, out: [T, num_heads, head_dim] contiguous, of kv_layer's dtype; row i of the batch is token i. kv_layer: [2,
    num_pages, num_kv_heads, page_size, head_dim]. work: built for this step and the layer's window. counts: as
    `build_work_list` takes it. page_table: [num_slots, pages_per_seq] int32. head_dim: a power of two.

    Writes the rows below counts[0] and zeros to the padding, tokens counts[2] .. T - 1; leaves the rest. Fixed inside a
    graph: all addresses and shapes. Launches decode_items(T) x num_kv_heads programs.

    List, counts and page table are read before the wait (PDL). So the kernels that wrote them must have ended when the
    kernel launched just before this one starts, as all have that run before a kernel which lets the next one start
    behind its own wait only.
    """
    _launch(q, kv_layer, out, work, counts=counts, page_table=page_table, scale=scale, tiling=tiling)


def streamed_decode_attention(
    qkv: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    positions: Tensor,
    kv_index: Tensor,
    counts: Tensor,
    page_table: Tensor,
    rotation: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    tiling: DecodeTiling | None = None,
) -> None:
    """What `fused_decode_attention` does, and with its arguments, for steps that read more: keys and values stream
    through shared memory as those of `decode_attention` do. ValueError unless `can_stream`."""
    num_heads, num_kv_heads = out.shape[1], kv_layer.shape[2]
    if not can_stream(kv_layer, num_heads):
        raise ValueError(
            f"{num_heads} query heads share {num_kv_heads} KV heads in {kv_layer.dtype}; at most {MAX_STREAMED_GROUP} "
            "may share one, of two bytes on a GPU"
        )
    if tiling is None:
        tiling = streamed_tiling(len(out) * num_kv_heads, out.shape[2], out.element_size())
    _launch(
        *(qkv, kv_layer, out, work),
        counts=counts,
        page_table=page_table,
        scale=scale,
        tiling=tiling,
        positions=positions,
        kv_index=kv_index,
        rotation=rotation,
        num_positions=len(rotation),
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )


def can_stream(kv: Tensor, num_heads: int) -> bool:
    """Whether `streamed_decode_attention` takes keys and values [..., num_kv_heads, page_size, head_dim]."""
    return num_heads <= MAX_STREAMED_GROUP * kv.shape[-3] and (kv.element_size() == 2 or not on_gpu(kv))


def _launch(
    source: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    counts: Tensor,
    page_table: Tensor,
    scale: float,
    tiling: DecodeTiling | None,
    **of_qkv: Any,
) -> None:
    """source: queries, or, if the kernel is told `of_qkv` what it needs for that, the qkv product."""
    num_tokens, num_heads, head_dim = out.shape
    _, _, num_kv_heads, page_size, _ = kv_layer.shape
    tiling = tiling or decode_tiling(num_tokens * num_kv_heads, head_dim, out.element_size())
    group = num_heads // num_kv_heads
    _decode_kernel[(work.decode_items(num_tokens) * num_kv_heads,)](
        source,
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
        BLOCK=tiling.block_tokens,
        STAGES=tiling.num_stages,
        ITEM_WORDS=ITEM_WORDS,
        MAX_SPLITS=MAX_SPLITS,
        PREFETCH_PAGES=tiling.prefetch_pages if on_gpu(out) else 0,
        PREFETCH_LANES=32 * tiling.num_warps,
        num_stages=tiling.num_stages,
        **of_qkv,
        **launch_options(out, tiling.num_warps),
    )


@triton.jit(do_not_specialize=["num_positions"])
def _decode_kernel(
    source,  # queries, or the qkv product if `positions` and what follows it are given
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
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PREFETCH_PAGES: tl.constexpr,
    PREFETCH_LANES: tl.constexpr,
    PDL: tl.constexpr,
    positions=None,
    kv_index=None,
    rotation=None,
    num_positions=None,
    q_norm=None,
    k_norm=None,
    eps=None,
):
    OF_QKV: tl.constexpr = positions is not None
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    head_rows = tl.arange(0, GROUP_ROWS)
    lane = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, BLOCK)

    # All of these are older than the kernel that this one waits for, which found them written.
    live = index < tl.load(lengths)
    word = items + index * ITEM_WORDS
    row = tl.load(word, mask=live, other=0)
    slot = tl.load(word + 1, mask=live, other=0)
    first = tl.load(word + 2, mask=live, other=0)
    end = tl.load(word + 3, mask=live, other=0)
    first_partial = tl.load(word + 4, mask=live, other=0)
    split = tl.load(word + 5, mask=live, other=0)
    splits = tl.load(word + 6, mask=live, other=0)
    seen_from = tl.load(word + 7, mask=live, other=0)
    table = page_table + slot.to(tl.int64) * table_stride
    stop, streams = end, live
    if OF_QKV:
        own_position = tl.load(positions + row, mask=live, other=0)
        index_in_kv = tl.load(kv_index + row, mask=live, other=0).to(tl.int64)
        cell = kv + (((index_in_kv // PAGE) * KV_HEADS + kv_head) * PAGE + index_in_kv % PAGE) * HEAD_DIM
        # The newest key is not in its page yet.
        end = tl.minimum(end, own_position)
        stop = tl.where(seen_from < end, end, first)
        streams = first < stop
    if PREFETCH_PAGES > 0:
        prefetch_pages(
            table, first, end, kv, value_offset, kv_head, KV_HEADS, HEAD_DIM, PAGE, PREFETCH_PAGES, PREFETCH_LANES
        )
    page = tl.load(table + nearest_own(first + key, seen_from, end) // PAGE, mask=streams, other=0)
    first_padding = tl.load(counts + 2) + index
    if PDL and not OF_QKV:
        # Without work a program may end before the kernel before does, but not all of them.
        if live | (first_padding < num_tokens) | (tl.program_id(0) == 0):
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    heads = KV_HEADS * GROUP
    head = kv_head * GROUP + head_rows
    member = (head_rows < GROUP)[:, None]
    if not OF_QKV:
        zero_padding(out, first_padding, num_tokens, kv_head, KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM)

    if live:
        in_row = (row * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        if OF_QKV:
            token_qkv = source + row.to(tl.int64) * ((heads + 2 * KV_HEADS) * HEAD_DIM)
            begun_with = (
                token_qkv, cell, value_offset, kv_head, split == splits - 1,
                rotation, own_position, num_positions, q_norm, k_norm, eps, scale_log2,
            )  # fmt: skip
            query = tl.zeros((GROUP_ROWS, HEAD_DIM), out.dtype.element_ty)
        else:
            query = tl.load(source + in_row, mask=member, other=0.0)
        largest = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
        weight = tl.zeros((GROUP_ROWS,), tl.float32)
        total = tl.zeros((GROUP_ROWS, HEAD_DIM), tl.float32)
        if OF_QKV and first >= stop:  # The newest key is alone.
            query, largest, weight, total = begin_with_newest(*begun_with, KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, PDL)
        for tile in tl.range(first, stop, BLOCK, num_stages=STAGES):
            if OF_QKV and tile == first:  # Behind the loads of the first tiles, with which the loop runs ahead.
                query, largest, weight, total = begin_with_newest(
                    *begun_with, KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, PDL
                )
            position = nearest_own(tile + key, seen_from, end)
            line = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + (position & (PAGE - 1))
            place = kv + line[:, None] * HEAD_DIM + lane[None, :]
            # The next tile's, so that no load of keys waits for a load of pages.
            page = tl.load(table + nearest_own(tile + BLOCK + key, seen_from, end) // PAGE)
            score = tl.dot(query, tl.trans(tl.load(place)), input_precision="ieee") * scale_log2
            score = tl.where((tile + key == position)[None, :], score, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(score, axis=1))
            share = tl.exp2(score - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            weight = weight * shrink + tl.sum(share, axis=1)
            value = tl.load(place + value_offset)
            total = tl.dot(share.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
            largest = new_largest
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
                    out,
                    partial_out,
                    partial_lse,
                    row,
                    first_partial,
                    splits,
                    kv_head,
                    KV_HEADS,
                    GROUP,
                    HEAD_DIM,
                    MAX_SPLITS,
                    1,
                )
    if OF_QKV:
        if PDL and ~live & ((first_padding < num_tokens) | (tl.program_id(0) == 0)):
            tl.extra.cuda.gdc_wait()
        zero_padding(out, first_padding, num_tokens, kv_head, KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM)

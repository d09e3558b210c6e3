"""Attention of a pure decode step with all that stands before it: query and key norm, rotation, the KV write.

One kernel a layer instead of two, and the newest key and value never come from memory: the program with the row's last
range computes them and writes them to their page. All others were written by earlier steps, so a program loads its
first tile while the kernel before, whose `qkv` it waits for, still runs:

    qkv linear  |------------------|
    attention      |- list - page table - keys, values -| wait | qkv, norm, rotation | products | out |

Ranges and their merge are those of `attention_decode`. Within a program each warp has keys of its own, and a softmax of
its own until the end. Keys and values go from memory to the registers that the tensor cores take them from: a sum over
dimensions, or keys, may be taken in any order, so each lane has runs of 16 bytes. Of a product's 16 rows 8 are used:
the group's query heads, as often as they fit. Each copy then brings its own part of the dimensions to the warps' merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.attention_fused_parts import (
    attend_tile,
    both_weights,
    load_keys,
    load_values,
    pages_of,
    query_operand,
)
from gpu_runner.kernels.attention_heads import gains_of, normed_and_rotated, turn_of
from gpu_runner.kernels.attention_parts import LOG2_E, merge_partials
from gpu_runner.kernels.launch import launch_options, on_gpu
from gpu_runner.kernels.work_list import ITEM_WORDS, MAX_SPLITS, WorkList

MAX_GROUP = 8
"""Query heads of a KV head: the used rows of a tensor-core product."""
MIN_HEAD_DIM = 32
"""Two halves of the 16 dimensions that a tensor-core product sums over."""


@dataclass(frozen=True, slots=True)
class FusedTiling:
    """warp_keys: of one warp's tile, a power of two and whole pages; a program's tile has `num_warps` times as many.

    A range's later tiles are loaded when their turn comes.
    """

    warp_keys: int
    num_warps: int


def fused_tiling(num_warps: int, head_bytes: int) -> FusedTiling:
    """Of as many keys to a warp as registers hold, with their values. head_bytes: of a key."""
    return FusedTiling(warp_keys=32 if head_bytes <= 256 else 16, num_warps=num_warps)


def fused_decode_attention(
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
    tiling: FusedTiling,
) -> None:
    """Attention of a step that has decode rows only, into `out`; their keys and values into their pages.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, then k, then v; row i of the batch is token i. out:
    [T, num_heads, head_dim]. kv_layer: [2, num_pages, num_kv_heads, page_size, head_dim]. All contiguous and of one
    dtype, on a GPU one of two bytes. positions, kv_index: [T] int32, as `qk_norm_rope_write` takes them. work, counts,
    page_table: as `decode_attention` takes them. rotation: [positions, head_dim] float32, cosines and then sines of
    each position; rows behind the last are rotated as it is. q_norm, k_norm: [head_dim], both or neither. head_dim: a
    power of two. ValueError unless `can_fuse`.

    Writes the rows below counts[0] and zeros to the padding, tokens counts[2] .. T - 1. Fixed inside a graph: all
    addresses and shapes. Launches decode_items(T) x num_kv_heads programs.

    List, counts, positions, page table and the keys before the newest are read before the wait (PDL). So the kernels
    that wrote them must have ended when the kernel launched just before this one starts, as all have that run before
    a kernel which lets the next one start behind its own wait only.
    """
    num_tokens, num_heads, head_dim = out.shape
    _, _, num_kv_heads, page_size, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    if not can_fuse(kv_layer, num_heads):
        raise ValueError(
            f"{num_heads} query heads share {num_kv_heads} KV heads of {head_dim} dimensions in {kv_layer.dtype}; "
            f"at most {MAX_GROUP} may share one, of at least {MIN_HEAD_DIM} dimensions, of two bytes on a GPU"
        )
    run = min(8, head_dim // 8)
    _fused_kernel[(work.decode_items(num_tokens) * num_kv_heads,)](
        qkv,
        kv_layer,
        out,
        positions,
        kv_index,
        rotation,
        q_norm,
        k_norm,
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
        len(rotation),
        eps,
        scale * LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        # Each copy of the group takes at least one of a lane's dimensions.
        GROUP_ROWS=max(triton.next_power_of_2(group), 64 // head_dim),
        HEAD_DIM=head_dim,
        PAGE=page_size,
        HAS_NORM=q_norm is not None,
        WARPS=tiling.num_warps,
        WARP_KEYS=tiling.warp_keys,
        CHUNK=min(32, head_dim // 2),
        RUN=run,
        ITEM_WORDS=ITEM_WORDS,
        MAX_SPLITS=MAX_SPLITS,
        num_stages=1,
        **launch_options(qkv, tiling.num_warps),
    )


def can_fuse(kv: Tensor, num_heads: int) -> bool:
    """Whether `fused_decode_attention` takes keys and values [..., num_kv_heads, page_size, head_dim].

    Behind products of float32, which are not the tensor cores', the scores of a row may lie on lanes that are not next
    to each other. Triton 3.6 then reduces over other lanes.
    """
    num_kv_heads, _, head_dim = kv.shape[-3:]
    fits = num_heads <= MAX_GROUP * num_kv_heads and head_dim >= MIN_HEAD_DIM
    return fits and (kv.element_size() == 2 or not on_gpu(kv))


@triton.jit(do_not_specialize=["num_tokens", "num_positions"])
def _fused_kernel(
    qkv,
    kv,
    out,
    positions,
    kv_index,
    rotation,
    q_norm,
    k_norm,
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
    num_positions,
    eps,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    WARPS: tl.constexpr,
    WARP_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = KV_HEADS * GROUP
    COPIES: tl.constexpr = 8 // GROUP_ROWS
    BLOCK: tl.constexpr = WARPS * WARP_KEYS
    dtype: tl.constexpr = out.dtype.element_ty
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    if PDL:
        # What comes next may wait on the multiprocessors for this kernel's end, its weights at hand.
        tl.extra.cuda.gdc_launch_dependents()
    num_items = tl.load(lengths)
    token = tl.load(counts + 2) + index

    if index < num_items:
        word = items + index * ITEM_WORDS
        row = tl.load(word)
        slot = tl.load(word + 1)
        first = tl.load(word + 2)
        end = tl.load(word + 3)
        first_partial = tl.load(word + 4)
        split = tl.load(word + 5)
        splits = tl.load(word + 6)
        seen_from = tl.load(word + 7)
        position = tl.load(positions + row)
        cell = tl.load(kv_index + row).to(tl.int64)
        table = page_table + slot.to(tl.int64) * table_stride
        # The newest key is not in its page yet.
        old_end = tl.minimum(end, position)
        stop = tl.where(seen_from < old_end, old_end, first)

        keys = kv + kv_head * (PAGE * HEAD_DIM)
        values = keys + value_offset
        page = pages_of(table, first, seen_from, old_end, PAGE, WARPS, WARP_KEYS)
        key = load_keys(keys, first, page, seen_from, old_end, KV_HEADS, HEAD_DIM, PAGE, WARP_KEYS, CHUNK)
        value = load_values(values, first, page, seen_from, old_end, KV_HEADS, HEAD_DIM, PAGE, WARP_KEYS, RUN)
        page = pages_of(table, first + BLOCK, seen_from, old_end, PAGE, WARPS, WARP_KEYS)

        in_group = tl.arange(0, 8) % GROUP_ROWS
        dim = tl.arange(0, HEAD_DIM)[None, :] + tl.zeros((8, 1), tl.int32)
        far = (dim + HALF) % HEAD_DIM
        cos, sin = turn_of(rotation, position, num_positions, dim, HEAD_DIM)
        q_weight, far_q_weight = gains_of(q_norm, dim, far)
        k_weight, far_k_weight = gains_of(k_norm, dim, far)
        # The merged sums: copy of the group, query head, what lanes hold of a copy's part, lane.
        PARTS: tl.constexpr = HEAD_DIM // (8 * COPIES)
        copy = tl.arange(0, COPIES)[:, None, None, None]
        part = copy * PARTS + tl.arange(0, PARTS)[None, None, :, None]
        lane = tl.arange(0, 8)[None, None, None, :]
        merged_head = tl.arange(0, GROUP_ROWS)[None, :, None, None]
        merged_dim = part // RUN * (8 * RUN) + lane * RUN + part % RUN
        if PDL:
            tl.extra.cuda.gdc_wait()

        token_qkv = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
        head = token_qkv + (kv_head * GROUP + tl.minimum(in_group, GROUP - 1))[:, None] * HEAD_DIM
        q, far_q = tl.load(head + dim), tl.load(head + far)
        head = token_qkv + (HEADS + kv_head) * HEAD_DIM
        k, far_k = tl.load(head + dim), tl.load(head + far)
        head += KV_HEADS * HEAD_DIM
        v = tl.load(head + dim)
        new_value = tl.load(head + merged_dim).to(tl.float32)
        q = normed_and_rotated(q, far_q, q_weight, far_q_weight, cos, sin, eps, HEAD_DIM, HAS_NORM, dtype)
        k = normed_and_rotated(k, far_k, k_weight, far_k_weight, cos, sin, eps, HEAD_DIM, HAS_NORM, dtype)
        query = query_operand(q, CHUNK)
        newest = float("-inf")
        if split == splits - 1:
            line = (cell // PAGE) * (KV_HEADS * PAGE * HEAD_DIM) + (cell % PAGE) * HEAD_DIM
            once = (tl.arange(0, 8) == 0)[:, None]
            tl.store(keys + line + dim, k, mask=once)
            tl.store(values + line + dim, v, mask=once)
            newest = 0.0
        newest += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2  # -inf: another range has it

        largest = tl.full((WARPS, 8, 1), -1.0e30, tl.float32)
        weight = tl.zeros((WARPS, 8, 1), tl.float32)
        total = tl.zeros((WARPS, 8, HEAD_DIM), tl.float32)
        if first < stop:
            largest, weight, total = attend_tile(
                query, key, value, first, seen_from, old_end, scale_log2, largest, weight, total
            )
        for tile in range(first + BLOCK, stop, BLOCK):
            key = load_keys(keys, tile, page, seen_from, old_end, KV_HEADS, HEAD_DIM, PAGE, WARP_KEYS, CHUNK)
            value = load_values(values, tile, page, seen_from, old_end, KV_HEADS, HEAD_DIM, PAGE, WARP_KEYS, RUN)
            # The next tile's, so that no load of keys waits for a load of pages.
            page = pages_of(table, tile + BLOCK, seen_from, old_end, PAGE, WARPS, WARP_KEYS)
            largest, weight, total = attend_tile(
                query, key, value, tile, seen_from, old_end, scale_log2, largest, weight, total
            )

        newest = tl.reshape(newest, (1, 8, 1))
        top, weight = tl.reduce((largest, weight), 0, both_weights, keep_dims=True)
        old_top = top
        top = tl.maximum(old_top, newest)
        new_share = tl.exp2(newest - top)
        weight = weight * tl.exp2(old_top - top) + new_share
        shrink = tl.exp2(largest - top)
        total = tl.reshape(total, (WARPS, COPIES, GROUP_ROWS, COPIES, PARTS, 8))
        own = copy[:, :, None, :, :] == tl.arange(0, COPIES)[None, None, :, None, None]
        total = tl.sum(tl.where(own, total, 0.0), axis=3)
        total = tl.sum(total * tl.reshape(shrink, (WARPS, COPIES, GROUP_ROWS, 1, 1)), axis=0)
        total += tl.reshape(new_share, (COPIES, GROUP_ROWS, 1, 1)) * new_value
        total /= tl.reshape(weight, (COPIES, GROUP_ROWS, 1, 1))

        in_heads = merged_head * HEAD_DIM + merged_dim
        listed = merged_head < GROUP
        if splits == 1:
            target = out + (row.to(tl.int64) * HEADS + kv_head * GROUP) * HEAD_DIM + in_heads
            tl.store(target, total.to(dtype), mask=listed)
        else:
            partial = (first_partial + split) * HEADS + kv_head * GROUP
            tl.store(partial_out + partial.to(tl.int64) * HEAD_DIM + in_heads, total, mask=listed)
            group_row = tl.arange(0, 8)
            lse = tl.reshape(top + tl.log2(weight), (8,))
            tl.store(partial_lse + partial + group_row, lse, mask=group_row < GROUP)
        if splits > 1:
            # All threads' stores happen before the count that tells others of them.
            tl.debug_barrier()
            counter = arrived + first_partial * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                merge_partials(
                    out, partial_out, partial_lse, row, first_partial, splits, kv_head,
                    KV_HEADS, GROUP, HEAD_DIM, MAX_SPLITS, max(1, min(GROUP_ROWS, WARPS // 2)),
                )  # fmt: skip
    elif (token < num_tokens) | (tl.program_id(0) == 0):  # noqa: SIM102 - one is known to the compiler
        # Without work a program may end before the kernel before does, but not all of them.
        if PDL:
            tl.extra.cuda.gdc_wait()

    for padding in range(token, num_tokens, tl.num_programs(0) // KV_HEADS):
        for member in tl.static_range(GROUP):
            target = out + (padding * HEADS + kv_head * GROUP + member) * HEAD_DIM + tl.arange(0, HEAD_DIM)
            tl.store(target, tl.zeros((HEAD_DIM,), dtype))

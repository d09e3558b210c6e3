"""What the attention kernels share: which keys a row may read, merging of partial results, asking pages into L2."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Scores are kept in base 2, which the hardware's exponential takes."""


@triton.jit
def nearest_own(position, seen_from, end):
    """The nearest position that the row sees: nothing else is read, and scores of moved positions are masked."""
    return tl.minimum(tl.maximum(position, seen_from), end - 1)


@triton.jit
def zero_padding(
    out, first, num_tokens, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Zeros to a group's heads of the padding, tokens first .. num_tokens - 1, of which other programs take theirs."""
    heads = KV_HEADS * GROUP
    head_rows = tl.arange(0, GROUP_ROWS)
    head = kv_head * GROUP + head_rows
    member = (head_rows < GROUP)[:, None]
    lane = tl.arange(0, HEAD_DIM)
    for token in range(first, num_tokens, tl.num_programs(0) // KV_HEADS):
        padding = out + ((head_rows.to(tl.int64) * 0 + token) * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(padding, tl.zeros((GROUP_ROWS, HEAD_DIM), out.dtype.element_ty), mask=member)


@triton.jit
def merge_partials(
    out, partial_out, partial_lse, row, first_partial, splits, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Weigh a row's partial results of one group, AT_ONCE heads (a power of two) at a time. They are read around the
    first-level cache, which others' stores do not reach."""
    lane = tl.arange(0, HEAD_DIM)
    place = tl.arange(0, MAX_SPLITS)[None, :]
    heads = KV_HEADS * GROUP
    for first in tl.static_range(0, GROUP, AT_ONCE):
        member = first + tl.arange(0, AT_ONCE)
        head = kv_head * GROUP + member
        partial = (first_partial + place) * heads + head[:, None]
        # Heads behind the group's last are weighed like those of the next group, and not stored.
        listed = (place < splits) & (head < heads)[:, None]
        lse = tl.load(partial_lse + partial, mask=listed, other=-1.0e30, cache_modifier=".cg")
        share = tl.where(listed, tl.exp2(lse - tl.max(lse, axis=1)[:, None]), 0.0)
        part = tl.load(
            partial_out + partial[:, :, None] * HEAD_DIM + lane[None, None, :],
            mask=listed[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        merged = tl.sum(part * share[:, :, None], axis=1) / tl.maximum(tl.sum(share, axis=1), 1.0e-30)[:, None]
        place_out = out + (row.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(place_out, merged.to(out.dtype.element_ty), mask=(member < GROUP)[:, None])


@triton.jit
def prefetch_pages(
    table, first, end, kv, value_offset, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Ask the range's first pages into L2, one page of one head a thread: 2 x 4 KiB at 128 dimensions. A hint only, so
    that the kernel before may still be writing there."""
    place = tl.arange(0, LANES)
    position = first // PAGE * PAGE + place * PAGE
    wanted = (place < PAGES) & (position < end)
    page = tl.load(table + position // PAGE, mask=wanted, other=0)
    keys = kv + (page.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * HEAD_DIM)
    size = tl.full((LANES,), PAGE * HEAD_DIM * (kv.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $3, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $4;
        @wanted cp.async.bulk.prefetch.L2.global [$2], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,l,r,r",
        [keys.to(tl.int64), (keys + value_offset).to(tl.int64), wanted.to(tl.int32), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

"""What the attention kernels share: which keys a row may read, a step of the online softmax,
merging of partial results."""

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
def attend(total, weight, largest, query, keys, values, seen, scale_log2):
    """One tile of the online softmax. query: [rows, D]; keys, values: [tile, D]; seen: [tile]."""
    score = tl.dot(query, tl.trans(keys)) * scale_log2
    score = tl.where(seen[None, :], score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, axis=1))
    share = tl.exp2(score - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    weight = weight * shrink + tl.sum(share, axis=1)
    total = tl.dot(share.to(values.dtype), values, total * shrink[:, None])
    return total, weight, new_largest


@triton.jit
def held_until_here(tile):
    """The tile as it is; but the compiler, which lays a loaded operand of a product out at once and so waits for it,
    does so behind the loads that stand before this. 16-bit types only."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)


@triton.jit
def merge_partials(
    out, partial_out, partial_lse, row, first_partial, splits, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh a row's partial results of one group. They are read around the first-level cache, which others' stores do
    not reach."""
    lane = tl.arange(0, HEAD_DIM)
    place = tl.arange(0, MAX_SPLITS)
    listed = place < splits
    heads = KV_HEADS * GROUP
    for member in tl.static_range(GROUP):
        head = kv_head * GROUP + member
        partial = (first_partial + place) * heads + head
        lse = tl.load(partial_lse + partial, mask=listed, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_out + partial[:, None] * HEAD_DIM + lane[None, :],
            mask=listed[:, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        share = tl.exp2(lse - tl.max(lse, axis=0))
        merged = tl.sum(part * share[:, None], axis=0) / tl.sum(share, axis=0)
        tl.store(out + (row * heads + head) * HEAD_DIM + lane, merged.to(out.dtype.element_ty))

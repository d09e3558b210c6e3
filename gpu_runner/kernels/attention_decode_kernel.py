"""The kernel of `attention_decode`, which see."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.attention_parts import merge_partials, nearest_own, prefetch_pages
from gpu_runner.kernels.norm_rope import normed_and_rotated_halves


@triton.jit(do_not_specialize=["num_tokens", "num_positions"])
def decode_kernel(
    source,
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
    ROTATED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PREFETCH_PAGES: tl.constexpr,
    PREFETCH_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    head_rows = tl.arange(0, GROUP_ROWS)
    lane = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, BLOCK)

    # The list and the page table are older than the kernel that this one waits for, which waited for them.
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
    if ROTATE:
        newest_at = tl.load(positions + row, mask=live, other=0)
        cell = tl.load(kv_index + row, mask=live, other=0).to(tl.int64)
        # The newest key is not in its page yet.
        old_end = tl.minimum(end, newest_at)
        end = tl.where(seen_from < old_end, old_end, first)
    if PREFETCH_PAGES > 0:
        prefetch_pages(
            table, first, end, kv, value_offset, kv_head, KV_HEADS, HEAD_DIM, PAGE, PREFETCH_PAGES, PREFETCH_LANES
        )
    page = tl.load(table + nearest_own(first + key, seen_from, end) // PAGE, mask=first < end, other=0)
    first_padding = tl.load(counts + 2) + index
    if ROTATE:
        in_half = tl.arange(0, HEAD_DIM // 2)[None, :] + tl.zeros((ROTATED_ROWS, 1), tl.int32)
        turn = rotation + tl.minimum(newest_at, num_positions - 1).to(tl.int64) * HEAD_DIM + in_half
        cos, sin = tl.load(turn), tl.load(turn + HEAD_DIM // 2)
    if PDL:
        # Without work a program may end before the kernel before does, but not all of them.
        if live | (first_padding < num_tokens) | (tl.program_id(0) == 0):
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    heads = KV_HEADS * GROUP
    head = kv_head * GROUP + head_rows
    member = (head_rows < GROUP)[:, None]
    for token in range(first_padding, num_tokens, tl.num_programs(0) // KV_HEADS):
        padding = out + ((head_rows.to(tl.int64) * 0 + token) * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(padding, tl.zeros((GROUP_ROWS, HEAD_DIM), out.dtype.element_ty), mask=member)

    if live:
        in_row = (row * heads + head)[:, None] * HEAD_DIM + lane[None, :]
        if ROTATE:
            query, largest, weight, total = _rotate_and_write(
                source + row.to(tl.int64) * ((heads + 2 * KV_HEADS) * HEAD_DIM),
                kv,
                cell,
                value_offset,
                q_norm,
                k_norm,
                in_half,
                cos,
                sin,
                eps,
                scale_log2,
                kv_head,
                split == splits - 1,
                KV_HEADS,
                GROUP,
                GROUP_ROWS,
                HEAD_DIM,
                PAGE,
                HAS_NORM,
            )
        else:
            query = tl.load(source + in_row, mask=member, other=0.0)
            largest = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
            weight = tl.zeros((GROUP_ROWS,), tl.float32)
            total = tl.zeros((GROUP_ROWS, HEAD_DIM), tl.float32)
        for tile in tl.range(first, end, BLOCK, num_stages=STAGES):
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


@triton.jit
def _rotate_and_write(
    token, kv, cell, value_offset, q_norm, k_norm, in_half, cos, sin, eps, scale_log2, kv_head, newest,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The group's queries, [GROUP_ROWS, HEAD_DIM], from a token's row of `qkv`; and the softmax to begin with.

    newest: whether it is the newest key alone, which then goes to its page, or of no key.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    ROWS: tl.constexpr = in_half.shape[0]
    COPIES: tl.constexpr = GROUP_ROWS // ROWS
    dtype: tl.constexpr = kv.dtype.element_ty
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, HEAD_DIM)
    place = token + (kv_head * GROUP + tl.minimum(row, GROUP - 1))[:, None] * HEAD_DIM + in_half
    q, second_q = tl.load(place), tl.load(place + HALF)
    place = token + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
    k = tl.load(place + in_half, mask=newest, other=0.0)
    second_k = tl.load(place + HALF + in_half, mask=newest, other=0.0)
    v = tl.load(place + KV_HEADS * HEAD_DIM + lane, mask=newest, other=0.0)
    q_scale, second_q_scale, k_scale, second_k_scale = 0.0, 0.0, 0.0, 0.0
    if HAS_NORM:
        q_scale, second_q_scale = tl.load(q_norm + in_half), tl.load(q_norm + HALF + in_half)
        k_scale, second_k_scale = tl.load(k_norm + in_half), tl.load(k_norm + HALF + in_half)
    q, second_q = normed_and_rotated_halves(
        q, second_q, q_scale, second_q_scale, cos, sin, eps, HEAD_DIM, HAS_NORM, dtype
    )
    # In every row: a sum over dimensions then gives each query its score where the query is.
    k, second_k = normed_and_rotated_halves(
        k, second_k, k_scale, second_k_scale, cos, sin, eps, HEAD_DIM, HAS_NORM, dtype
    )

    keys = kv + (cell // PAGE * KV_HEADS + kv_head) * (PAGE * HEAD_DIM) + cell % PAGE * HEAD_DIM
    once = newest & (row == 0)[:, None]
    tl.store(keys + in_half, k, mask=once)
    tl.store(keys + HALF + in_half, second_k, mask=once)
    tl.store(keys + value_offset + lane, v, mask=newest)

    score = tl.sum(q.to(tl.float32) * k.to(tl.float32) + second_q.to(tl.float32) * second_k.to(tl.float32), axis=1)
    score = tl.where(newest, score * scale_log2, -1.0e30)
    # Selected and not joined: the compiler takes what is joined for narrow types, and packs keys otherwise.
    half = tl.arange(0, 2)[None, :, None]
    query = tl.reshape(tl.where(half == 0, q[:, None, :], second_q[:, None, :]), (ROWS, HEAD_DIM))
    query = tl.reshape(tl.broadcast_to(query[None, :, :], (COPIES, ROWS, HEAD_DIM)), (GROUP_ROWS, HEAD_DIM))
    largest = tl.reshape(tl.broadcast_to(score[None, :], (COPIES, ROWS)), (GROUP_ROWS,))
    weight = tl.zeros((GROUP_ROWS,), tl.float32) + newest.to(tl.float32)
    total = tl.zeros((GROUP_ROWS, HEAD_DIM), tl.float32) + v.to(tl.float32)[None, :]
    return query, largest, weight, total

"""What attention kernels make of a row of the qkv product themselves: its queries and its newest key, rotated.

Rounded where `qk_norm_rope_write` rounds. A dimension is rotated with the one half a head away, `far`, which is loaded
once more: lanes exchange nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.norm_rope import rounded_scale


@triton.jit
def turn_of(rotation, position, num_positions, dim, HEAD_DIM: tl.constexpr):
    """Cosines and sines of a position, in the shape of `dim`; sines are negative in the first half. Positions behind
    the last are rotated as it is."""
    HALF: tl.constexpr = HEAD_DIM // 2
    turn = rotation + tl.minimum(position, num_positions - 1).to(tl.int64) * HEAD_DIM + dim % HALF
    cos, sin = tl.load(turn), tl.load(turn + HALF)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def gains_of(norm, dim, far):
    """A norm's, of both; zeros without one."""
    gain, far_gain = 0.0, 0.0
    if norm is not None:
        gain, far_gain = tl.load(norm + dim), tl.load(norm + far)
    return gain, far_gain


@triton.jit
def normed_and_rotated(
    source, far_source, weight, far_weight, cos, sin, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Heads, [rows, HEAD_DIM]. cos, sin: of `turn_of`."""
    near, far = source.to(tl.float32), far_source.to(tl.float32)
    if HAS_NORM:
        root = tl.rsqrt(tl.sum(near * near, axis=1, keep_dims=True) / HEAD_DIM + eps)
        near = rounded_scale(near * root, weight, dtype)
        far = rounded_scale(far * root, far_weight, dtype)
    return (near * cos + far * sin).to(dtype)


@triton.jit
def begin_with_newest(
    token_qkv, cell, value_offset, kv_head, is_last, rotation, position, num_positions, q_norm, k_norm, eps, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Waits for the qkv product, then lets the next kernel start. Returns a range's queries, [GROUP_ROWS, HEAD_DIM],
    and its softmax before the keys in memory: largest score and weight, [GROUP_ROWS], and sum of values, [GROUP_ROWS,
    HEAD_DIM] float32.

    A row's last range begins with the newest key, and writes it and its value to `cell`; others begin with nothing.
    The group's queries stand in the first GROUP rows. The rest repeats them, so that it is finite if they are.
    """
    dtype: tl.constexpr = cell.dtype.element_ty
    QUERIES: tl.constexpr = triton.next_power_of_2(GROUP)
    HAS_NORM: tl.constexpr = q_norm is not None
    dim = tl.arange(0, HEAD_DIM)[None, :]
    far = (dim + HEAD_DIM // 2) % HEAD_DIM
    cos, sin = turn_of(rotation, position, num_positions, dim, HEAD_DIM)
    q_gain, far_q_gain = gains_of(q_norm, dim, far)
    k_gain, far_k_gain = gains_of(k_norm, dim, far)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    heads = token_qkv + (kv_head * GROUP + tl.minimum(tl.arange(0, QUERIES), GROUP - 1))[:, None] * HEAD_DIM
    query, far_query = tl.load(heads + dim), tl.load(heads + far)
    head = token_qkv + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
    key = tl.load(head + dim, mask=is_last, other=0.0)
    far_key = tl.load(head + far, mask=is_last, other=0.0)
    value = tl.load(head + KV_HEADS * HEAD_DIM + dim, mask=is_last, other=0.0)
    query = normed_and_rotated(query, far_query, q_gain, far_q_gain, cos, sin, eps, HEAD_DIM, HAS_NORM, dtype)
    key = normed_and_rotated(key, far_key, k_gain, far_k_gain, cos, sin, eps, HEAD_DIM, HAS_NORM, dtype)
    tl.store(cell + dim, key, mask=is_last)
    tl.store(cell + value_offset + dim, value, mask=is_last)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1, keep_dims=True) * scale_log2
    largest = tl.reshape(repeated(tl.where(is_last, score, -1.0e30), GROUP_ROWS), (GROUP_ROWS,))
    weight = tl.zeros((GROUP_ROWS,), tl.float32) + is_last.to(tl.float32)
    total = tl.zeros((GROUP_ROWS, HEAD_DIM), tl.float32) + value.to(tl.float32)
    # By a product, so that queries are where the tensor cores leave results, from where they take operands too. It is
    # exact: each sum has one term that is not zero.
    same = tl.arange(0, GROUP_ROWS)[:, None] == tl.arange(0, GROUP_ROWS)[None, :]
    query = tl.dot(same.to(dtype), repeated(query, GROUP_ROWS), input_precision="ieee").to(dtype)
    return query, largest, weight, total


@triton.jit
def repeated(x, ROWS: tl.constexpr):
    """[ROWS, width]: x, [rows, width], as often as it fits."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], (ROWS // rows, rows, width)), (ROWS, width))

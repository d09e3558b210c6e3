"""The row-wise kernels between the linear layers: norms, rotary embedding with the KV write, SiLU, embedding.

Each does what the function of its name in `reference` does, with the same roundings: arithmetic in float32, and a
value that the reference keeps in the tensors' dtype is rounded to it here too. All tensors are contiguous and of one
dtype (bfloat16, or float32 in tests) unless said otherwise. Inside a captured graph everything but the tensors'
contents is fixed: shapes, addresses, `eps`.

Launch shape: rows x column blocks where columns are independent, one program a row where a row is reduced. A thread
takes 8 values of 2 bytes, one 16-byte access, per tensor.

PDL: weights, which no kernel writes, are read before the wait for the kernel before.
Each kernel lets the next one start only behind its own wait, so what runs after it may rely on everything before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.residual import Gained

VALUES_PER_THREAD = 8
MAX_NORM_WARPS = 16
ROW_BLOCK = 1024
"""Columns of one program of `embedding` and `silu_mul`: 4 warps, so that one row of any model gets a few programs."""
HEADS_PER_BLOCK = 8
WHOLE_TOKEN_ROWS = 256
"""From here `qk_norm_rope_write` takes one program a token, which computes sines once for all heads; below there are
too few tokens to fill the GPU, and heads go to programs of their own."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Norm over the last dimension. x: [T, hidden]; weight: [hidden]. Returns `out`, [T, hidden], new unless given."""
    rows, hidden = _rows(x)
    out = torch.empty_like(x) if out is None else out
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(rows,)](x, weight, out, eps, HIDDEN=hidden, BLOCK=block, **launch_options(x, _norm_warps(block)))
    return out


def qk_norm_rope_write(
    qkv: Tensor,
    positions: Tensor,
    kv_index: Tensor,
    inv_freq: Tensor,
    kv_layer: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    programs_per_token: int | None = None,
) -> Tensor:
    """Norm each query and key head (if weights are given), rotate both, write keys and values into their pages.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, then k, then v. positions: [T] int32.
    kv_index: [T] int32, page * page_size + offset; tokens that mean nothing point into the dummy page 0, where several
    may write. inv_freq: [head_dim / 2] float32, radians per position; angles are float32 products, as the reference's.
    kv_layer: [2, num_pages, num_kv_heads, page_size, head_dim]. q_norm, k_norm: [head_dim], both or neither.
    Returns `out`, the queries, [T, num_heads, head_dim], new unless given.

    Positions and kv_index are read before the wait (PDL): a kernel of this file must stand between the one that
    wrote them and this one (`embedding` does, in a step).
    programs_per_token: None takes what suits the number of tokens.
    """
    rows, width = _rows(qkv)
    _, num_pages, num_kv_heads, page_size, head_dim = kv_layer.shape
    total_heads = num_heads + 2 * num_kv_heads
    if width != total_heads * head_dim:
        raise ValueError(f"qkv has {width} columns; {total_heads} heads of {head_dim} need {total_heads * head_dim}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are both normed, or neither is")
    out = qkv.new_empty(rows, num_heads, head_dim) if out is None else out
    blocks = triton.cdiv(total_heads, HEADS_PER_BLOCK)
    programs = programs_per_token or (1 if rows >= WHOLE_TOKEN_ROWS else blocks)
    block_half = triton.next_power_of_2(head_dim // 2)
    _qk_norm_rope_write_kernel[(rows * programs,)](
        qkv,
        positions,
        kv_index,
        inv_freq,
        kv_layer,
        q_norm,
        k_norm,
        out,
        num_pages,
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        HAS_NORM=q_norm is not None,
        BLOCK_HEADS=HEADS_PER_BLOCK,
        BLOCK_HALF=block_half,
        PROGRAMS=programs,
        BLOCKS=triton.cdiv(blocks, programs),
        **launch_options(qkv, max(1, HEADS_PER_BLOCK * block_half // (32 * VALUES_PER_THREAD))),
    )
    return out


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 * intermediate], gate first. Returns `out`, [T, intermediate], new unless
    given."""
    rows, width = _rows(gate_up)
    inner = width // 2
    out = gate_up.new_empty(rows, inner) if out is None else out
    blocks = triton.cdiv(inner, ROW_BLOCK)
    _silu_mul_kernel[(rows * blocks,)](
        gate_up, out, INNER=inner, BLOCK=ROW_BLOCK, BLOCKS=blocks, **launch_options(gate_up, 4)
    )
    return out


def embedding(token_ids: Tensor, table: Tensor, *, out: Tensor | None = None, gained: Gained | None = None) -> Tensor:
    """The table's rows of these tokens. token_ids: [T] int32, each below the vocabulary's size; table: [vocab, hidden].

    gained: is written too, of `embedding_parts` parts. Returns `out`, [T, hidden], new unless given.
    """
    _, hidden = _rows(table)
    rows = len(token_ids)
    out = table.new_empty(rows, hidden) if out is None else out
    blocks = embedding_parts(hidden)
    to_gain = (None, None, None) if gained is None else (gained.gain, gained.values, gained.squares)
    _embedding_kernel[(rows * blocks,)](
        *(token_ids, table, out, *to_gain, rows),
        HIDDEN=hidden,
        BLOCK=ROW_BLOCK,
        BLOCKS=blocks,
        HAS_GAIN=gained is not None,
        **launch_options(table, 4),
    )
    return out


def embedding_parts(hidden: int) -> int:
    """Of the sum of squares of a row of the table, as `embedding` computes it."""
    return triton.cdiv(hidden, ROW_BLOCK)


def _rows(x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"expected a contiguous matrix, got shape {tuple(x.shape)} with strides {x.stride()}")
    return x.shape[0], x.shape[1]


def _norm_warps(block: int) -> int:
    return max(1, min(MAX_NORM_WARPS, block // (32 * VALUES_PER_THREAD)))


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    normed = (value * root).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + column, (normed * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pages"])
def _qk_norm_rope_write_kernel(
    qkv,
    positions,
    kv_index,
    inv_freq,
    kv_layer,
    q_norm,
    k_norm,
    out,
    num_pages,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a token
    BLOCKS: tl.constexpr,  # of heads, in a program
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype = out.dtype.element_ty
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    first_block = (tl.program_id(0) % PROGRAMS) * BLOCKS
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF

    # Written some kernels ago, and perhaps by another multiprocessor: past the first-level cache.
    position = tl.load(positions + token, cache_modifier=".cg")
    index = tl.load(kv_index + token, cache_modifier=".cg").to(tl.int64)
    angle = position.to(tl.float32) * tl.load(inv_freq + dim, mask=inside, other=0.0)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    cell = (index // PAGE) * (KV_HEADS * PAGE * HEAD_DIM) + (index % PAGE) * HEAD_DIM
    plane = num_pages.to(tl.int64) * (KV_HEADS * PAGE * HEAD_DIM)
    for block in tl.static_range(BLOCKS):
        head = ((first_block + block) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        is_q = head < HEADS
        is_v = head >= HEADS + KV_HEADS
        mask = (head < TOTAL) & inside[None, :]
        source = qkv + token * (TOTAL * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
        raw = tl.load(source, mask=mask, other=0.0)
        raw_second = tl.load(source + HALF, mask=mask, other=0.0)
        first, second = raw.to(tl.float32), raw_second.to(tl.float32)
        if HAS_NORM:
            scale = tl.where(is_q, q_norm, k_norm) + dim[None, :]
            squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
            root = tl.rsqrt(squares / HEAD_DIM + eps)
            first = rounded_scale(first * root, tl.load(scale, mask=mask, other=0.0), dtype)
            second = rounded_scale(second * root, tl.load(scale + HALF, mask=mask, other=0.0), dtype)
        rotated = (first * cos - second * sin).to(dtype)
        rotated_second = (second * cos + first * sin).to(dtype)

        target = out + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
        tl.store(target, rotated, mask=mask & is_q)
        tl.store(target + HALF, rotated_second, mask=mask & is_q)
        kv_head = head - HEADS - tl.where(is_v, KV_HEADS, 0)
        target = kv_layer + cell + tl.where(is_v, plane, 0) + kv_head * (PAGE * HEAD_DIM) + dim[None, :]
        tl.store(target, tl.where(is_v, raw, rotated), mask=mask & ~is_q)
        tl.store(target + HALF, tl.where(is_v, raw_second, rotated_second), mask=mask & ~is_q)


@triton.jit
def rounded_scale(normed, scale, dtype: tl.constexpr):
    return (normed.to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _silu_mul_kernel(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = gate_up + row * (2 * INNER) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + INNER, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * INNER + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _embedding_kernel(
    token_ids,
    table,
    out,
    gain,  # [HIDDEN] if HAS_GAIN, as what follows
    gained,  # [T, HIDDEN]
    squares,  # [BLOCKS, T] float32
    num_rows,  # T
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(token_ids + row).to(tl.int64)
    values = tl.load(table + token * HIDDEN + column, mask=inside, other=0.0)
    tl.store(out + row * HIDDEN + column, values, mask=inside)
    if HAS_GAIN:
        wide = values.to(tl.float32)
        scale = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(gained + row * HIDDEN + column, (wide * scale).to(gained.dtype.element_ty), mask=inside)
        tl.store(squares + (tl.program_id(0) % BLOCKS) * num_rows + row, tl.sum(wide * wide, axis=0))

"""The qkv product of many tokens with what follows it fused in: heads are normed and rotated where the sums are, keys
and values go into their pages and queries out, so that the product itself never is in memory.

A tile is of whole heads, whose sums a program has in registers. A lane has the same few of every 8 columns of a row, so
both halves of a head, which rotate against each other, and a head's squares are of one lane or of four neighbours.

    qkv_norm_rope_write  =  linear, then norm_rope.qk_norm_rope_write

The roundings are those of the two, so that results differ from theirs by the order of sums and the last bits of sines.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_runner.kernels.launch import launch_options, on_gpu
from gpu_runner.kernels.linear import room_for_parts
from gpu_runner.kernels.linear_config import TileConfig
from gpu_runner.kernels.linear_parts import inverse_root, prefetch_to_l2, squares_of
from gpu_runner.kernels.linear_tile import place_of
from gpu_runner.kernels.norm_rope import rounded_scale
from gpu_runner.kernels.residual import Gained


def qkv_norm_rope_write(
    x: Tensor | Gained,
    weight: Tensor,
    positions: Tensor,
    kv_index: Tensor,
    inv_freq: Tensor,
    kv_layer: Tensor,
    *,
    out: Tensor,
    config: TileConfig,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    bias: Tensor | None = None,
    x_eps: float = 0.0,
) -> None:
    """`norm_rope.qk_norm_rope_write` of x @ weight.T + bias: queries to `out`, keys and values to their pages.

    x: [T, K], or a norm that lacks its root, in which x_eps is. weight: [(num_heads + 2 * num_kv_heads) * head_dim,
    K], rows of q, then k, then v; bias: one for each. out: [T, num_heads, head_dim]. kv_layer: [2, num_pages,
    num_kv_heads, page_size, head_dim]. All contiguous and of one dtype. positions, kv_index, inv_freq, q_norm, k_norm:
    as `qk_norm_rope_write` takes them. head_dim: a power of two. config: one program for each tile, and tiles of whole
    heads, else ValueError.

    Positions and kv_index are read before the wait (PDL). So the kernels that wrote them must have ended when the
    kernel launched just before this one starts, as all have that run before a kernel which lets the next one start
    behind its own wait only.
    """
    squares = None
    if isinstance(x, Gained):
        squares, x = x.squares, x.values
    num_tokens, k = x.shape
    _, num_heads, head_dim = out.shape
    _, num_pages, num_kv_heads, page_size, _ = kv_layer.shape
    total_heads = num_heads + 2 * num_kv_heads
    if len(weight) != total_heads * head_dim:
        raise ValueError(f"weight has {len(weight)} rows; {total_heads} heads of {head_dim} need another number")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are both normed, or neither is")
    if config.rows % head_dim or config.programs:
        raise ValueError(f"{config} does not give whole heads of {head_dim} rows to one program each")
    options = launch_options(x, config.num_warps)
    tiles = triton.cdiv(num_tokens, config.tokens) * triton.cdiv(len(weight), config.rows)
    linear_heads_kernel[(tiles,)](
        TensorDescriptor.from_tensor(x, [config.tokens, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.rows, config.block_k]),
        weight,
        bias,
        positions,
        kv_index,
        inv_freq,
        q_norm,
        k_norm,
        out,
        kv_layer,
        squares,
        num_tokens,
        num_pages,
        0 if squares is None else len(squares),
        eps,
        x_eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        K=k,
        TOKENS=config.tokens,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        GROUP=config.group,
        PREFETCH_K=config.prefetch_k if options["PDL"] else 0,  # there is no wait to prefetch in without
        HAS_BIAS=bias is not None,
        HAS_NORM=q_norm is not None,
        PARTS=room_for_parts(squares),
        EARLY=config.prefetch_k > 0,
        INTERPRETED=not on_gpu(x),
        **options,
    )


@triton.jit
def _cos_sin(angle, INTERPRETED: tl.constexpr):
    """Of float32 angles up to a million, and so of as many positions, to 1e-6; beyond, the error grows slowly. Whole
    turns are taken off in two steps, of which the second brings what float32 does not hold of a turn, and the rest is
    the multifunction unit's.

    The compiler's own functions are a tenth as fast, and a tile needs as many as it has sums.
    """
    if INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    else:
        turns = libdevice.rint(angle * 0.15915494309189535)
        rest = tl.fma(turns, -6.2831854820251465, angle)
        rest = tl.fma(turns, 1.7484556000744487e-07, rest)
        return libdevice.fast_cosf(rest), libdevice.fast_sinf(rest)


@triton.jit
def _factors(inv_freq, q_norm, k_norm, is_q, half, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Radians per position of each pair, and, if HAS_NORM, the gains of its first and its second value."""
    turn = tl.load(inv_freq + half)
    if HAS_NORM:
        gain = tl.where(is_q, q_norm, k_norm) + half
        return turn, tl.load(gain), tl.load(gain + HALF)
    else:
        return turn, turn, turn


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "num_parts"])
def linear_heads_kernel(
    x,  # descriptor of [T, K] in blocks of [TOKENS, BLOCK_K]
    weight,  # descriptor of [N, K] in blocks of [ROWS, BLOCK_K]
    weight_start,  # pointer to the same
    bias,  # [N] if HAS_BIAS
    positions,  # [T] int32
    kv_index,  # [T] int32
    inv_freq,  # [HEAD_DIM / 2] float32
    q_norm,  # [HEAD_DIM] if HAS_NORM
    k_norm,
    out,  # [T, HEADS, HEAD_DIM]
    kv_layer,  # [2, num_pages, KV_HEADS, PAGE, HEAD_DIM]
    squares,  # [num_parts, T] float32 if PARTS > 0: x is `residual.Gained`
    num_tokens,  # T
    num_pages,
    num_parts,
    eps,
    x_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two from num_parts, or 0
    EARLY: tl.constexpr,  # a tile's factors are in registers from its start: where few programs are to an SM
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    TILE_HEADS: tl.constexpr = ROWS // HEAD_DIM
    ROW_TILES: tl.constexpr = (TOTAL + TILE_HEADS - 1) // TILE_HEADS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    dtype: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token_tile, row_tile = place_of(tl.program_id(0), tl.cdiv(num_tokens, TOKENS), ROW_TILES, GROUP)
    token_start = token_tile * TOKENS
    first_head = row_tile * TILE_HEADS
    if PREFETCH_K > 0:
        row = tl.minimum(row_tile * ROWS + tl.arange(0, ROWS), TOTAL * HEAD_DIM - 1)
        prefetch_to_l2(weight_start + row.to(tl.int64)[:, None] * K, 0, K, PREFETCH_K)
    token = token_start + tl.arange(0, TOKENS)
    exists = token < num_tokens
    # Written some kernels ago, and perhaps by another multiprocessor: past the first-level cache.
    position = tl.load(positions + token, mask=exists, other=0, cache_modifier=".cg")
    index = tl.load(kv_index + token, mask=exists, other=0, cache_modifier=".cg")
    head = (first_head + tl.arange(0, TILE_HEADS))[None, :, None]
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    half = tl.arange(0, HALF)[None, None, :]
    if EARLY:
        turn, gain, second_gain = _factors(inv_freq, q_norm, k_norm, is_q, half, HALF, HAS_NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()

    if PARTS > 0:
        # Asked for in front of the loop over K and used behind it, they take no time.
        x_squares = squares_of(squares, token, num_tokens, num_parts, PARTS)
    sums = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for block in tl.range(BLOCKS, num_stages=STAGES):
        values = x.load([token_start, block * BLOCK_K])
        w = weight.load([row_tile * ROWS, block * BLOCK_K])
        sums = tl.dot(values, w.T, sums, input_precision="ieee")

    if PARTS > 0:
        sums *= inverse_root(x_squares, x_eps, K)[:, None]
    if HAS_BIAS:
        row = row_tile * ROWS + tl.arange(0, ROWS)
        sums += tl.load(bias + row, mask=row < TOTAL * HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    heads = sums.to(dtype)
    if first_head < HEADS + KV_HEADS:
        if not EARLY:
            turn, gain, second_gain = _factors(inv_freq, q_norm, k_norm, is_q, half, HALF, HAS_NORM)
        raw, raw_second = tl.split(heads.reshape(TOKENS, TILE_HEADS, 2, HALF).permute(0, 1, 3, 2))
        first, second = raw.to(tl.float32), raw_second.to(tl.float32)
        if HAS_NORM:
            root = tl.rsqrt(tl.sum(first * first + second * second, axis=2, keep_dims=True) / HEAD_DIM + eps)
            first = rounded_scale(first * root, gain, dtype)
            second = rounded_scale(second * root, second_gain, dtype)
        angle = position.to(tl.float32)[:, None, None] * turn
        cos, sin = _cos_sin(angle, INTERPRETED)
        rotated = (first * cos - second * sin).to(dtype)
        rotated_second = (second * cos + first * sin).to(dtype)
        if TILE_HEADS > 1:
            rotated = tl.where(is_v, raw, rotated)
            rotated_second = tl.where(is_v, raw_second, rotated_second)
        heads = tl.join(rotated, rotated_second).permute(0, 1, 3, 2).reshape(TOKENS, ROWS)

    token = token.to(tl.int64)[:, None, None]
    index = index.to(tl.int64)[:, None, None]
    kv_head = head - HEADS - tl.where(is_v, KV_HEADS, 0)
    plane = num_pages.to(tl.int64) * (KV_HEADS * PAGE * HEAD_DIM)
    cell = (index // PAGE) * (KV_HEADS * PAGE * HEAD_DIM) + (index % PAGE) * HEAD_DIM
    cell += tl.where(is_v, plane, 0) + kv_head * (PAGE * HEAD_DIM)
    target = tl.where(is_q, out + token * (HEADS * HEAD_DIM) + head * HEAD_DIM, kv_layer + cell)
    target += tl.arange(0, HEAD_DIM)[None, None, :]
    tl.store(target, heads.reshape(TOKENS, TILE_HEADS, HEAD_DIM), mask=exists[:, None, None] & (head < TOTAL))

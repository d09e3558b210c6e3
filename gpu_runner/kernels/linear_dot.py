"""Linear layer of a few to some hundred tokens on tensor cores, K split if need be."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.linear_parts import (
    inverse_root,
    output_places,
    outputs_of,
    prefetch_to_l2,
    row_values,
    squares_of,
    weight_rows,
)


@triton.jit
def _x_tile(x, token, k, num_tokens, K: tl.constexpr):
    """[tokens, BLOCK_K]; zero past the last token and the end of a row."""
    mask = (token < num_tokens)[:, None] & (k < K)[None, :]
    return tl.load(x + token[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def _weight_tile(row_start, k, K: tl.constexpr, ONCE: tl.constexpr):
    """[ROWS, BLOCK_K]; zero past the end of a row. ONCE: no other program reads these weights."""
    if ONCE:
        return tl.load(row_start + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(row_start + k[None, :], mask=(k < K)[None, :], other=0.0)


@triton.jit
def _add_product(values, w, sums, WEIGHT_FIRST: tl.constexpr):
    if WEIGHT_FIRST:
        return tl.dot(w, tl.trans(values), sums, input_precision="ieee")
    else:
        return tl.dot(values, tl.trans(w), sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def linear_dot_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N] if HAS_BIAS
    out,  # [T, N], of gate-up [T, N / 2]
    partials,  # [SPLIT_K, T, N] float32 if SPLIT_K > 1
    arrivals,  # [tiles] int32 if SPLIT_K > 1: zero, before and after
    num_tokens,  # T
    squares,  # [num_parts, T] float32 if PARTS > 0: x is `residual.Gained`
    num_parts,
    eps,
    gain,  # [N] if HAS_GAIN, of the norm of `out`
    gained,  # [T, N] if HAS_GAIN
    gained_squares,  # [tiles of rows, T] float32 if HAS_GAIN
    TOKENS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    ONCE: tl.constexpr,  # T is at most TOKENS: no other program reads the same weights
    PARTS: tl.constexpr,  # a power of two from num_parts, or 0
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns a tile, TOKENS tokens by ROWS rows of W, and one of SPLIT_K parts of K.

    Neighbours share their rows, so that memory is asked for them once. Of a tile's programs the last to arrive adds the
    parts, in order: the result does not depend on who that is. WEIGHT_FIRST makes W the left operand (with 64 rows or
    more, read by warpgroups).

    Blocks are pipelined through shared memory, once the kernel before has ended.
    """
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART_BLOCKS: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // token_tiles
    part = tl.program_id(1)
    row, exists = weight_rows(tile, N, ROWS, GATE_UP)
    row_start = weight + tl.where(exists, row, 0).to(tl.int64)[:, None] * K
    start = part * (PART_BLOCKS * BLOCK_K)
    lane = tl.arange(0, BLOCK_K)
    if PREFETCH_K > 0:
        prefetch_to_l2(row_start, start, K, PREFETCH_K)
    row_bias = row_values(bias, tile, N, ROWS, GATE_UP, HAS_BIAS)
    row_gain = row_values(gain, tile, N, ROWS, GATE_UP, HAS_GAIN)
    token = (tl.program_id(0) % token_tiles) * TOKENS + tl.arange(0, TOKENS)
    places, mask = output_places(out, token, tile, num_tokens, N, ROWS, GATE_UP)
    if PDL:
        tl.extra.cuda.gdc_wait()

    residual = 0.0
    if ADD:
        # Asked for now, so that it is there when the sums are. Its writer is the tile's last program to arrive.
        residual = tl.load(places, mask=mask, other=0.0)
    if PARTS > 0:
        # Asked for in front of the loop over K and used behind it, they take no time.
        x_squares = squares_of(squares, token, num_tokens, num_parts, PARTS)
    if WEIGHT_FIRST:
        sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    else:
        sums = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for block in tl.range(0, PART_BLOCKS, num_stages=STAGES):
        k = start + block * BLOCK_K + lane
        w = _weight_tile(row_start, k, K, ONCE)
        sums = _add_product(_x_tile(x, token, k, num_tokens, K), w, sums, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        sums = tl.trans(sums)

    last = True
    if SPLIT_K > 1:
        partial = token[:, None] * N + row[None, :]
        partial_mask = (token < num_tokens)[:, None] & exists[None, :]
        tl.store(partials + part * (num_tokens * N) + partial, sums, mask=partial_mask)
        # All threads' partials are written before the one that counts says so.
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        if SPLIT_K > 1:
            sums = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
            for other in tl.static_range(SPLIT_K):
                # From L2: this SM's L1 need not know what other SMs wrote.
                sums += tl.load(
                    partials + other * (num_tokens * N) + partial, mask=partial_mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(arrivals + tl.program_id(0), 0)
        if PARTS > 0:
            sums *= inverse_root(x_squares, eps, K)[:, None]
        y = outputs_of(sums + row_bias, residual, x.dtype.element_ty, GATE_UP, ADD).to(out.dtype.element_ty)
        tl.store(places, y, mask=mask)
        if HAS_GAIN:
            wide = tl.where(mask, y.to(tl.float32), 0.0)
            gained_places, _ = output_places(gained, token, tile, num_tokens, N, ROWS, GATE_UP)
            tl.store(gained_places, (wide * row_gain).to(gained.dtype.element_ty), mask=mask)
            tl.store(gained_squares + tile * num_tokens + token, tl.sum(wide * wide, axis=1), mask=token < num_tokens)

"""Linear layer of a few to 64 tokens on tensor cores: weights pipelined through shared memory, K split if need be."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.linear_parts import bias_of, normed, output_places, outputs_of, weight_rows


@triton.jit
def _prefetch_to_l2(row_start, start, K: tl.constexpr, DEPTH_K: tl.constexpr):
    """Ask for the first DEPTH_K weights of each row, one request for each 128 bytes. row_start: [ROWS, 1] pointers."""
    LINE: tl.constexpr = 64
    k = tl.minimum(start + tl.arange(0, DEPTH_K // LINE) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_start + k[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _x_tile(x, token, k, T: tl.constexpr, K: tl.constexpr):
    """[tokens, BLOCK_K]; zero past the last token and the end of a row."""
    return tl.load(x + token[:, None] * K + k[None, :], mask=(token < T)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def linear_dot_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    gain,  # [K] if HAS_NORM
    bias,  # [N] if HAS_BIAS
    out,  # [T, N], of gate-up [T, N / 2]
    partials,  # [SPLIT_K, T, N] float32 if SPLIT_K > 1
    arrivals,  # [tiles] int32 if SPLIT_K > 1: zero, before and after
    eps,
    T: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns ROWS rows of W and one of SPLIT_K parts of K; M >= T is the tokens' padded number.

    Of a tile's programs the last to arrive adds the parts, in order: the result does not depend on who that is. The
    norm reads NORM_K values of all tokens at a time. WEIGHT_FIRST makes W the left operand (with 64 rows or more, read
    from shared memory by warpgroups).
    """
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART_BLOCKS: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row, exists = weight_rows(tile, N, ROWS, GATE_UP)
    row_start = weight + tl.where(exists, row, 0).to(tl.int64)[:, None] * K
    start = part * (PART_BLOCKS * BLOCK_K)
    if PREFETCH_K > 0:
        _prefetch_to_l2(row_start, start, K, PREFETCH_K)
    row_bias = bias_of(bias, tile, N, ROWS, GATE_UP, HAS_BIAS)
    token = tl.arange(0, M)
    lane = tl.arange(0, BLOCK_K)
    places, mask = output_places(out, token, tile, T, N, ROWS, GATE_UP)
    if PDL:
        tl.extra.cuda.gdc_wait()

    residual = 0.0
    if ADD:
        # Asked for now, so that it is there when the sums are. Its writer is the tile's last program to arrive.
        residual = tl.load(places, mask=mask, other=0.0)
    if HAS_NORM:
        square_sum = tl.zeros((M,), dtype=tl.float32)
        for block in range((K + NORM_K - 1) // NORM_K):
            values = _x_tile(x, token, block * NORM_K + tl.arange(0, NORM_K), T, K).to(tl.float32)
            square_sum += tl.sum(values * values, axis=1)
        scale = tl.rsqrt(square_sum / K + eps)[:, None]

    if WEIGHT_FIRST:
        sums = tl.zeros((ROWS, M), dtype=tl.float32)
    else:
        sums = tl.zeros((M, ROWS), dtype=tl.float32)
    for block in tl.range(0, PART_BLOCKS, num_stages=STAGES):
        k = start + block * BLOCK_K + lane
        w = tl.load(row_start + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
        values = _x_tile(x, token, k, T, K)
        if HAS_NORM:
            values = normed(values, scale, tl.load(gain + k, mask=k < K, other=0.0)[None, :])
        if WEIGHT_FIRST:
            sums = tl.dot(w, tl.trans(values), sums, input_precision="ieee")
        else:
            sums = tl.dot(values, tl.trans(w), sums, input_precision="ieee")
    if WEIGHT_FIRST:
        sums = tl.trans(sums)

    last = True
    if SPLIT_K > 1:
        partial = token[:, None] * N + row[None, :]
        partial_mask = (token < T)[:, None] & exists[None, :]
        tl.store(partials + part * (T * N) + partial, sums, mask=partial_mask)
        # All threads' partials are written before the one that counts says so.
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        if SPLIT_K > 1:
            sums = tl.zeros((M, ROWS), dtype=tl.float32)
            for other in tl.static_range(SPLIT_K):
                # From L2: this SM's L1 need not know what other SMs wrote.
                sums += tl.load(
                    partials + other * (T * N) + partial, mask=partial_mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(arrivals + tile, 0)
        y = outputs_of(sums + row_bias, residual, x.dtype.element_ty, GATE_UP, ADD)
        tl.store(places, y.to(out.dtype.element_ty), mask=mask)

"""Linear layer of one to a few tokens as fp32 multiply-adds: the weights stream through registers, once.

Kernels of so few tokens take as long as the hop from one to the next, and as their weights' way from memory. The two
pass at the same time as far as kernels that wait for their turn have room on the multiprocessors: registers for their
weights, and threads. So a thread holds many weights; and the sums of a program of one warp meet no barrier.
"""

# Triton has no unpacking inside tuples, and no annotations for those that grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.linear_parts import output_places, outputs_of, row_values, weight_rows


@triton.jit
def _weight_chunk(row_start, k, exists, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(row_start + k, mask=exists, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(row_start + k, mask=exists & (k < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def _line_chunk(line, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(line + k)
    else:
        return tl.load(line + k, mask=k < K, other=0.0)


@triton.jit
def linear_fma_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    gain,  # [K] if HAS_NORM
    bias,  # [N] if HAS_BIAS
    out,  # [T, N], of gate-up [T, N / 2]
    eps,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns ROWS rows of W. DEPTH chunks of [ROWS, BLOCK_K] weights are in registers or on their way.

    The first DEPTH are asked for before the wait for the kernel before: no kernel writes weights. The chunks are
    unrolled, so the compiler sees each load's distance from its use.
    """
    LANE_K: tl.constexpr = 8  # consecutive values a thread loads at once: 16 bytes of bf16
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    row, exists = weight_rows(tile, N, ROWS, GATE_UP)
    row_start = weight + row.to(tl.int64)[:, None] * K
    exists = exists[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]

    chunks = ()
    for c in tl.static_range(min(DEPTH, CHUNKS)):
        chunks = chunks + (_weight_chunk(row_start, c * BLOCK_K + k, exists, K, EVEN_K),)
    gains = ()
    if HAS_NORM:
        for c in tl.static_range(CHUNKS):
            gains = gains + (_line_chunk(gain, c * BLOCK_K + k, K, EVEN_K),)
    row_bias = row_values(bias, tile, N, ROWS, GATE_UP, HAS_BIAS)
    if PDL:
        tl.extra.cuda.gdc_wait()

    residuals = ()
    for t in tl.static_range(T):
        places, mask = output_places(out, tl.full((1,), t, tl.int32), tile, T, N, ROWS, GATE_UP)
        if ADD:
            # Asked for now, so that it is there when the sums are.
            residuals = residuals + (tl.load(places, mask=mask, other=0.0),)
        else:
            residuals = residuals + (0.0,)
    # A norm's root divides the sums, not the inputs (see `residual`), so that it is not waited for.
    squares = ()
    for _ in tl.static_range(T):
        squares = squares + (tl.zeros((1, BLOCK_K // LANE_K), dtype=tl.float32),)
    sums = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros((ROWS, BLOCK_K // LANE_K), dtype=tl.float32),)
    for c in tl.static_range(CHUNKS):
        if c + DEPTH < CHUNKS:
            chunks = chunks + (_weight_chunk(row_start, (c + DEPTH) * BLOCK_K + k, exists, K, EVEN_K),)
        weights = chunks[c].to(tl.float32)
        grown = ()
        grown_squares = ()
        for t in tl.static_range(T):
            values = _line_chunk(x + t * K, c * BLOCK_K + k, K, EVEN_K).to(tl.float32)
            if HAS_NORM:
                own = tl.reshape(values * values, (1, BLOCK_K // LANE_K, LANE_K))
                grown_squares = grown_squares + (squares[t] + tl.sum(own, axis=2),)
                values *= gains[c].to(tl.float32)
            # A thread's own products first: what is kept between chunks is one sum for each thread and row.
            products = tl.reshape(weights * values, (ROWS, BLOCK_K // LANE_K, LANE_K))
            grown = grown + (sums[t] + tl.sum(products, axis=2),)
        sums = grown
        if HAS_NORM:
            squares = grown_squares

    for t in tl.static_range(T):
        places, mask = output_places(out, tl.full((1,), t, tl.int32), tile, T, N, ROWS, GATE_UP)
        y = tl.sum(sums[t], axis=1)[None, :]
        if HAS_NORM:
            y *= tl.rsqrt(tl.sum(squares[t], axis=1) / K + eps)[:, None]
        y = outputs_of(y + row_bias, residuals[t], x.dtype.element_ty, GATE_UP, ADD)
        tl.store(places, y.to(out.dtype.element_ty), mask=mask)

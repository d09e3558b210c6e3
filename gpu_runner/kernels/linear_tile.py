"""Linear layer of many tokens: large tiles for warpgroups, fed by the tensor memory accelerator."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def linear_tile_kernel(
    x,  # descriptor of [T, K] in blocks of [TOKENS, BLOCK_K]
    weight,  # descriptor of [N, K] in blocks of [ROWS, BLOCK_K], of gate-up [ROWS / 2, BLOCK_K]
    bias,  # [N] if HAS_BIAS
    out,  # [T, N], of gate-up [T, N / 2]
    num_tokens,  # T
    TOKENS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns a tile. Neighbours are of GROUP tiles of tokens by a few tiles of rows, so that L2 holds what they
    share."""
    COLUMNS: tl.constexpr = ROWS // 2 if GATE_UP else ROWS
    WIDTH: tl.constexpr = N // 2 if GATE_UP else N
    ROW_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    dtype = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    if PDL:
        tl.extra.cuda.gdc_wait()

    tile = tl.program_id(0)
    first_of_group = tile // (GROUP * ROW_TILES) * GROUP
    in_group = tl.minimum(GROUP, token_tiles - first_of_group)
    place = tile - first_of_group * ROW_TILES
    token_start = (first_of_group + place % in_group) * TOKENS
    column_start = place // in_group * COLUMNS
    sums = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    up_sums = sums
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = x.load([token_start, k])
        sums = tl.dot(values, weight.load([column_start, k]).T, sums, input_precision="ieee")
        if GATE_UP:
            up_rows = weight.load([WIDTH + column_start, k])
            up_sums = tl.dot(values, up_rows.T, up_sums, input_precision="ieee")

    token = token_start + tl.arange(0, TOKENS)
    column = column_start + tl.arange(0, COLUMNS)
    exists = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
    places = out + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        if GATE_UP:
            up_sums += tl.load(bias + WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if GATE_UP:
        gate = sums.to(dtype).to(tl.float32)
        sums = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up_sums.to(dtype).to(tl.float32)
    elif ADD:
        sums = sums.to(dtype).to(tl.float32) + tl.load(places, mask=exists, other=0.0).to(tl.float32)
    tl.store(places, sums.to(dtype), mask=exists)

"""Linear layer of many tokens: large tiles for warpgroups, fed by the tensor memory accelerator, shared out evenly.

With as many programs as run at once, tiles go around in whole turns; the blocks of K of those left over are shared out
to all programs in equal runs (stream-K, https://arxiv.org/abs/2301.03598), so that none is idle in a last turn:

    program 0 | tile 0      | tile 4 .....
    program 1 | tile 1      | ..... tile 5
    program 2 | tile 2      | tile 5 .....
    program 3 | tile 3      | ..... tile 6
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.linear_parts import prefetch_to_l2, silu_product


@triton.jit
def _program_of(block, programs, blocks):
    """Whose run of `blocks` shared blocks holds `block`: program p's begins at p * blocks // programs."""
    return ((block + 1) * programs - 1) // blocks


@triton.jit
def _start_of(tile, token_tiles, ROW_TILES: tl.constexpr, GROUP: tl.constexpr):
    """A tile's place, of tokens and of rows: neighbours are of GROUP tiles of tokens by a few tiles of rows, so that L2
    holds what they share."""
    first_of_group = tile // (GROUP * ROW_TILES) * GROUP
    in_group = tl.minimum(GROUP, token_tiles - first_of_group)
    place = tile - first_of_group * ROW_TILES
    return first_of_group + place % in_group, place // in_group


@triton.jit
def _finish(
    sums,
    up_sums,
    bias,
    out,
    token_start,
    column_start,
    num_tokens,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Bias, and SiLU or residual, as `outputs_of`; then the store. sums, up_sums: [TOKENS, COLUMNS] float32."""
    token = token_start + tl.arange(0, TOKENS)
    column = column_start + tl.arange(0, COLUMNS)
    exists = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
    places = out + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        if GATE_UP:
            up_sums += tl.load(bias + WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if GATE_UP:
        sums = silu_product(sums, up_sums, DTYPE)
    elif ADD:
        sums = sums.to(DTYPE).to(tl.float32) + tl.load(places, mask=exists, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_tile_kernel(
    x,  # descriptor of [T, K] in blocks of [TOKENS, BLOCK_K]
    weight,  # descriptor of [N, K] in blocks of [ROWS, BLOCK_K], of gate-up [ROWS / 2, BLOCK_K]
    weight_start,  # pointer to the same
    bias,  # [N] if HAS_BIAS
    out,  # [T, N], of gate-up [T, N / 2]
    partials,  # [2, programs, TOKENS, ROWS] float32 if SHARED
    arrivals,  # [programs] int32 if SHARED: zero, before and after
    num_tokens,  # T
    TOKENS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    SHARED: tl.constexpr,  # programs share tiles; otherwise there is one for each tile
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of the programs that share a tile the last to arrive adds the parts, in order: the result does not depend on who
    that is. A program's run of shared blocks is shorter than a tile, so it has parts of two tiles at most."""
    COLUMNS: tl.constexpr = ROWS // 2 if GATE_UP else ROWS
    WIDTH: tl.constexpr = N // 2 if GATE_UP else N
    ROW_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = TOKENS * ROWS
    FINISH_TOKENS: tl.constexpr = min(TOKENS, max(16, 8192 // ROWS))
    dtype = x.dtype
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    turns = 1
    turns_in_all = 1
    begin = 0
    end = 0
    shared_blocks = 0
    if SHARED:
        tiles = token_tiles * ROW_TILES
        turns = tiles // programs
        shared_blocks = (tiles - turns * programs) * BLOCKS
        begin = program * shared_blocks // programs
        end = (program + 1) * shared_blocks // programs
        turns_in_all = turns + 2
    if PREFETCH_K > 0:
        first_tile = program if turns > 0 else begin // BLOCKS
        first_k = 0 if turns > 0 else begin % BLOCKS * BLOCK_K
        _, row_tile = _start_of(first_tile, token_tiles, ROW_TILES, GROUP)
        column = tl.minimum(row_tile * COLUMNS + tl.arange(0, COLUMNS), WIDTH - 1)
        prefetch_to_l2(weight_start + column.to(tl.int64)[:, None] * K, first_k, K, PREFETCH_K)
        if GATE_UP:
            prefetch_to_l2(weight_start + (WIDTH + column).to(tl.int64)[:, None] * K, first_k, K, PREFETCH_K)
    if PDL:
        tl.extra.cuda.gdc_wait()

    for turn in range(turns_in_all):
        tile = turn * programs + program
        first = 0
        last = BLOCKS
        shared_tile = 0
        if turn >= turns:
            shared_tile = begin // BLOCKS + (turn - turns)
            tile = turns * programs + shared_tile
            first = tl.maximum(begin - shared_tile * BLOCKS, 0)
            last = tl.minimum(end - shared_tile * BLOCKS, BLOCKS)
        if first < last:
            token_tile, row_tile = _start_of(tile, token_tiles, ROW_TILES, GROUP)
            token_start = token_tile * TOKENS
            column_start = row_tile * COLUMNS
            sums = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
            up_sums = sums
            for block in tl.range(first, last, num_stages=STAGES):
                values = x.load([token_start, block * BLOCK_K])
                sums = tl.dot(values, weight.load([column_start, block * BLOCK_K]).T, sums, input_precision="ieee")
                if GATE_UP:
                    up_rows = weight.load([WIDTH + column_start, block * BLOCK_K])
                    up_sums = tl.dot(values, up_rows.T, up_sums, input_precision="ieee")
            if last - first == BLOCKS:
                _finish(
                    *(sums, up_sums, bias, out, token_start, column_start, num_tokens),
                    *(TOKENS, WIDTH, COLUMNS, HAS_BIAS, GATE_UP, ADD, dtype),
                )
            elif SHARED:
                lane = tl.arange(0, TOKENS)[:, None] * ROWS + tl.arange(0, COLUMNS)[None, :]
                # The second half is of tiles that the program begins behind another.
                mine = partials + ((turn - turns) * programs + program) * PART
                tl.store(mine + lane, sums)
                if GATE_UP:
                    tl.store(mine + COLUMNS + lane, up_sums)
                # All threads' partials are written before the one that counts says so.
                tl.debug_barrier()
                first_program = _program_of(shared_tile * BLOCKS, programs, shared_blocks)
                last_program = _program_of(shared_tile * BLOCKS + BLOCKS - 1, programs, shared_blocks)
                arrived = tl.atomic_add(arrivals + shared_tile, 1, sem="acq_rel")
                if arrived == last_program - first_program:
                    tl.store(arrivals + shared_tile, 0)
                    for some in range(0, TOKENS, FINISH_TOKENS):
                        few = (some + tl.arange(0, FINISH_TOKENS))[:, None] * ROWS + tl.arange(0, COLUMNS)[None, :]
                        whole = tl.zeros((FINISH_TOKENS, COLUMNS), dtype=tl.float32)
                        up_whole = whole
                        for other in range(first_program, last_program + 1):
                            began_before = other * shared_blocks // programs < shared_tile * BLOCKS
                            part = partials + (began_before.to(tl.int32) * programs + other) * PART + few
                            # From L2: this SM's L1 need not know what other SMs wrote.
                            whole += tl.load(part, cache_modifier=".cg")
                            if GATE_UP:
                                up_whole += tl.load(part + COLUMNS, cache_modifier=".cg")
                        _finish(
                            *(whole, up_whole, bias, out, token_start + some, column_start, num_tokens),
                            *(FINISH_TOKENS, WIDTH, COLUMNS, HAS_BIAS, GATE_UP, ADD, dtype),
                        )

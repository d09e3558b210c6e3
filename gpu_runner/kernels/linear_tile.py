"""Linear layer of many tokens: large tiles for warpgroups, fed by the tensor memory accelerator, shared out evenly.

With as many programs as run at once, whole tiles go around in turns; the blocks of K of the row tiles left over are
shared out in equal runs (stream-K, https://arxiv.org/abs/2301.03598), so that none is idle in a last turn, unless that
leaves each too few. All tiles of tokens are computed alike, side by side: a token's outputs do not depend on its place.

    program 0 | row tile 0      | row tile 4 .....
    program 1 | row tile 1      | ..... row tile 5
    program 2 | row tile 2      | row tile 5 .....
    program 3 | row tile 3      | ..... row tile 6
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.linear_parts import prefetch_to_l2, silu_product


@triton.jit
def _sharer_of(block, sharers, blocks):
    """Whose run of `blocks` shared blocks holds `block`: sharer m's begins at m * blocks // sharers, and none is
    empty."""
    return ((block + 1) * sharers - 1) // blocks


@triton.jit
def place_of(tile, token_tiles, ROW_TILES: tl.constexpr, GROUP: tl.constexpr):
    """A tile's place among those of tokens and of rows. Neighbours are of GROUP tiles of tokens by a few tiles of rows,
    so that L2 holds what they share."""
    first_of_group = tile // (GROUP * ROW_TILES) * GROUP
    in_group = tl.minimum(GROUP, token_tiles - first_of_group)
    place = tile - first_of_group * ROW_TILES
    return first_of_group + place % in_group, place // in_group


@triton.jit
def _finish(
    sums,
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
    """Bias, and SiLU or residual, as `outputs_of`; then the store. sums: [TOKENS, ROWS] float32, of gate-up first all
    gate rows."""
    token = token_start + tl.arange(0, TOKENS)
    column = column_start + tl.arange(0, COLUMNS)
    exists = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
    places = out + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if GATE_UP:
        gate, up = tl.split(sums.reshape(TOKENS, 2, COLUMNS).permute(0, 2, 1))
        if HAS_BIAS:
            gate += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        y = silu_product(gate, up, DTYPE)
    else:
        y = sums
        if HAS_BIAS:
            y += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        if ADD:
            y = y.to(DTYPE).to(tl.float32) + tl.load(places, mask=exists, other=0.0).to(tl.float32)
    tl.store(places, y.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_tile_kernel(
    x,  # descriptor of [T, K] in blocks of [TOKENS, BLOCK_K]
    weight,  # descriptor of [HALVES, N / HALVES, K] in blocks of [HALVES, ROWS / HALVES, BLOCK_K]; of gate-up 2, else 1
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
    FINISH_TOKENS: tl.constexpr,  # whose parts are added at a time
    MIN_PART_BLOCKS: tl.constexpr,
    SHARED: tl.constexpr,  # programs share tiles; otherwise there is one for each tile
    HAS_BIAS: tl.constexpr,
    GATE_UP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without SHARED a program owns a tile. Otherwise its place in the grid says its tile of tokens, and which it is of
    the members to whom the row tiles are shared out. Of a tile's members the last to arrive adds the parts, in order:
    the result does not depend on who that is. A run of shared blocks is shorter than a tile, so a member has parts of
    two tiles at most.
    """
    COLUMNS: tl.constexpr = ROWS // 2 if GATE_UP else ROWS
    WIDTH: tl.constexpr = N // 2 if GATE_UP else N
    ROW_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = TOKENS * ROWS
    dtype = x.dtype
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if SHARED:
        token_tile = program % token_tiles
        member = program // token_tiles
        members = programs // token_tiles
        turns = ROW_TILES // members
        shared_tiles = ROW_TILES - turns * members
        shared_blocks = shared_tiles * BLOCKS
        # Few blocks are left for some members only: each has MIN_PART_BLOCKS at least, or a whole tile.
        sharers = tl.minimum(members, tl.maximum(shared_tiles, shared_blocks // MIN_PART_BLOCKS))
        begin = member * shared_blocks // tl.maximum(sharers, 1)
        end = tl.minimum((member + 1) * shared_blocks // tl.maximum(sharers, 1), shared_blocks)
        turns_in_all = turns + 2
    else:
        token_tile, member = place_of(program, token_tiles, ROW_TILES, GROUP)
        members = ROW_TILES
        turns = 1
        begin = 0
        end = 0
        turns_in_all = 1
    token_start = token_tile * TOKENS
    if PREFETCH_K > 0:
        row_tile = member if turns > 0 else begin // BLOCKS
        first_k = 0 if turns > 0 else begin % BLOCKS * BLOCK_K
        column = tl.minimum(row_tile * COLUMNS + tl.arange(0, COLUMNS), WIDTH - 1)
        prefetch_to_l2(weight_start + column.to(tl.int64)[:, None] * K, first_k, K, PREFETCH_K)
        if GATE_UP:
            prefetch_to_l2(weight_start + (WIDTH + column).to(tl.int64)[:, None] * K, first_k, K, PREFETCH_K)
    if PDL:
        tl.extra.cuda.gdc_wait()

    for turn in range(turns_in_all):
        row_tile = turn * members + member
        first = 0
        last = BLOCKS
        shared_tile = 0
        if turn >= turns:
            shared_tile = begin // BLOCKS + (turn - turns)
            row_tile = turns * members + shared_tile
            first = tl.maximum(begin - shared_tile * BLOCKS, 0)
            last = tl.minimum(end - shared_tile * BLOCKS, BLOCKS)
        if first < last:
            column_start = row_tile * COLUMNS
            sums = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
            for block in tl.range(first, last, num_stages=STAGES):
                values = x.load([token_start, block * BLOCK_K])
                w = weight.load([0, column_start, block * BLOCK_K]).reshape(ROWS, BLOCK_K)
                sums = tl.dot(values, w.T, sums, input_precision="ieee")
            if last - first == BLOCKS:
                _finish(
                    *(sums, bias, out, token_start, column_start, num_tokens),
                    *(TOKENS, WIDTH, COLUMNS, HAS_BIAS, GATE_UP, ADD, dtype),
                )
            elif SHARED:
                # The second half is of tiles that a program begins behind another.
                mine = partials + ((turn - turns) * programs + program) * PART
                place = tl.arange(0, TOKENS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
                tl.store(mine + place, sums)
                # All threads' partials are written before the one that counts says so.
                tl.debug_barrier()
                start = shared_tile * BLOCKS
                first_member = _sharer_of(start, sharers, shared_blocks)
                last_member = _sharer_of(start + BLOCKS - 1, sharers, shared_blocks)
                arrival = arrivals + shared_tile * token_tiles + token_tile
                if tl.atomic_add(arrival, 1, sem="acq_rel") == last_member - first_member:
                    tl.store(arrival, 0)
                    # From L2: this SM's L1 need not know what other SMs wrote. Of the parts only the first can be of a
                    # member that began in front of this tile.
                    begun_before = (first_member * shared_blocks // sharers < start).to(tl.int32)
                    for some in range(0, TOKENS, FINISH_TOKENS):
                        few = (some + tl.arange(0, FINISH_TOKENS))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
                        first_part = (begun_before * members + first_member) * token_tiles + token_tile
                        part = tl.load(partials + first_part * PART + few, cache_modifier=".cg")
                        whole = tl.zeros((FINISH_TOKENS, ROWS), dtype=tl.float32)
                        for other in range(first_member + 1, last_member + 1):
                            # Asked for before the one in front of it is added.
                            next_part = other * token_tiles + token_tile
                            following = tl.load(partials + next_part * PART + few, cache_modifier=".cg")
                            whole += part
                            part = following
                        whole += part
                        _finish(
                            *(whole, bias, out, token_start + some, column_start, num_tokens),
                            *(FINISH_TOKENS, WIDTH, COLUMNS, HAS_BIAS, GATE_UP, ADD, dtype),
                        )

"""What kernels rely on in how products are cut, for popular models' shapes and every number of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from support.layer_shapes import SHAPES, layers_of

from gpu_runner.kernels import linear
from gpu_runner.kernels.head import MIN_TOKENS
from gpu_runner.kernels.head_config import choose_head
from gpu_runner.kernels.linear_config import (
    MIN_PART_BLOCKS,
    MIN_PREFETCH_K,
    NUM_PROGRAMS,
    ROW_BYTES,
    DotConfig,
    FmaConfig,
    LinearConfig,
    TileConfig,
    choose,
    choose_heads,
    choose_invariant,
    largest_scratch,
    scratch_size,
)
from gpu_runner.kernels.linear_tile import _sharer_of
from gpu_runner.models.weights import linear_shapes

MAX_TOKENS = 2048
SHARED_BYTES = 227 << 10
"""Of an SM."""
MAX_BOX = 256
"""Of each dimension that the tensor memory accelerator copies at once."""
LANE_K = 8
"""Values of an `FmaConfig`'s row that a thread loads at once."""
GATE_UP = 2
"""The place among `linear_shapes`."""
sharer_of: Callable[[int, int, int], int] = _sharer_of.fn

parametrize_models = pytest.mark.parametrize("name", SHAPES)


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def tiles(size: int, tile: int) -> int:
    return -(-size // tile)


@parametrize_models
def test_every_product_is_cut_as_its_kernel_can_take_it(name: str) -> None:
    shapes = linear_shapes(layers_of(SHAPES[name]))
    values, arrivals = largest_scratch(shapes, MAX_TOKENS)
    for place, (n, k) in enumerate(shapes):
        for tokens in range(1, MAX_TOKENS + 1):
            config = choose(tokens, n, k)
            if config is None:
                continue
            own_values, own_arrivals = scratch_size(config, tokens, n)
            assert own_values <= values
            assert own_arrivals <= arrivals
            if isinstance(config, TileConfig):
                assert_tiles_can_run(config, tiles(tokens, config.tokens), linear._members(config, tokens, n, k), n, k)
            elif isinstance(config, DotConfig):
                assert_split_fits(config, tokens, n, k)
            if place == GATE_UP:
                assert config.rows % 2 == 0
            assert_can_run(config)


@parametrize_models
def test_products_that_do_not_depend_on_other_tokens_have_a_program_for_each_tile(name: str) -> None:
    for n, k in linear_shapes(layers_of(SHAPES[name])):
        for element_bytes in (2, 4):
            config = choose_invariant(n, k, element_bytes)
            assert config.programs == 0
            assert_tiles_can_run(config, 1, 0, n, k)
            assert_can_run(config)


@cache
def assert_can_run(config: LinearConfig) -> None:
    assert power_of_two(config.rows)
    assert power_of_two(config.block_k)
    if isinstance(config, FmaConfig):
        assert config.block_k >= LANE_K
        return
    assert config.block_k >= 16
    assert config.prefetch_k == 0 or (config.prefetch_k >= MIN_PREFETCH_K and power_of_two(config.prefetch_k))
    assert power_of_two(config.tokens)
    assert config.tokens >= 16
    assert config.stages * (config.rows + config.tokens) * config.block_k * 2 <= SHARED_BYTES


@cache
def assert_split_fits(config: DotConfig, tokens: int, n: int, k: int) -> None:
    """Each part has a block of K, and the parts of all tiles, and their arrivals, lie in what is allocated."""
    values, arrivals = scratch_size(config, tokens, n)
    tile_tokens = min(config.tokens, max(linear.MIN_DOT_TOKENS, 1 << (tokens - 1).bit_length()))
    blocks = tiles(k, config.block_k)
    part_blocks = tiles(blocks, config.split_k)
    assert (config.split_k - 1) * part_blocks < blocks <= config.split_k * part_blocks
    assert tokens * max(n, k) < 2**31  # places of x and of parts are counted in 32 bits
    if config.split_k > 1:
        assert part_blocks >= MIN_PART_BLOCKS
        assert config.split_k * tokens * n <= values < 2**31
        assert tiles(n, config.rows) * tiles(tokens, tile_tokens) <= arrivals


@cache
def assert_tiles_can_run(config: TileConfig, token_tiles: int, members: int, n: int, k: int) -> None:
    assert 2 * k % ROW_BYTES == 0
    assert max(config.rows, config.tokens) <= MAX_BOX
    row_tiles = tiles(n, config.rows)
    assert row_tiles == tiles(n // 2, config.rows // 2)  # of gate and up rows
    finish_tokens = min(config.tokens, linear.FINISH_VALUES * 32 * config.num_warps // config.rows)
    assert config.tokens % finish_tokens == 0
    assert power_of_two(finish_tokens)
    if not members:
        return
    assert token_tiles * members <= config.programs
    values, arrivals = scratch_size(config, token_tiles * config.tokens, n)
    shared_tiles = assert_runs_are_whole(row_tiles, tiles(k, config.block_k), members)
    assert shared_tiles * token_tiles <= arrivals
    assert 2 * token_tiles * members * config.tokens * config.rows <= values < 2**31


@cache
def assert_runs_are_whole(row_tiles: int, blocks: int, members: int) -> int:
    """Go the ways of `linear_tile_kernel`'s programs: of the row tiles behind whole turns, whose number it returns,
    each block is summed once, and who adds a tile's parts finds them where others put them."""
    shared_tiles = row_tiles % members
    shared_blocks = shared_tiles * blocks
    sharers = min(members, max(shared_tiles, shared_blocks // MIN_PART_BLOCKS))
    parts = defaultdict(list)
    for member in range(members):
        begin = member * shared_blocks // max(sharers, 1)
        end = min((member + 1) * shared_blocks // max(sharers, 1), shared_blocks)
        assert end <= (begin // blocks + 2) * blocks, "a run is of two tiles at most"
        for half in range(2):
            tile = begin // blocks + half
            first, last = max(begin - tile * blocks, 0), min(end - tile * blocks, blocks)
            if first < last:
                parts[tile].append((half, member, first, last))
    assert sorted(parts) == list(range(shared_tiles))
    for tile, own in parts.items():
        assert own[0][2] == 0
        assert own[-1][3] == blocks
        assert all(last == first for (*_, last), (_, _, first, _) in pairwise(own))
        if len(own) == 1:
            continue
        first_member = sharer_of(tile * blocks, sharers, shared_blocks)
        last_member = sharer_of((tile + 1) * blocks - 1, sharers, shared_blocks)
        assert [member for _, member, _, _ in own] == list(range(first_member, last_member + 1))
        begun_before = first_member * shared_blocks // sharers < tile * blocks
        assert [half for half, *_ in own] == [int(begun_before)] + [0] * (len(own) - 1)
    return shared_tiles


def test_runs_are_whole_whatever_is_shared_out() -> None:
    for members in (1, 2, 3, 5, 8, 16, 21, 25, 32, 42, 64, 127, 128):
        for row_tiles in {*range(1, 12), members - 1, members + 1, 2 * members + members // 2, 3 * members - 1} - {0}:
            for blocks in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 37):
                assert_runs_are_whole(row_tiles, blocks, members)


@parametrize_models
def test_heads_in_the_product_are_whole_in_each_tile(name: str) -> None:
    model = layers_of(SHAPES[name])
    shapes = linear_shapes(model)
    n, k = shapes[0]
    values, arrivals = largest_scratch(shapes, MAX_TOKENS)
    heads = model.num_heads + 2 * model.num_kv_heads
    for tokens in range(1, MAX_TOKENS + 1):
        config = choose_heads(tokens, n, k, model.head_dim)
        if config is not None:
            assert config.rows % model.head_dim == 0
            assert tiles(n, config.rows) == tiles(heads, config.rows // model.head_dim)
            assert 2 * k % ROW_BYTES == 0
            own_values, own_arrivals = scratch_size(config, tokens, n)
            assert own_values <= values
            assert own_arrivals <= arrivals
            assert_can_run(config)
            assert max(config.rows, config.tokens) <= MAX_BOX


@parametrize_models
def test_heads_whose_tokens_are_chosen_at_once_have_a_whole_tile_and_room(name: str) -> None:
    shape = SHAPES[name]
    for rows in range(1, MAX_TOKENS + 1):
        config = choose_head(rows, shape.vocab, shape.hidden, torch.bfloat16)
        if config is not None:
            assert config.ids <= shape.vocab
            assert tiles(rows, config.tokens) <= tiles(rows, MIN_TOKENS)
            assert tiles(rows, config.tokens) <= NUM_PROGRAMS
            assert max(config.ids, config.tokens) <= MAX_BOX
            assert config.stages * (config.ids + config.tokens) * config.block_k * 2 <= SHARED_BYTES

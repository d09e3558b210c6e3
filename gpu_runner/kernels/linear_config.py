"""How a linear layer is cut into programs, by its number of tokens and shape, and where cuBLAS is faster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

NUM_PROGRAMS = 132
"""Programs that fill the device: an H200's SMs."""
MIN_PREFETCH_K = 64
"""Weights of one request to L2."""
ROW_BYTES = 16
"""The tensor memory accelerator takes rows of a multiple of these."""
MIN_PART_BLOCKS = 4
"""Blocks of K below which programs that share a tile would spend their time on meeting."""
ANY: Final = 1 << 62
"""A bound that every size is below."""
MIN_HEAD_ROWS = 32768
"""Rows from which a weight counts as a head: its programs are many to each SM."""


@dataclass(frozen=True, slots=True)
class FmaConfig:
    """See `linear_fma`. A program has `rows * block_k * depth` weights on their way, all before the PDL wait."""

    rows: int  # of W in a program's tile, gate and up rows counted each; a power of two
    block_k: int  # a power of two
    depth: int  # chunks of block_k ahead
    num_warps: int


@dataclass(frozen=True, slots=True)
class DotConfig:
    """See `linear_dot`. A program has `rows * block_k * (stages - 1)` weights on their way."""

    rows: int  # of W in a program's tile, gate and up rows counted each; a power of two
    block_k: int  # a power of two, at least 16
    stages: int  # of shared memory
    num_warps: int
    split_k: int = 1  # programs that share a tile
    prefetch_k: int = 0  # weights of each row sent for, to L2, before the PDL wait: a power of two from 64, or 0
    weight_first: bool = False
    tokens: int = 64  # of a program's tile at most; a power of two from 16


@dataclass(frozen=True, slots=True)
class TileConfig:
    """See `linear_tile`. For rows of a multiple of ROW_BYTES."""

    tokens: int  # of a tile; a power of two from 16
    rows: int  # of W in a tile, gate and up rows counted each; a power of two from 32
    block_k: int
    stages: int  # of shared memory
    num_warps: int
    group: int  # tiles of tokens that are computed together, row tile after row tile
    programs: int = 0  # that share all tiles, at most; one for each tile if these are too few for the tiles of tokens
    prefetch_k: int = 0  # weights of each row sent for, to L2, before the PDL wait: a power of two from 64, or 0


LinearConfig = FmaConfig | DotConfig | TileConfig

_DEEP = DotConfig(rows=64, block_k=128, stages=6, num_warps=4, prefetch_k=512, weight_first=True)
_PAIRED = replace(_DEEP, stages=4)  # two programs fit on an SM
_NARROW = DotConfig(rows=32, block_k=128, stages=4, num_warps=4, prefetch_k=512)
_NARROW_DEEP = replace(_NARROW, stages=8)
_WIDE = DotConfig(rows=128, block_k=128, stages=4, num_warps=8, prefetch_k=256, weight_first=True)
_LARGE = TileConfig(tokens=128, rows=256, block_k=64, stages=4, num_warps=8, group=16)
_SHALLOW_TILE = TileConfig(tokens=128, rows=128, block_k=64, stages=3, num_warps=4, group=16)
# Few programs to an SM, that share all tiles: 128, into which K divides evenly.
_SHARED_DEEP = TileConfig(
    tokens=64, rows=32, block_k=128, stages=8, num_warps=4, group=16, programs=128, prefetch_k=512
)
_SHARED = replace(_SHARED_DEEP, rows=128, stages=4, prefetch_k=256)
_SHARED_WIDE = replace(_SHARED, tokens=128, block_k=64, stages=6, num_warps=8)
_SMALL = DotConfig(rows=16, block_k=64, stages=4, num_warps=2, split_k=2, prefetch_k=512)

# One program for each tile, whatever the tokens: narrower where rows are few, so that there are more of them.
_ALONE_NARROW = replace(_SHARED_DEEP, programs=0)
_ALONE = replace(_SHARED_DEEP, rows=64, stages=6, programs=0)
_ALONE_WIDE = replace(_SHARED_WIDE, programs=0)
_ALONE_FLOAT32 = TileConfig(tokens=32, rows=32, block_k=64, stages=2, num_warps=4, group=16)

# From the output of `scripts/bench_kernels/linear.py` for Qwen3-0.6B and Llama-3.1-8B; K below 1024 is SmolLM2's. The
# first row that holds the shape counts; None for cuBLAS. A row's block_k (of multiply-adds), split_k and prefetch_k are
# the most that the layer may get.
CUTS: tuple[tuple[int, int, int, LinearConfig | None], ...] = (
    # Tokens, k and n at most.
    # One or two tokens: multiply-adds, whose first weights are asked for before the wait. Of a small layer all are, and
    # so few threads hold them that three or four kernels find room at a time.
    (2, 1024, 4096, FmaConfig(rows=4, block_k=1024, depth=1, num_warps=2)),
    (2, 1024, MIN_HEAD_ROWS - 1, FmaConfig(rows=4, block_k=1024, depth=1, num_warps=1)),
    (1, 1024, ANY, FmaConfig(rows=4, block_k=1024, depth=1, num_warps=4)),
    (2, 1024, ANY, FmaConfig(rows=8, block_k=1024, depth=1, num_warps=2)),
    (1, 3072, 2048, FmaConfig(rows=4, block_k=1024, depth=3, num_warps=4)),
    (2, 2048, 2048, FmaConfig(rows=4, block_k=1024, depth=2, num_warps=4)),
    (2, 3072, 2048, FmaConfig(rows=2, block_k=1024, depth=3, num_warps=8)),
    (1, 4096, MIN_HEAD_ROWS - 1, FmaConfig(rows=8, block_k=1024, depth=2, num_warps=4)),
    (2, 4096, 8192, FmaConfig(rows=8, block_k=1024, depth=2, num_warps=4)),
    (2, 4096, ANY, FmaConfig(rows=4, block_k=1024, depth=4, num_warps=4)),
    (1, ANY, ANY, FmaConfig(rows=4, block_k=2048, depth=4, num_warps=8)),
    (2, ANY, ANY, FmaConfig(rows=4, block_k=1024, depth=4, num_warps=4)),
    # Small layers have too few rows for warpgroups.
    (32, 1023, 1024, _SMALL),
    (32, 1023, ANY, replace(_SMALL, rows=32, num_warps=4)),
    (ANY, 1023, ANY, None),
    # Tensor cores: deeper while each SM has one program, K split where there would be far fewer.
    (32, 3072, 2048, replace(_DEEP, split_k=4)),
    (32, 1024, 4096, _DEEP),
    (32, 1024, MIN_HEAD_ROWS - 1, _PAIRED),
    (32, ANY, 4096, replace(_DEEP, split_k=2)),
    (32, 4096, 8192, _DEEP),
    (32, ANY, ANY, _PAIRED),
    # From 33 on the tokens' blocks are as large as the weights', and narrow tiles fill the SMs with fewer parts. Those
    # of small layers are shallow as well, so that the next kernel's find room beside them.
    (64, 1024, 4096, _NARROW),
    (64, 1024, MIN_HEAD_ROWS - 1, _PAIRED),
    (64, 2048, 2048, replace(_NARROW, stages=6, split_k=2, prefetch_k=1024)),
    (64, 3072, 2048, DotConfig(rows=16, block_k=128, stages=6, num_warps=4, split_k=2, prefetch_k=1024)),
    (64, 2048, 4096, None),
    (64, 4096, 4096, _NARROW_DEEP),
    (64, 4096, 8192, _DEEP),
    (64, ANY, 8192, _NARROW_DEEP),
    (64, ANY, ANY, _WIDE),
    # From 65 on the tokens themselves become traffic, and tiles are wide enough for cuBLAS's kernels. Ours come in
    # where their tiles, shared or not, leave no SM idle, at one number of tokens and hardly at the next, and where
    # cuBLAS takes an unlucky tile.
    (128, 1024, 4096, replace(_NARROW, tokens=128)),
    (128, 1024, MIN_HEAD_ROWS - 1, replace(_PAIRED, tokens=128)),
    (128, 3072, 2048, replace(_PAIRED, split_k=4)),
    (128, 2048, ANY, None),
    (112, 4096, 4096, _DEEP),
    (128, 4096, 8192, None),
    (96, 4096, MIN_HEAD_ROWS - 1, _LARGE),
    (128, 4096, MIN_HEAD_ROWS - 1, _SHALLOW_TILE),
    (160, ANY, ANY, None),
    (224, 3072, ANY, None),
    (224, 4096, 4096, _SHARED),
    (224, ANY, ANY, None),
    (256, 1024, 4096, _SHARED),
    (256, 3072, 2048, _SHARED_DEEP),
    (256, 2048, ANY, None),
    (256, 4096, 8192, None),
    (256, 4096, MIN_HEAD_ROWS - 1, _SHARED_WIDE),
    (384, ANY, ANY, None),
    # Gate and up rows together, whose product is large: its SiLU is worth more than what a tile loses to cuBLAS.
    (ANY, 1024, 4096, None),
    (ANY, 1024, MIN_HEAD_ROWS - 1, _SHALLOW_TILE),
    (448, 2048, ANY, None),
    (448, 4096, 8192, None),
    (448, 4096, MIN_HEAD_ROWS - 1, replace(_LARGE, programs=128, prefetch_k=256)),
    (768, ANY, ANY, None),
    (896, 2048, ANY, None),
    (896, 4096, 8192, None),
    (896, 4096, MIN_HEAD_ROWS - 1, _LARGE),
    (ANY, ANY, ANY, None),
)

_HEADS = TileConfig(tokens=64, rows=128, block_k=128, stages=4, num_warps=4, group=16, prefetch_k=256)
_HEADS_WIDE = TileConfig(tokens=128, rows=128, block_k=64, stages=6, num_warps=8, group=16, prefetch_k=256)
_HEADS_SHALLOW = replace(_SHALLOW_TILE, num_warps=8)

# Read as CUTS are, and of the same two models; `scripts/bench_kernels/linear_heads.py` times what is here and more.
# None: the product and its heads are faster one after the other.
HEAD_CUTS: tuple[tuple[int, int, int, TileConfig | None], ...] = (
    (64, ANY, ANY, None),
    (ANY, 1023, ANY, None),
    (256, 1024, 4096, _HEADS),
    (512, 1024, 4096, _HEADS_WIDE),
    # Tiles that are many fill the SMs in turns, of which the last may leave most of them idle.
    (1024, 1024, 4096, _HEADS_SHALLOW),
    (1280, 1024, 4096, None),
    (ANY, 1024, 4096, _HEADS_SHALLOW),
    (192, 4096, 6144, None),
    (224, 4096, 6144, _HEADS_WIDE),
    (512, 4096, 6144, None),
    (640, 4096, 6144, _LARGE),
    (1024, 4096, 6144, None),
    (1280, 4096, 6144, _LARGE),
    (1792, 4096, 6144, None),
    (2048, 4096, 6144, _LARGE),
    (3072, 4096, 6144, None),
    (ANY, 4096, 6144, _LARGE),
    (ANY, ANY, ANY, None),
)


def choose(num_tokens: int, n: int, k: int) -> LinearConfig | None:
    """How to compute [num_tokens, k] @ [n, k]^T; n counts gate and up rows. None: with cuBLAS.

    An FmaConfig takes a norm in front of the product too, a DotConfig one that lacks its root; otherwise a norm kernel
    must run before.
    """
    cut = next(cut for tokens, max_k, max_n, cut in CUTS if num_tokens <= tokens and k <= max_k and n <= max_n)
    if isinstance(cut, FmaConfig):
        return replace(cut, block_k=min(cut.block_k, _power_of_two(k)))
    if isinstance(cut, TileConfig):
        return None if 2 * k % ROW_BYTES else cut  # of two bytes each
    return cut and fitted(cut, n, k)


def choose_heads(num_tokens: int, n: int, k: int, head_dim: int) -> TileConfig | None:
    """How to compute [num_tokens, k] @ [n, k]^T, whose rows are heads, by `linear_heads`. None: by `choose`, and what
    follows by kernels of its own."""
    cut = next(cut for tokens, max_k, max_n, cut in HEAD_CUTS if num_tokens <= tokens and k <= max_k and n <= max_n)
    return None if cut is None or 2 * k % ROW_BYTES or cut.rows % head_dim else cut


def choose_invariant(n: int, k: int, element_bytes: int) -> TileConfig:
    """How to compute x @ [n, k]^T so that a row of the result depends on that row of x alone, not on how many there
    are: one tile and one order of sums for any number, and so one kernel. n counts gate and up rows.

    Raises ValueError for rows that the tensor memory accelerator does not take.
    """
    if k * element_bytes % ROW_BYTES:
        raise ValueError(f"rows of {k} values of {element_bytes} bytes are no multiple of {ROW_BYTES} bytes")
    if element_bytes > 2:
        return _ALONE_FLOAT32
    if n <= 2048:
        return _ALONE_NARROW
    return _ALONE if n <= 8192 else _ALONE_WIDE


def scratch_size(config: LinearConfig, tokens: int, n: int) -> tuple[int, int]:
    """The values and the tiles of a `linear.SplitScratch` that hold the parts of up to `tokens` tokens by n rows."""
    if isinstance(config, DotConfig) and config.split_k > 1:
        return config.split_k * tokens * n, -(-n // config.rows) * -(-tokens // config.tokens)
    if isinstance(config, TileConfig):
        return 2 * config.programs * config.tokens * config.rows, config.programs
    return 0, 0


def largest_scratch(shapes: Iterable[tuple[int, int]], max_tokens: int) -> tuple[int, int]:
    """`scratch_size` that all suffice with that `choose` names for weights [n, k] and up to max_tokens tokens."""
    sizes = [(0, 0)]
    # Between two bounds the choice is one, of which the most tokens need the most.
    bounds = {min(tokens, max_tokens) for tokens, *_ in CUTS}
    for n, k in shapes:
        for tokens in bounds:
            config = choose(tokens, n, k)
            if config is not None:
                sizes.append(scratch_size(config, tokens, n))
    return max(values for values, _ in sizes), max(tiles for _, tiles in sizes)


def fitted(config: DotConfig, n: int, k: int) -> DotConfig:
    """The cut with K split into at most config.split_k parts: no more than make two programs for each SM, or than leave
    each part some blocks. No more is prefetched than a part has."""
    tiles = -(-n // config.rows)
    most = min(2 * NUM_PROGRAMS // tiles, k // (MIN_PART_BLOCKS * config.block_k))
    split_k = max(1, min(config.split_k, most))
    prefetch_k = min(config.prefetch_k, _power_of_two(-(-k // split_k)))
    return replace(config, split_k=split_k, prefetch_k=prefetch_k if prefetch_k >= MIN_PREFETCH_K else 0)


def _power_of_two(value: int) -> int:
    """The least that is not below `value`."""
    return 1 << (value - 1).bit_length()

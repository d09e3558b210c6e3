"""How a linear layer of few tokens is cut into programs, by its shape, and from how many tokens on cuBLAS is faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

NUM_PROGRAMS = 132
"""Programs that fill the device: an H200's SMs."""
MIN_PREFETCH_K = 64
"""Weights of one request to L2."""
ANY: Final = 1 << 62
"""A bound that every size is below."""


@dataclass(frozen=True, slots=True)
class FmaConfig:
    """See `linear_fma`. A program has `rows * block_k * depth` weights on their way, all before the PDL wait."""

    rows: int  # of W in a program's tile, gate and up rows counted each; a power of two
    block_k: int  # a power of two
    depth: int  # chunks of block_k ahead
    num_warps: int


@dataclass(frozen=True, slots=True)
class DotConfig:
    """See `linear_dot`. A program has `rows * block_k * (depth or stages - 1)` weights on their way."""

    rows: int  # of W in a program's tile, gate and up rows counted each; a power of two
    block_k: int  # a power of two, at least 16
    num_warps: int
    stages: int = 1  # of shared memory; unused with a depth
    depth: int = 0  # blocks of block_k in registers, asked for before the PDL wait; 0: none
    split_k: int = 1
    prefetch_k: int = 0  # weights of each row sent for, to L2, before the PDL wait: a power of two from 64, or 0
    weight_first: bool = False
    tokens: int = 64  # of a program's tile at most; a power of two from 16


LinearConfig = FmaConfig | DotConfig

# Tune these from the output of `scripts/bench_kernels/linear.py`.
MAX_FMA_TOKENS = 2
"""Above, multiply-adds outside the tensor cores cost more than the weights' way from memory, and each program's own
norm of all tokens more than a norm kernel."""
MAX_FMA_HEAD_TOKENS = 1
MIN_HEAD_ROWS = 32768
"""Rows from which a weight counts as a head: with many programs for each SM, multiply-adds have no waits to hide in."""
MAX_DOT_TOKENS = 64
"""Above, cuBLAS is faster: the tokens themselves become traffic, and tiles are wide enough for its kernels."""

FMA_CUTS: tuple[tuple[int, int, FmaConfig], ...] = (
    # k at most, n at most: few rows rather than idle SMs, and 16 KiB on their way to each program.
    (1024, 2048, FmaConfig(rows=4, block_k=1024, depth=1, num_warps=4)),
    (1024, 4096, FmaConfig(rows=8, block_k=1024, depth=1, num_warps=4)),
    (1024, ANY, FmaConfig(rows=4, block_k=1024, depth=1, num_warps=2)),
    (2048, ANY, FmaConfig(rows=4, block_k=1024, depth=2, num_warps=4)),
    (3072, ANY, FmaConfig(rows=4, block_k=2048, depth=2, num_warps=8)),
    (4096, 8192, FmaConfig(rows=8, block_k=1024, depth=2, num_warps=4)),
    (4096, ANY, FmaConfig(rows=4, block_k=1024, depth=4, num_warps=4)),
    (ANY, ANY, FmaConfig(rows=4, block_k=2048, depth=4, num_warps=8)),
)
_PIPELINED = DotConfig(rows=64, block_k=128, stages=4, num_warps=4, prefetch_k=512, weight_first=True)
_HELD = DotConfig(rows=64, block_k=512, depth=1, num_warps=8, weight_first=True)
_NARROW = DotConfig(rows=32, block_k=128, stages=4, num_warps=4, prefetch_k=512)
_WIDE = DotConfig(rows=128, block_k=64, stages=5, num_warps=8, prefetch_k=256, weight_first=True)
DOT_CUTS: tuple[tuple[int, int, int, DotConfig | None], ...] = (
    # Tokens at most, k at most, n at most, None for cuBLAS; block_k, split_k and prefetch_k are fitted to the shape.
    # Small layers have too few rows for warpgroups.
    (32, 1023, 1024, DotConfig(rows=16, block_k=64, stages=4, num_warps=2, prefetch_k=512)),
    (32, 1023, ANY, DotConfig(rows=32, block_k=64, stages=4, num_warps=4, prefetch_k=512)),
    (MAX_DOT_TOKENS, 1023, ANY, None),
    (16, 3072, 2048, _HELD),
    (32, 3072, 2048, replace(_HELD, rows=32, num_warps=4, weight_first=False)),
    (MAX_DOT_TOKENS, 3072, 2048, _PIPELINED),
    (32, 1024, 4096, _PIPELINED),
    (32, 1024, MIN_HEAD_ROWS - 1, None),
    (MAX_DOT_TOKENS, 1024, 4096, None),
    (MAX_DOT_TOKENS, 1024, MIN_HEAD_ROWS - 1, _NARROW),
    (32, ANY, ANY, _PIPELINED),
    (MAX_DOT_TOKENS, ANY, 8192, _NARROW),
    (MAX_DOT_TOKENS, ANY, ANY, _WIDE),
)


def choose(num_tokens: int, n: int, k: int) -> LinearConfig | None:
    """How to compute [num_tokens, k] @ [n, k]^T; n counts gate and up rows. None: with cuBLAS.

    An FmaConfig takes a norm in front of the product too; for the others a norm kernel must run before.
    """
    if num_tokens <= (MAX_FMA_HEAD_TOKENS if n >= MIN_HEAD_ROWS else MAX_FMA_TOKENS):
        fma = next(cut for max_k, max_n, cut in FMA_CUTS if k <= max_k and n <= max_n)
        return replace(fma, block_k=min(fma.block_k, _power_of_two(k)))
    if num_tokens > MAX_DOT_TOKENS:
        return None
    dot = next(cut for tokens, max_k, max_n, cut in DOT_CUTS if num_tokens <= tokens and k <= max_k and n <= max_n)
    return dot and fitted(dot, n, k)


def fitted(config: DotConfig, n: int, k: int, *, token_tiles: int = 1) -> DotConfig:
    """The cut with K split: where weights are in registers, into parts that those hold; else so that programs about
    fill the device once or twice, each part four blocks or more. No more is prefetched than a part has."""
    tiles = token_tiles * -(-n // config.rows)
    split_k = 1
    if config.depth:
        split_k = -(-k // (config.depth * config.block_k))
    else:
        while tiles * split_k <= NUM_PROGRAMS and k >= split_k * 2 * 4 * config.block_k:
            split_k *= 2
    prefetch_k = min(config.prefetch_k, _power_of_two(-(-k // split_k)))
    return replace(config, split_k=split_k, prefetch_k=prefetch_k if prefetch_k >= MIN_PREFETCH_K else 0)


def _power_of_two(value: int) -> int:
    """The least that is not below `value`."""
    return 1 << (value - 1).bit_length()

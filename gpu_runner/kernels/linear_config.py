"""How a skinny linear layer is cut into programs, by its shape, and from how many tokens on cuBLAS is faster."""

from __future__ import annotations

from dataclasses import dataclass

# Tune these from the output of `scripts/bench_kernels/linear.py`.
MAX_FMA_TOKENS = 4
"""Above, multiply-adds outside the tensor cores cost more than the weights' way from memory."""
MAX_TOKENS = 32
"""Above, cuBLAS is faster: the tokens themselves become traffic, and tiles are wide enough for its kernels."""
MAX_FUSED_NORM_VALUES = 32 * 1024
"""T * K above which each program's own norm of all tokens costs more than a norm kernel."""
NUM_PROGRAMS = 132
"""Programs that fill the device: an H200's SMs."""


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
    stages: int
    num_warps: int
    split_k: int = 1
    prefetch_k: int = 0  # weights of each row sent for, to L2, before the PDL wait: a power of two from 64, or 0
    weight_first: bool = False


LinearConfig = FmaConfig | DotConfig


def choose(num_tokens: int, n: int, k: int, *, norm: bool = False) -> LinearConfig | None:
    """How to compute [num_tokens, k] @ [n, k]^T; n counts gate and up rows. None: with cuBLAS, and an own norm kernel.

    norm: whether the norm is to be computed by the same kernel.
    """
    if num_tokens <= MAX_FMA_TOKENS:
        return _fma_config(n, k)
    if num_tokens > MAX_TOKENS or (norm and num_tokens * k > MAX_FUSED_NORM_VALUES):
        return None
    return _dot_config(n, k)


def _fma_config(n: int, k: int) -> FmaConfig:
    block_k = min(_power_of_two(k), 1024)
    chunks = -(-k // block_k)
    # 16 KiB in flight for each program, of which an SM holds four or more; few rows rather than idle SMs.
    rows = 8 if chunks == 1 and n >= 8 * 2 * NUM_PROGRAMS else 4
    return FmaConfig(rows=rows, block_k=block_k, depth=min(chunks, 4), num_warps=4)


def split_for(n: int, k: int, *, rows: int, block_k: int) -> int:
    """Parts of K with which the programs about fill the device once or twice, each part four blocks or more."""
    tiles = -(-n // rows)
    split_k = 1
    while tiles * split_k <= NUM_PROGRAMS and k >= split_k * 2 * 4 * block_k:
        split_k *= 2
    return split_k


def _dot_config(n: int, k: int) -> DotConfig:
    rows = 32 if n >= 32 * NUM_PROGRAMS // 2 else 16
    block_k = 128 if k >= 1024 else 64
    split_k = split_for(n, k, rows=rows, block_k=block_k)
    return DotConfig(
        rows=rows,
        block_k=block_k,
        stages=4,
        num_warps=rows // 8,
        split_k=split_k,
        # A program's whole part of short rows; of long ones, what the wait for the kernel before leaves time for.
        prefetch_k=min(_power_of_two(-(-k // split_k)), 1024),
    )


def _power_of_two(value: int) -> int:
    """The least that is not below `value`."""
    return 1 << (value - 1).bit_length()

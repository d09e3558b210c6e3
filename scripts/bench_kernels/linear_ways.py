"""The ways to compute a linear that `linear.py` tries, by shape and number of tokens; how large their programs are, and
which are one compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from linear_together import Size

from gpu_runner.kernels.decode_way import DecodeWay
from gpu_runner.kernels.linear import MIN_DOT_TOKENS, MIN_PARTS, row_tiles
from gpu_runner.kernels.linear_config import (
    MIN_HEAD_ROWS,
    NUM_PROGRAMS,
    DotConfig,
    FmaConfig,
    LinearConfig,
    TileConfig,
    choose,
    fitted,
)

CUBLAS = "cuBLAS"
Way = LinearConfig | str
LayerWay = Way | DecodeWay

MAX_SHARED_BYTES = 227 << 10
MAX_SMALL_WEIGHTS, MAX_SMALL_PROGRAMS = 1 << 24, 4096
MAX_DOT_TOKENS = 128
PREFILL_TOKENS = 2048
ACROSS_NORM = {"qkv": "down", "o": "gate_up", "gate_up": "o", "down": "qkv"}
"""Of a layer's linear, that on the other side of its norm."""


@dataclass(frozen=True)
class Linear:
    name: str  # qkv, o, gate_up, down or head
    n: int
    k: int

    @property
    def normed(self) -> bool:
        return self.name in ("qkv", "gate_up")

    @property
    def is_head(self) -> bool:
        return self.n >= MIN_HEAD_ROWS

    @property
    def is_small(self) -> bool:
        """Of so few weights that the way from kernel to kernel counts beside theirs from memory."""
        return self.n * self.k <= MAX_SMALL_WEIGHTS


def chosen_way(linear: Linear, tokens: int) -> Way:
    return choose(tokens, linear.n, linear.k) or CUBLAS


def ways_of(linear: Linear, tokens: int, *, together: bool) -> list[Way]:
    """What `choose` names first. together: those too that take so little of a multiprocessor that they pay only beside
    others that do."""
    ways: list[Way] = [chosen_way(linear, tokens), CUBLAS]
    if tokens <= 4:
        ways += _fma_ways(linear, small=together and linear.is_small)
    if 4 <= tokens <= MAX_DOT_TOKENS:
        ways += _dot_ways(linear, tokens, small=together)
    if tokens >= 33 and not linear.is_head:
        ways += _tile_ways(linear, tokens)
    if tokens >= PREFILL_TOKENS and linear.name == "gate_up":
        ways += _prefill_ways()
    return list(dict.fromkeys(ways))


def _fma_ways(linear: Linear, *, small: bool) -> Iterator[FmaConfig]:
    """8 to 64 KiB of weights on their way to a program, 32 to 256 bytes of a thread, a program for each SM. Small: from
    2 KiB on, but then of few threads and not in too many programs."""
    fewest_warps = 1 if small else 2 if linear.k <= 1024 else 4
    for rows, num_warps, (block_k, depth) in product(
        (1, 2, 4, 8, 16), (1, 2, 4, 8), ((1024, 1), (1024, 2), (1024, 3), (1024, 4), (2048, 1), (2048, 2), (2048, 4))
    ):
        held, programs = rows * block_k * depth * 2, linear.n // rows
        per_thread = held // (32 * num_warps)
        reaches = block_k * (depth - 1) < linear.k and block_k < 2 * linear.k
        shallow = linear.k > 1024 and block_k * depth < min(linear.k, 4096) // 2
        if held < 8192 and (not small or per_thread < 64 or programs > MAX_SMALL_PROGRAMS):
            continue
        if num_warps < fewest_warps or (rows == 1 and linear.name == "gate_up"):
            continue
        if held <= 65536 and 32 <= per_thread <= 256 and reaches and not shallow and programs >= 128:
            yield FmaConfig(rows, block_k, depth, num_warps)


def _dot_ways(linear: Linear, tokens: int, *, small: bool) -> Iterator[DotConfig]:
    cuts: list[DotConfig] = [
        DotConfig(rows=64, block_k=128, stages=4, num_warps=4, prefetch_k=512, weight_first=True),
        DotConfig(rows=64, block_k=128, stages=6, num_warps=4, prefetch_k=512, weight_first=True),
        *(DotConfig(rows=32, block_k=128, stages=stages, num_warps=4, prefetch_k=512) for stages in (4, 8)),
        DotConfig(rows=128, block_k=64, stages=5, num_warps=8, prefetch_k=256, weight_first=True),
        DotConfig(rows=128, block_k=128, stages=4, num_warps=8, prefetch_k=256, weight_first=True),
        DotConfig(rows=256, block_k=64, stages=5, num_warps=8, prefetch_k=256, weight_first=True),
    ]
    if small and linear.k >= 1024 and not linear.is_head:
        cuts += _small_cuts(linear)
    if linear.k < 1024:
        cuts += [
            DotConfig(rows=16, block_k=64, stages=4, num_warps=2, prefetch_k=512),
            DotConfig(rows=32, block_k=64, stages=4, num_warps=4, prefetch_k=512),
        ]
    if tokens > 64:
        deep, wide = cuts[0], cuts[4]
        cuts = [deep, cuts[1], replace(deep, tokens=128), replace(wide, tokens=128)]
    for cut in cuts:
        if size_of(cut, tokens).held_bytes > MAX_SHARED_BYTES:
            continue
        for split_k in (1, 2, 4, 8):
            config = fitted(replace(cut, split_k=split_k), linear.n, linear.k)
            if config.split_k == split_k and not (linear.normed and split_k > 2):
                yield config


def _small_cuts(linear: Linear) -> list[DotConfig]:
    """That leave room on a multiprocessor for the next kernels', and ask L2 for more meanwhile."""
    blocks = ((64, 4), (128, 3), (128, 4), (128, 6)) if linear.normed else ((64, 8), (128, 4), (128, 6))
    all_rows, prefetch_k = ((16, 32, 64), 1024) if linear.is_small else ((32, 64), 256)
    return [
        DotConfig(rows, block_k, stages, num_warps=4, prefetch_k=prefetch_k, weight_first=rows >= 64)
        for rows, (block_k, stages) in product(all_rows, blocks)
    ]


def _tile_ways(linear: Linear, tokens: int) -> Iterator[TileConfig]:
    """A program for each tile, or one or two to an SM that share all tiles, 128 of them where K then divides evenly."""
    for tile_tokens, rows, block_k, stages, num_warps, all_programs in (
        *((64, 32, 128, 8, 4, (128,)), (64, 64, 128, 6, 4, (128, 132)), (64, 64, 128, 3, 4, (264,))),
        *((64, 128, 128, 4, 4, (128, 132)), (64, 128, 64, 4, 4, (264,)), (128, 64, 128, 4, 4, (128,))),
        (128, 64, 64, 4, 4, (264,)),
        *((128, 128, 64, 3, 4, (0, 264)), (128, 128, 64, 6, 8, (128, 132)), (128, 256, 64, 3, 8, (0,))),
        *((128, 256, 64, 4, 8, (0, 128, 132)), (256, 128, 64, 4, 8, (0, 128, 132))),
    ):
        tiles = -(-linear.n // rows) * -(-tokens // tile_tokens)
        # Not so small that an SM gets many where it could get larger ones, not so large that most SMs share one.
        small, few_large = tile_tokens * rows < 8192, linear.n * tokens < NUM_PROGRAMS * 8192
        if tile_tokens > _padded(tokens) or tiles * 9 < NUM_PROGRAMS or (small and not few_large):
            continue
        prefetch_k = 512 if tile_tokens == 64 and rows <= 64 else 256
        for programs in all_programs:
            if programs and -(-tokens // tile_tokens) <= programs and tiles <= 8 * programs:
                yield TileConfig(tile_tokens, rows, block_k, stages, num_warps, 16, programs, prefetch_k)
            elif not programs and tiles > NUM_PROGRAMS // 2:
                yield TileConfig(tile_tokens, rows, block_k, stages, num_warps, 16)


def _prefill_ways() -> list[TileConfig]:
    """Of a gate-up product of thousands of tokens."""
    large = TileConfig(128, 256, 64, 4, 8, group=8)
    wide, shallow = replace(large, tokens=256, rows=128), replace(large, rows=128, stages=3, num_warps=4, group=16)
    two_ahead = replace(large, stages=3)
    return [
        *(replace(cut, group=group) for cut in (large, two_ahead, wide) for group in (8, 16)),
        *(shallow, replace(two_ahead, group=32)),
        *(replace(large, programs=NUM_PROGRAMS), replace(shallow, num_warps=8)),
    ]


def size_of(way: LayerWay, tokens: int) -> Size:
    """Of one of its programs. Attention finds room beside any linear, and cuBLAS leaves none."""
    if isinstance(way, DecodeWay):
        return Size(0, 0)
    if isinstance(way, str):
        return Size(8, MAX_SHARED_BYTES)
    if isinstance(way, FmaConfig):
        return Size(way.num_warps, 2 * way.rows * way.block_k * way.depth)
    tile_tokens = min(way.tokens, _padded(tokens)) if isinstance(way, DotConfig) else way.tokens
    return Size(way.num_warps, 2 * (way.rows + tile_tokens) * way.block_k * way.stages)


def compile_key(linear: Linear, tokens: int, way: LinearConfig, across: Way) -> Any:
    """Equal for what is one compiled kernel. across: the way of the linear on the other side of the norm."""
    op = linear.name if linear.normed or linear.is_head else "add"
    if isinstance(way, FmaConfig):
        return op, linear.n, linear.k, way, tokens
    if isinstance(way, TileConfig):
        return op, linear.n, linear.k, replace(way, programs=min(way.programs, 1))
    folded = room_for_parts(linear, across) if linear.normed else isinstance(across, DotConfig)
    return op, linear.n, linear.k, way, min(way.tokens, _padded(tokens)), tokens <= way.tokens, folded


def room_for_parts(linear: Linear, writer: Way) -> int:
    """The constant PARTS of a linear that reads a norm; 0 where that has its root. writer: the way of the linear in
    front of the norm."""
    if not isinstance(writer, DotConfig):
        return 0
    return max(MIN_PARTS, 1 << (row_tiles(writer, linear.k) - 1).bit_length())


def _padded(tokens: int) -> int:
    return max(MIN_DOT_TOKENS, 1 << (tokens - 1).bit_length())


def short(way: LayerWay) -> str:
    if isinstance(way, str):
        return way
    if isinstance(way, DecodeWay):
        kernel = f"fused w{way.fused_warps}" if way.fused_warps else "streamed" if way.streams else "pair"
        return f"{kernel} {way.cut.programs}/{way.cut.split_step} at once {way.cut.at_once}"
    name = f"r{way.rows} k{way.block_k}"
    if isinstance(way, FmaConfig):
        return f"fma {name} d{way.depth} w{way.num_warps}"
    if isinstance(way, TileConfig):
        shared = f" p{way.programs} pf{way.prefetch_k}" if way.programs else ""
        return f"tile t{way.tokens} {name} s{way.stages} w{way.num_warps} g{way.group}{shared}"
    first = " W" if way.weight_first else ""
    return f"dot t{way.tokens} {name} s{way.stages} w{way.num_warps} split{way.split_k} pf{way.prefetch_k}{first}"

"""Linear layers with what stands around them in a decoder layer fused in: one launch each.

x: [T, K], weight: [N, K], bias: [N], all contiguous and of one type; sums are float32. T, N, K, the configuration and
all addresses are fixed inside a CUDA graph; padding tokens are computed like others. Outputs are rounded where separate
kernels would round (gate, up, silu(gate), a product before the residual is added), so that they differ from those of
`reference` by the order of sums alone; but where sums are divided by a norm's root, not inputs (see `residual`), the
norm is rounded once, with its gain, or, if the kernel itself norms, not at all.

A kernel starts while the one before it still runs (PDL): it sends for its weights, waits for that one's end, and only
then reads x or writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.linear_config import (
    MIN_PART_BLOCKS,
    DotConfig,
    FmaConfig,
    LinearConfig,
    TileConfig,
    scratch_size,
)
from gpu_runner.kernels.linear_dot import linear_dot_kernel
from gpu_runner.kernels.linear_fma import linear_fma_kernel
from gpu_runner.kernels.linear_tile import linear_tile_kernel
from gpu_runner.kernels.residual import Gained

MIN_DOT_TOKENS = 16
"""Tokens that a tensor-core product is padded to."""

MIN_PARTS = 16
"""Sums of squares of a token that a kernel has room for at least: fewer kernels to compile."""

FINISH_VALUES = 64
"""Of a thread, of the parts of a shared tile that are added at a time."""


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Where programs that share a tile leave their parts. One serves all kernels of a stream, with PDL too: each waits
    for the one before to end before it writes."""

    partials: Tensor  # [max_values] float32
    arrivals: Tensor  # [max_tiles] int32, zero between kernels

    @classmethod
    def allocate(cls, *, max_values: int, max_tiles: int, device: torch.device | str) -> SplitScratch:
        """For linears that `linear_config.scratch_size` says need no more."""
        return cls(
            partials=torch.empty(max_values, dtype=torch.float32, device=device),
            arrivals=torch.zeros(max_tiles, dtype=torch.int32, device=device),
        )


def linear(
    x: Tensor | Gained,
    weight: Tensor,
    *,
    out: Tensor,
    config: LinearConfig,
    bias: Tensor | None = None,
    scratch: SplitScratch | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate_up: bool = False,
    add: bool = False,
    gained: Gained | None = None,
) -> None:
    """out = x @ weight.T + bias. out: [T, N] of x's type, or float32 and then not rounded.

    norm: [K], of which x is taken `rms_norm`, with an `FmaConfig` only: each program computes the roots of all tokens,
    and with more than a few a kernel of its own costs less. gate_up: silu(gate) * up of the product goes to `out`, [T,
    N / 2]; weight has N / 2 gate rows, then as many up rows. add: the product is added to `out`, which is not x itself.
    With a `DotConfig` only, x may be a norm that lacks its root; and gained, unless gate_up, is such a norm of `out`
    that is written too, in `row_tiles` parts.

    Raises ValueError for a split configuration without a scratch that holds it, and for a norm that the configuration
    does not take or write.
    """
    if norm is not None and not isinstance(config, FmaConfig):
        raise ValueError(f"{config} does not norm its input")
    squares = None
    if isinstance(x, Gained):
        squares, x = x.squares, x.values
    n, k = weight.shape
    options: dict[str, Any] = {
        "N": n,
        "K": k,
        "ROWS": config.rows,
        "BLOCK_K": config.block_k,
        "HAS_BIAS": bias is not None,
        "GATE_UP": gate_up,
        "ADD": add,
        **launch_options(x, config.num_warps),
    }
    if isinstance(config, DotConfig):
        _launch_dot(x, weight, bias, out, config, scratch, squares, eps, gained, options)
    elif squares is not None or gained is not None:
        raise ValueError(f"{config} neither takes nor writes a norm that lacks its root")
    elif isinstance(config, FmaConfig):
        linear_fma_kernel[(triton.cdiv(n, config.rows),)](
            *(x, weight, norm, bias, out, eps), T=len(x), DEPTH=config.depth, HAS_NORM=norm is not None, **options
        )
    else:
        _launch_tile(x, weight, bias, out, config, scratch, options)


def row_tiles(config: DotConfig, n: int) -> int:
    """Into how many tiles n rows of W are cut, each of which writes its part of the squares of a `Gained`."""
    return triton.cdiv(n, config.rows)


def _launch_dot(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: DotConfig,
    scratch: SplitScratch | None,
    squares: Tensor | None,
    eps: float,
    gained: Gained | None,
    options: dict[str, Any],
) -> None:
    num_tokens, n = len(x), len(weight)
    tokens = min(config.tokens, max(MIN_DOT_TOKENS, triton.next_power_of_2(num_tokens)))
    token_tiles = triton.cdiv(num_tokens, tokens)
    partials, arrivals = _parts_of(scratch, config, x, weight) if config.split_k > 1 else (None, None)
    num_parts = 0 if squares is None else len(squares)
    to_gain = (None, None, None) if gained is None else (gained.gain, gained.values, gained.squares)
    linear_dot_kernel[(row_tiles(config, n) * token_tiles, config.split_k)](
        *(x, weight, bias, out, partials, arrivals, num_tokens, squares, num_parts, eps, *to_gain),
        TOKENS=tokens,
        STAGES=config.stages,
        SPLIT_K=config.split_k,
        PREFETCH_K=config.prefetch_k if options["PDL"] else 0,  # there is no wait to prefetch in without
        WEIGHT_FIRST=config.weight_first,
        ONCE=token_tiles == 1,
        PARTS=room_for_parts(squares),
        HAS_GAIN=gained is not None,
        **options,
    )


def _launch_tile(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: TileConfig,
    scratch: SplitScratch | None,
    options: dict[str, Any],
) -> None:
    token_tiles, row_tiles = triton.cdiv(len(x), config.tokens), triton.cdiv(len(weight), config.rows)
    members = _members(config, len(x), *weight.shape)
    partials, arrivals = _parts_of(scratch, config, x, weight) if members else (None, None)
    halves = 2 if options["GATE_UP"] else 1
    linear_tile_kernel[(token_tiles * (members or row_tiles),)](
        TensorDescriptor.from_tensor(x, [config.tokens, config.block_k]),
        TensorDescriptor.from_tensor(
            weight.view(halves, -1, weight.shape[1]), [halves, config.rows // halves, config.block_k]
        ),
        *(weight, bias, out, partials, arrivals, len(x)),
        TOKENS=config.tokens,
        STAGES=config.stages,
        GROUP=config.group,
        PREFETCH_K=config.prefetch_k if options["PDL"] else 0,
        FINISH_TOKENS=min(config.tokens, FINISH_VALUES * 32 * config.num_warps // config.rows),
        MIN_PART_BLOCKS=MIN_PART_BLOCKS,
        SHARED=members > 0,
        **options,
    )


def _members(config: TileConfig, tokens: int, n: int, k: int) -> int:
    """To how many programs the row tiles of each tile of tokens are shared out; 0 where each tile has one."""
    row_tiles = triton.cdiv(n, config.rows)
    most = max(row_tiles, row_tiles * triton.cdiv(k, config.block_k) // MIN_PART_BLOCKS)
    return min(config.programs // triton.cdiv(tokens, config.tokens), most)


def room_for_parts(squares: Tensor | None) -> int:
    """The constant PARTS of a kernel that reads a `Gained`'s squares; 0 where there are none."""
    return 0 if squares is None else max(MIN_PARTS, triton.next_power_of_2(len(squares)))


def _parts_of(scratch: SplitScratch | None, config: LinearConfig, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    values, tiles = scratch_size(config, len(x), len(weight))
    if scratch is None or scratch.partials.numel() < values or scratch.arrivals.numel() < tiles:
        raise ValueError(f"{config} of {len(x)} x {len(weight)} needs a scratch of {values} values, {tiles} tiles")
    return scratch.partials, scratch.arrivals

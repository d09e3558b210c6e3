"""Which heads are computed with the choice of tokens fused in, by the number of rows and the head's shape, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from gpu_runner.kernels.linear_config import ANY, ROW_BYTES


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """See `head_kernel`."""

    tokens: int  # of a tile; a power of two from 64, for warpgroups
    ids: int  # of a tile; a power of two
    block_k: int
    stages: int  # of shared memory
    num_warps: int
    noise_ids: int = 64  # looked at together for the few that can win with their noise


_FEW = HeadConfig(tokens=64, ids=256, block_k=64, stages=4, num_warps=4)
_MANY = HeadConfig(tokens=128, ids=256, block_k=64, stages=4, num_warps=8)
_WIDE = HeadConfig(tokens=256, ids=128, block_k=64, stages=4, num_warps=8, noise_ids=32)
MIN_ROWS: Final = 17

# From the output of `scripts/bench_kernels/head.py` for Qwen3-0.6B and Llama-3.1-8B. The first row that holds the
# shape counts.
CUTS: Final[tuple[tuple[int, int, HeadConfig], ...]] = (
    # Rows and k at most.
    (32, ANY, _FEW),
    (64, ANY, replace(_FEW, ids=128, block_k=128)),
    (256, ANY, _MANY),
    (ANY, 2048, _MANY),
    (ANY, ANY, _WIDE),
)


def choose_head(rows: int, vocab: int, k: int, dtype: torch.dtype) -> HeadConfig | None:
    """How to choose tokens of [rows, k] @ [vocab, k]^T. None: by logits in memory."""
    if rows < MIN_ROWS or dtype.itemsize != 2 or k * dtype.itemsize % ROW_BYTES:
        return None
    config = next(config for max_rows, max_k, config in CUTS if rows <= max_rows and k <= max_k)
    return config if vocab >= config.ids else None

"""Which heads are computed with the choice of tokens fused in, by the number of rows and the head's shape, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

NUM_SMS: Final = 132
ROW_BYTES: Final = 16
"""The tensor memory accelerator takes rows of a multiple of these."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """See `head_kernel`."""

    tokens: int  # of a tile; a power of two from 64, for warpgroups
    ids: int  # of a tile; a power of two
    block_k: int
    stages: int  # of shared memory
    num_warps: int
    programs: int  # to a multiprocessor
    flatten: bool  # the next tile's loads begin while this one's best is looked for
    noise_ids: int = 64  # looked at together for the few that can win with their noise


# From the output of `scripts/bench_kernels/head.py`.
FEW_TOKENS = HeadConfig(tokens=64, ids=128, block_k=64, stages=4, num_warps=4, programs=2, flatten=True)
MANY_TOKENS = HeadConfig(tokens=128, ids=256, block_k=64, stages=4, num_warps=8, programs=1, flatten=True)
MIN_ROWS: Final = 33


def choose_head(rows: int, vocab: int, k: int, dtype: torch.dtype, *, noise: bool) -> HeadConfig | None:
    """How to choose tokens of [rows, k] @ [vocab, k]^T. None: by logits in memory."""
    if rows < MIN_ROWS or dtype.itemsize != 2 or k * dtype.itemsize % ROW_BYTES:
        return None
    config = FEW_TOKENS if rows <= FEW_TOKENS.tokens else MANY_TOKENS
    return config if vocab >= config.ids else None

"""Takes attention's place between the linears of a layer: one small kernel with a programmatic launch."""

from __future__ import annotations

import triton
import triton.language as tl
from bench_device import SMOKE
from torch import Tensor

BLOCK = 1024


@triton.jit
def _copy_heads_kernel(qkv, heads, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy the query heads, as a kernel that depends on all of the step's tokens."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(qkv + row * WIDTH + column, mask=column < COLUMNS)
    tl.store(heads + row * COLUMNS + column, values, mask=column < COLUMNS)


def stand_in_attention(qkv: Tensor, heads: Tensor) -> None:
    """qkv: [T, W]. heads: [T, H], which gets the first columns."""
    (tokens, width), columns = qkv.shape, heads.shape[1]
    options = {} if SMOKE else {"launch_pdl": True}
    _copy_heads_kernel[(tokens, triton.cdiv(columns, BLOCK))](
        qkv, heads, WIDTH=width, COLUMNS=columns, BLOCK=BLOCK, PDL=not SMOKE, **options
    )

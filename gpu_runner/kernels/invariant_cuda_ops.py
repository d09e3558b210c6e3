"""The decoder's operations on a GPU in a form in which a token's results do not depend on the batch, bit for bit.

What `CudaOps` chooses by the number of tokens is here the same for all: one tile of each linear layer and of the head,
with K gone through in order by one program, norms in a kernel of their own, and one kernel of attention, to which a
decode row is a chunk of one token. So a token's key, value and residual depend on the tokens before it alone: not on
chunks, other rows or padding, nor on what is read from the prefix cache rather than computed.

That an element of a matrix product depends on its own row and column, not on their places in a tile, is what the
hardware does; tests on a GPU check it.
"""

from __future__ import annotations

from torch import Tensor

from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.linear_config import TileConfig, choose_invariant


def _by_weight(x: Tensor, weight: Tensor) -> TileConfig:
    n, k = weight.shape
    return choose_invariant(n, k, x.element_size())


class InvariantCudaOps(CudaOps):
    """`ModelOps` on one GPU and one stream; a step's work lists are of all rows (`WorkList.all_rows`)."""

    def __init__(self) -> None:
        super().__init__(choose=_by_weight)

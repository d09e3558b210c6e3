"""What the layers of a decoder add to, and what a norm of it needs of the kernel that wrote it last.

RMSNorm is linear but for the root that it divides a token by, one number for all of a token's values. So the kernel
that writes a residual can write it times the next norm's gain too, with its part of each token's sum of squares, and
the linear layer behind the norm can divide its sums, not its inputs, by the root:

    writer   residual r;  gained = r * gain;  squares = sum of r^2 over the columns of its tile
    reader   (gained @ weight.T) / sqrt(sum of squares / hidden + eps)

Then no kernel stands between the two. `linear_dot` kernels are such writers and readers, the embedding such a writer
and `linear_heads` such a reader. A gained value is rounded once; a norm's result would be before its gain and after it.
It has no bound as a norm has, which float16 would need, and bfloat16 does not. Nothing is added up across programs, so
that results do not depend on their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """A linear layer of the RMSNorm of its input: rms_norm(x) @ weight.T + bias."""

    gain: Tensor  # [in], of the norm
    eps: float
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class Gained:
    """A norm of T tokens that lacks its root."""

    gain: Tensor  # [hidden]
    values: Tensor  # [T, hidden], the residual times the gain, rounded
    squares: Tensor  # [parts, T] float32: a token's sum over all parts is that of its residual's squares

    @classmethod
    def allocate(cls, residual: Tensor, gain: Tensor, *, parts: int) -> Gained:
        """For a kernel to write. residual: [T, hidden]."""
        squares = residual.new_empty(parts, len(residual), dtype=torch.float32)
        return cls(gain=gain, values=torch.empty_like(residual), squares=squares)


@dataclass(slots=True)
class Residual:
    """`gained` is there while it belongs to `values`, and where the linear layer that comes next reads it."""

    values: Tensor  # [T, hidden]
    gained: Gained | None = None

"""The decoder's operations on a CPU in a form in which a token's results do not depend on the batch, bit for bit.

A library's functions sum in an order that depends on shapes, and compute the last elements of an array by other
instructions than the rest. So each is called with shapes that do not depend on the batch:

    linear layers, head              TILE tokens at a time, the last tile filled with zeros
    sums of a norm, SiLU, rotation   a token at a time
    attention                        a token at a time, over as many keys as its position says

The rest rounds each element once, in whatever array it is. That a row of a product does not depend on its place among
the TILE is up to the library: `rows_are_alike` tells.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels import reference
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.reference_ops import ReferenceOps

TILE = 16
"""Tokens of a product. A decoding token alone pays for as many; more would make it wait, fewer read weights oftener."""


def rows_are_alike(weight: Tensor) -> bool:
    """Whether products by `weight`, [out, in], give each of TILE equal rows the same bits."""
    generator = torch.Generator(weight.device).manual_seed(0)
    row = torch.randn(1, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    out = F.linear(row.expand(TILE, -1).contiguous(), weight)
    return torch.equal(out, out[:1].expand_as(out))


class InvariantReferenceOps(ReferenceOps):
    """`ModelOps` in plain torch; `meta` is a `BatchMeta`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        mean = _by_token(lambda row: row.mean(dim=-1, keepdim=True), wide.square())
        return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tokens = len(x)
        whole = tokens // TILE * TILE
        tiles = list(x[:whole].split(TILE)) if whole else []
        if whole < tokens:
            last = x.new_zeros(TILE, x.shape[1])
            last[: tokens - whole] = x[whole:]
            tiles.append(last)
        return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:tokens]

    def _rope_cos_sin(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        return _by_token(lambda own: reference.rope_cos_sin(own, inv_freq), positions)

    def _silu_mul(self, gate_up: Tensor) -> Tensor:
        return _by_token(reference.silu_mul, gate_up)

    def _paged_attention(
        self, q: Tensor, kv_layer: Tensor, meta: BatchMeta, *, scale: float, window: int | None = None
    ) -> Tensor:
        """A row's keys are gathered once, in whole pages: so each head's begin at an address of the same alignment,
        wherever the row's chunk ends."""
        out = torch.zeros_like(q)
        num_kv_heads = kv_layer.shape[2]
        capacity = meta.page_table.shape[1] * PAGE_SIZE
        token = 0
        for slot, start, count in zip(meta.row_slot, meta.row_start.tolist(), meta.row_len.tolist(), strict=True):
            end = min(start + count, capacity)  # an overshoot row may stand behind its last page
            position = torch.arange(-(-end // PAGE_SIZE) * PAGE_SIZE, device=q.device).clamp_(max=end - 1)
            k, v = reference.gather(kv_layer, meta.page_table[slot][None], position[None])
            for last in range(start + 1, start + count + 1):
                seen = slice(0 if window is None else max(0, last - window), last)
                # The heads of a group take the place of query positions, so that a group reads its keys once.
                grouped = q[token].view(1, num_kv_heads, -1, q.shape[-1])
                result = F.scaled_dot_product_attention(grouped, k[:, :, seen], v[:, :, seen], scale=scale)
                out[token] = result.view(q.shape[1:])
                token += 1
        return out


def _by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(row) for row in x.split(1)])

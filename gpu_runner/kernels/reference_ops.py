"""The decoder's operations as the CPU runs them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.residual import NormedLinear, Residual


class ReferenceOps:
    """`ModelOps` in plain torch, on any device; `meta` is a `BatchMeta`."""

    rms_norm = staticmethod(reference.rms_norm)
    _rope_cos_sin = staticmethod(reference.rope_cos_sin)
    _silu_mul = staticmethod(reference.silu_mul)
    _paged_attention = staticmethod(reference.paged_attention)

    def __init__(self) -> None:
        self._rotation: tuple[BatchMeta, Tensor] | None = None

    def embed(
        self, token_ids: Tensor, embedding: Tensor, reader: NormedLinear, *, out: Tensor | None = None
    ) -> Residual:
        values = F.embedding(token_ids, embedding)
        return Residual(values if out is None else out.copy_(values))

    def norm_linear(self, residual: Residual, linear: NormedLinear) -> Tensor:
        return self._linear(self.rms_norm(residual.values, linear.gain, linear.eps), linear.weight, linear.bias)

    def attend(
        self,
        residual: Residual,
        linear: NormedLinear,
        kv_layer: Tensor,
        meta: BatchMeta,
        *,
        inv_freq: Tensor,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int | None,
    ) -> Tensor:
        qkv = self.norm_linear(residual, linear)
        if self._rotation is None or self._rotation[0] is not meta:  # the same for all layers of a step
            self._rotation = meta, self._rope_cos_sin(meta.positions, inv_freq)
        q = reference.qk_norm_rope_write(
            *(qkv, self._rotation[1], kv_layer, meta.kv_index),
            num_heads=num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            norm=self.rms_norm,
        )
        return self._paged_attention(q, kv_layer, meta, scale=scale, window=window)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Residual, reader: NormedLinear | None
    ) -> None:
        residual.values += self._linear(x, weight, bias)

    def norm_gate_up(self, residual: Residual, linear: NormedLinear) -> Tensor:
        return self._silu_mul(self.norm_linear(residual, linear))

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        return self._linear(hidden, lm_head, None).float()

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

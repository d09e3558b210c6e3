"""The decoder's operations as the CPU runs them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.ops import BatchMeta


class ReferenceOps:
    """`ModelOps` in plain torch, on any device; `meta` is a `BatchMeta`."""

    rms_norm = staticmethod(reference.rms_norm)
    _rope_cos_sin = staticmethod(reference.rope_cos_sin)
    _silu_mul = staticmethod(reference.silu_mul)
    _paged_attention = staticmethod(reference.paged_attention)

    def __init__(self) -> None:
        self._rotation: tuple[BatchMeta, Tensor] | None = None

    def embed(self, token_ids: Tensor, embedding: Tensor, *, out: Tensor | None = None) -> Tensor:
        residual = F.embedding(token_ids, embedding)
        return residual if out is None else out.copy_(residual)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(self.rms_norm(x, norm, eps), weight, bias)

    def attend(
        self,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
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
        qkv = self.norm_linear(x, norm, eps, weight, bias)
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

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        residual += self._linear(x, weight, bias)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._silu_mul(self.norm_linear(x, norm, eps, weight, bias))

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        return self._linear(hidden, lm_head, None).float()

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

"""What a decoder layer is made of, cut where kernels can be fused; one implementation per kind of device.

qkv       = norm_linear(residual)          RMSNorm prologue
q         = rotate_and_store(qkv)          query/key norm, rotary embedding, keys and values into their pages
attention = paged_attention(q)
residual += linear(attention)              linear_add
h         = norm_gate_up(residual)         RMSNorm prologue, SiLU and product epilogue
residual += linear(h)                      linear_add
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.ops import BatchMeta


class ModelOps(Protocol):
    """T tokens, flat. Weights are [out, in]; norms are computed in float32 and rounded to the weights' type.

    `meta` is what the implementation's own step prepared: see `BatchMeta` for the reference.
    """

    def embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        """[T, hidden]: the first residual, a tensor of its own."""
        ...

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """linear(rms_norm(x)). x: [T, in]. Returns [T, out]."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv_layer: Tensor,
        meta: Any,
        *,
        inv_freq: Tensor,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See `ops.qk_norm_rope_write`. Returns the queries, [T, num_heads, head_dim]."""
        ...

    def paged_attention(self, q: Tensor, kv_layer: Tensor, meta: Any, *, scale: float, window: int | None) -> Tensor:
        """See `ops.paged_attention`. Returns [T, num_heads, head_dim]."""
        ...

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        """residual += linear(x). x: [T, in], residual: [T, out]."""
        ...

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of linear(rms_norm(x)); weight: gate rows, then up rows. Returns [T, out / 2]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, hidden]."""
        ...

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """[S, vocab] float32."""
        ...


class ReferenceOps:
    """Plain torch, on any device; what every kernel is tested against."""

    def __init__(self) -> None:
        self._rotation: tuple[BatchMeta, Tensor] | None = None

    def embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        return F.embedding(token_ids, embedding)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(reference.rms_norm(x, norm, eps), weight, bias)

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv_layer: Tensor,
        meta: BatchMeta,
        *,
        inv_freq: Tensor,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        if self._rotation is None or self._rotation[0] is not meta:  # the same for all layers of a step
            self._rotation = meta, reference.rope_cos_sin(meta.positions, inv_freq)
        return reference.qk_norm_rope_write(
            qkv, self._rotation[1], kv_layer, meta.kv_index, num_heads=num_heads, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

    def paged_attention(
        self, q: Tensor, kv_layer: Tensor, meta: BatchMeta, *, scale: float, window: int | None
    ) -> Tensor:
        return reference.paged_attention(
            q,
            kv_layer,
            num_decode_rows=meta.num_decode_rows,
            row_start=meta.row_start,
            row_len=meta.row_len,
            row_slot=meta.row_slot,
            positions=meta.positions,
            page_table=meta.page_table,
            scale=scale,
            window=window,
        )

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        residual += F.linear(x, weight, bias)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return reference.silu_mul(self.norm_linear(x, norm, eps, weight, bias))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        return F.linear(hidden, lm_head).float()

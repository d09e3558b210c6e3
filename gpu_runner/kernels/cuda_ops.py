"""The decoder's operations as Triton kernels and, where many tokens make them faster, cuBLAS products.

Every call launches the same kernels at the same grids for the same shapes, so a whole forward pass can be captured.
Tensors that a call returns come from torch's allocator: inside a capture, from the graphs' pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels import linear, norm_rope
from gpu_runner.kernels.attention_decode import decode_attention
from gpu_runner.kernels.attention_prefill import prefill_attention
from gpu_runner.kernels.linear_config import MAX_DOT_TOKENS, NUM_PROGRAMS, FmaConfig, choose
from gpu_runner.kernels.step_meta import StepMeta
from gpu_runner.kernels.work_list import WorkList

MAX_SPLIT_TILES = 2 * NUM_PROGRAMS
MAX_SPLIT_VALUES = 2 * NUM_PROGRAMS * 64 * MAX_DOT_TOKENS
"""Products are split over programs only while tiles x parts, of up to 64 rows each, are at most 2 x NUM_PROGRAMS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMeta:
    """A step as the layers see it. work: by sliding window. prefill: whether the step can have prefill rows."""

    step: StepMeta
    work: Mapping[int | None, WorkList]
    page_table: Tensor  # [num_slots, pages_per_seq] int32
    prefill: bool


class CudaOps:
    """`ModelOps` on one GPU and one stream."""

    def __init__(self, device: torch.device, *, pdl: bool = True) -> None:
        self._pdl = pdl
        self._scratch = linear.SplitScratch.allocate(
            max_values=MAX_SPLIT_VALUES, max_tiles=MAX_SPLIT_TILES, device=device
        )

    def embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        return norm_rope.embedding(token_ids, embedding, pdl=self._pdl)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        config = choose(len(x), *weight.shape)
        if config is None:
            return F.linear(self.rms_norm(x, norm, eps), weight, bias)
        out = x.new_empty(len(x), len(weight))
        if isinstance(config, FmaConfig):
            linear.norm_linear(x, norm, eps, weight, out=out, config=config, bias=bias, pdl=self._pdl)
        else:
            x = self.rms_norm(x, norm, eps)
            linear.linear(x, weight, out=out, config=config, bias=bias, scratch=self._scratch, pdl=self._pdl)
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv_layer: Tensor,
        meta: CudaMeta,
        *,
        inv_freq: Tensor,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        tokens = len(qkv)
        return norm_rope.qk_norm_rope_write(
            qkv,
            meta.step.positions[:tokens],
            meta.step.kv_index[:tokens],
            inv_freq,
            kv_layer,
            num_heads=num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            pdl=self._pdl,
        )

    def paged_attention(
        self, q: Tensor, kv_layer: Tensor, meta: CudaMeta, *, scale: float, window: int | None
    ) -> Tensor:
        out, work, table = torch.empty_like(q), meta.work[window], meta.page_table
        decode_attention(q, kv_layer, out, work, counts=meta.step.counts, page_table=table, scale=scale, pdl=self._pdl)
        if meta.prefill:
            prefill_attention(q, kv_layer, out, work, page_table=table, scale=scale, pdl=self._pdl)
        return out

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        config = choose(len(x), *weight.shape)
        if config is not None:
            linear.linear_add(x, weight, residual, config=config, bias=bias, scratch=self._scratch, pdl=self._pdl)
        elif bias is None:
            torch.addmm(residual, x, weight.t(), out=residual)
        else:
            residual += F.linear(x, weight, bias)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        config = choose(len(x), *weight.shape)
        if config is None:
            return norm_rope.silu_mul(F.linear(self.rms_norm(x, norm, eps), weight, bias), pdl=self._pdl)
        out = x.new_empty(len(x), len(weight) // 2)
        if isinstance(config, FmaConfig):
            linear.norm_gate_up(x, norm, eps, weight, out=out, config=config, bias=bias, pdl=self._pdl)
        else:
            x = self.rms_norm(x, norm, eps)
            linear.gate_up(x, weight, out=out, config=config, bias=bias, scratch=self._scratch, pdl=self._pdl)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.rms_norm(x, weight, eps, pdl=self._pdl)

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        config = choose(len(hidden), *lm_head.shape)
        if config is None:
            return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)
        out = hidden.new_empty(len(hidden), len(lm_head), dtype=torch.float32)
        linear.linear(hidden, lm_head, out=out, config=config, scratch=self._scratch, pdl=self._pdl)
        return out

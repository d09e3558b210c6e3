"""The decoder's operations as Triton kernels and, where many tokens make them faster, cuBLAS products.

Every call launches the same kernels at the same grids for the same shapes, so a whole forward pass can be captured.
Tensors that a call returns come from torch's allocator: inside a capture, from the graphs' pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels import linear, norm_rope
from gpu_runner.kernels.attention_decode import decode_attention, streamed_decode_attention
from gpu_runner.kernels.attention_fused import can_fuse, fused_decode_attention, fused_tiling
from gpu_runner.kernels.attention_prefill import prefill_attention
from gpu_runner.kernels.decode_way import DecodeWay
from gpu_runner.kernels.linear_config import (
    DotConfig,
    FmaConfig,
    LinearConfig,
    TileConfig,
    choose,
    choose_heads,
    largest_scratch,
)
from gpu_runner.kernels.linear_heads import qkv_norm_rope_write
from gpu_runner.kernels.reference import rope_cos_sin
from gpu_runner.kernels.residual import Gained, NormedLinear, Residual
from gpu_runner.kernels.step_meta import StepMeta
from gpu_runner.kernels.work_list import WorkList


def _chosen(x: Tensor, weight: Tensor) -> LinearConfig | None:
    """By shape; but float32 tiles for tensor cores would exceed the shared memory."""
    config = choose(len(x), *weight.shape)
    return config if x.dtype != torch.float32 or isinstance(config, FmaConfig) else None


def _chosen_heads(x: Tensor, weight: Tensor, head_dim: int) -> TileConfig | None:
    n, k = weight.shape
    return None if x.dtype == torch.float32 else choose_heads(len(x), n, k, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMeta:
    """A step as the layers see it. work: by sliding window. prefill: whether the step can have prefill rows.
    way: how the rows attend that decode."""

    step: StepMeta
    work: Mapping[int | None, WorkList]
    page_table: Tensor  # [num_slots, pages_per_seq] int32
    prefill: bool
    way: DecodeWay


class CudaOps:
    """`ModelOps` on one GPU and one stream."""

    def __init__(
        self,
        *,
        scratch: linear.SplitScratch | None = None,
        choose: Callable[[Tensor, Tensor], LinearConfig | None] = _chosen,
    ) -> None:
        """scratch: large enough for what `choose` names, None where that shares no tiles. choose: how to compute
        x @ weight.T, of x and weight; None: with cuBLAS."""
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._choose = choose
        self._scratch = scratch

    @classmethod
    def for_weights(cls, shapes: Iterable[tuple[int, int]], *, max_tokens: int, device: torch.device) -> CudaOps:
        """For a model whose linear layers, the head too, have weights of these shapes, [N, K]."""
        values, tiles = largest_scratch(shapes, max_tokens)
        scratch = linear.SplitScratch.allocate(max_values=values, max_tiles=tiles, device=device)
        return cls(scratch=scratch)

    def embed(
        self, token_ids: Tensor, embedding: Tensor, reader: NormedLinear, *, out: Tensor | None = None
    ) -> Residual:
        values = embedding.new_empty(len(token_ids), embedding.shape[1]) if out is None else out
        gained = self._gained(values, reader, norm_rope.embedding_parts(embedding.shape[1]))
        norm_rope.embedding(token_ids, embedding, out=values, gained=gained)
        return Residual(values, gained)

    def norm_linear(self, residual: Residual, linear: NormedLinear) -> Tensor:
        return self._norm_linear(residual, linear, gate_up=False)

    def norm_gate_up(self, residual: Residual, linear: NormedLinear) -> Tensor:
        return self._norm_linear(residual, linear, gate_up=True)

    def _norm_linear(self, residual: Residual, normed: NormedLinear, *, gate_up: bool) -> Tensor:
        x, weight, bias = residual.values, normed.weight, normed.bias
        config = self._choose(x, weight)
        if config is None:
            product = F.linear(self.rms_norm(x, normed.gain, normed.eps), weight, bias)
            return norm_rope.silu_mul(product) if gate_up else product
        out = x.new_empty(len(x), len(weight) // 2 if gate_up else len(weight))
        options: dict[str, Any] = {"out": out, "config": config, "bias": bias, "gate_up": gate_up}
        if isinstance(config, FmaConfig):
            linear.linear(x, weight, norm=normed.gain, eps=normed.eps, **options)
        else:
            source = residual.gained or self.rms_norm(x, normed.gain, normed.eps)
            linear.linear(source, weight, eps=normed.eps, scratch=self._scratch, **options)
        return out

    def _gained(self, values: Tensor, reader: NormedLinear | None, parts: int) -> Gained | None:
        """What a kernel that writes residuals `values` is to write too, in so many parts; None where their reader does
        without, and in float16: a residual of some thousand times its gain may exceed it, as no norm does."""
        if reader is None or values.dtype == torch.float16:
            return None
        if not isinstance(self._choose(values, reader.weight), DotConfig):
            return None
        return Gained.allocate(values, reader.gain, parts=parts)

    def attend(
        self,
        residual: Residual,
        linear: NormedLinear,
        kv_layer: Tensor,
        meta: CudaMeta,
        *,
        inv_freq: Tensor,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """With a list of all rows, what it returns of padding means nothing: it is not written."""
        x, weight = residual.values, linear.weight
        tokens = len(x)
        positions, kv_index = meta.step.positions[:tokens], meta.step.kv_index[:tokens]
        work, counts, table = meta.work[window], meta.step.counts, meta.page_table
        norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
        head_dim = kv_layer.shape[-1]
        if not work.all_rows and can_fuse(kv_layer, num_heads):
            rotation = self._rotations(inv_freq, table.shape[1] * PAGE_SIZE)
            if meta.way.streams or meta.way.fused_warps is not None:
                out = x.new_empty(tokens, num_heads, head_dim)
                tensors = (self.norm_linear(residual, linear), kv_layer, out, work)
                options: dict[str, Any] = {
                    "positions": positions,
                    "kv_index": kv_index,
                    "counts": counts,
                    "page_table": table,
                    "rotation": rotation,
                    "scale": scale,
                    **norms,
                }
                if meta.way.fused_warps is None:
                    streamed_decode_attention(*tensors, **options)
                else:
                    tiling = fused_tiling(meta.way.fused_warps, head_dim * x.element_size())
                    fused_decode_attention(*tensors, tiling=tiling, **options)
                return out
        # With a list of all rows a token's bits must not depend on their number.
        config = None if work.all_rows else _chosen_heads(x, weight, head_dim)
        if config is None:
            q = norm_rope.qk_norm_rope_write(
                *(self.norm_linear(residual, linear), positions, kv_index, inv_freq, kv_layer),
                num_heads=num_heads,
                programs_per_token=1 if work.all_rows else None,
                **norms,
            )
        else:
            q = x.new_empty(tokens, num_heads, head_dim)
            source = residual.gained or self.rms_norm(x, linear.gain, linear.eps)
            places = (positions, kv_index, inv_freq, kv_layer)
            norms |= {"bias": linear.bias, "x_eps": linear.eps}
            qkv_norm_rope_write(source, weight, *places, out=q, config=config, **norms)
        out = torch.empty_like(q)
        if not work.all_rows:
            decode_attention(q, kv_layer, out, work, counts=counts, page_table=table, scale=scale)
        if meta.prefill or work.all_rows:
            prefill_attention(q, kv_layer, out, work, page_table=table, scale=scale)
        return out

    def _rotations(self, inv_freq: Tensor, capacity: int) -> Tensor:
        """Of all positions, that behind a full row's last too: made by the first call, which no capture may hold."""
        if self._rotation is None or self._rotation[0] is not inv_freq:
            positions = torch.arange(capacity + 1, device=inv_freq.device)
            self._rotation = inv_freq, rope_cos_sin(positions, inv_freq)
        return self._rotation[1]

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Residual, reader: NormedLinear | None
    ) -> None:
        config, values, gained = self._choose(x, weight), residual.values, None
        if isinstance(config, DotConfig):
            gained = self._gained(values, reader, linear.row_tiles(config, len(weight)))
        residual.gained = gained
        if config is not None:
            options: dict[str, Any] = {"config": config, "scratch": self._scratch, "gained": gained}
            linear.linear(x, weight, out=values, bias=bias, add=True, **options)
        elif bias is None:
            torch.addmm(values, x, weight.t(), out=values)
        else:
            values += F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.rms_norm(x, weight, eps)

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        config = self._choose(hidden, lm_head)
        if config is None:
            if hidden.dtype == torch.float32:
                return torch.mm(hidden, lm_head.t())
            return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)
        out = hidden.new_empty(len(hidden), len(lm_head), dtype=torch.float32)
        linear.linear(hidden, lm_head, out=out, config=config, scratch=self._scratch)
        return out

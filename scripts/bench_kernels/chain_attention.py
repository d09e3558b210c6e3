"""A step's attention between the linears of a graph of layers, by `CudaOps.attend` as the decoder calls it.

The step decodes rows whose contexts are half to one and a half times CONTEXT long, or, from PREFILL_TOKENS tokens on,
prefills chunks of CHUNK tokens. Each layer has keys and values of its own: 15 GB for 512 rows of Qwen3-0.6B.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import linear_ways
import numpy as np
import torch
from attention import FLOPS_PER_US, Case, Shape, Step
from bench_device import BYTES_PER_US, DEVICE, DTYPE, SMOKE
from torch import Tensor

from gpu_runner.kernels.attention_fused import can_fuse
from gpu_runner.kernels.cuda_ops import CudaMeta, CudaOps
from gpu_runner.kernels.decode_way import choose_decode
from gpu_runner.kernels.residual import NormedLinear, Residual
from gpu_runner.kernels.step_meta import new_step_meta

CONTEXT, CHUNK, PREFILL_TOKENS = (20, 48, 64) if SMOKE else (256, 512, linear_ways.PREFILL_TOKENS)
EPS = 1e-6
ROPE_BASE = 1e6


def case_of(tokens: int) -> Case:
    if tokens >= PREFILL_TOKENS:
        return Case("prefill", [], [(0, min(CHUNK, tokens - first)) for first in range(0, tokens, CHUNK)])
    lengths = CONTEXT * (0.5 + (np.arange(tokens) + 0.5) / tokens)
    return Case("decode", np.random.default_rng(0).permutation(lengths.astype(int)).tolist(), [])


class ChainAttention:
    """Must outlive the graphs that hold its launches; one launch must come before the first capture."""

    def __init__(self, shape: Shape, tokens: int, *, layers: int, norms_heads: bool) -> None:
        self._step = step = Step(shape, case_of(tokens), layers=layers)
        prefill = tokens >= PREFILL_TOKENS
        way = choose_decode(tokens, prefill=prefill, fuses=can_fuse(step.kv, shape.heads))
        work = step.work(way.cut)
        step.build(work)
        meta = new_step_meta(max_rows=len(step.starts), max_tokens=tokens, device=DEVICE)
        meta = replace(meta, counts=step.counts, positions=step.positions, kv_index=step.kv_index)
        self._meta = CudaMeta(
            step=meta,
            work={None: work},
            page_table=step.page_table,
            prefill=prefill,
            fused_warps=way.fused_warps,
            streams=way.streams,
        )
        half = torch.arange(0, shape.head_dim, 2, device=DEVICE) / shape.head_dim
        gains = 1 + torch.randn(2, shape.head_dim, dtype=DTYPE, device=DEVICE) / 8
        q_norm, k_norm = gains if norms_heads else (None, None)
        self._options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS, "scale": step.scale}
        self._options |= {"inv_freq": (ROPE_BASE**-half).float(), "num_heads": shape.heads, "window": None}

    @property
    def floor_us(self) -> float:
        """Of a layer on an H200: its keys and values, or its arithmetic."""
        shape, starts, lengths = self._step.shape, self._step.starts, self._step.lengths
        pairs = float((lengths * (starts + (lengths + 1) / 2)).sum())
        moved = float((starts + lengths).sum()) * shape.token_bytes
        return max(moved / BYTES_PER_US, 4 * pairs * shape.heads * shape.head_dim / FLOPS_PER_US)

    def attend(self, ops: CudaOps, residual: Residual, qkv: NormedLinear, layer: int) -> Tensor:
        """[T, heads * head_dim]"""
        return ops.attend(residual, qkv, self._step.kv[layer], self._meta, **self._options).flatten(1)

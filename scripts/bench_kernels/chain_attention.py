"""A step's attention between the linears of a graph of layers, by `CudaOps.attend` as the decoder calls it.

The step decodes rows whose contexts are half to one and a half times CONTEXT long, or, from PREFILL_TOKENS tokens on,
prefills chunks of CHUNK tokens. Each layer has keys and values of its own: 15 GB for 512 rows of Qwen3-0.6B.
`attention_layer.py` checks and times ways to attend; here are few, for what they leave to the linears.
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
from gpu_runner.kernels.decode_way import DecodeWay, choose_decode
from gpu_runner.kernels.residual import NormedLinear, Residual
from gpu_runner.kernels.step_meta import new_step_meta
from gpu_runner.kernels.work_list import LARGE_CUT, MULTIPROCESSORS, RangeCut

CONTEXT, CHUNK, PREFILL_TOKENS = (20, 48, 64) if SMOKE else (256, 512, linear_ways.PREFILL_TOKENS)
MAX_FUSED_TOKENS, MAX_STREAMED_TOKENS = 32, 64
"""Of steps for which such ways are tried."""
EPS = 1e-6
ROPE_BASE = 1e6


def case_of(tokens: int) -> Case:
    if tokens >= PREFILL_TOKENS:
        return Case("prefill", [], [(0, min(CHUNK, tokens - first)) for first in range(0, tokens, CHUNK)])
    lengths = CONTEXT * (0.5 + (np.arange(tokens) + 0.5) / tokens)
    return Case("decode", np.random.default_rng(0).permutation(lengths.astype(int)).tolist(), [])


def attention_ways(tokens: int, *, fuses: bool) -> list[DecodeWay]:
    """What `choose_decode` names first. fuses: whether `attention_fused` takes the model."""
    prefill = tokens >= PREFILL_TOKENS
    chosen = choose_decode(tokens, prefill=prefill, fuses=fuses)
    ways = [replace(chosen, long_bytes=None)]  # no step is long here
    if prefill or tokens > MAX_STREAMED_TOKENS:
        return ways
    step = 256 if tokens <= MAX_FUSED_TOKENS else 512
    cut = RangeCut(LARGE_CUT.programs, step, at_once=4 * MULTIPROCESSORS, start_keys=150)
    ways += [DecodeWay(cut, streams=True)] * fuses + [DecodeWay(cut)]
    if fuses and tokens <= MAX_FUSED_TOKENS:
        for warps, step, start_keys in ((4, 64, 50), (4, 256, 100), (4, 512, 200), (8, 256, 100), (8, 512, 200)):
            at_once = 8 // warps * MULTIPROCESSORS
            ways.append(DecodeWay(RangeCut(LARGE_CUT.programs, step, at_once, start_keys), fused_warps=warps))
    return list(dict.fromkeys(ways))


class ChainAttention:
    """Must outlive the graphs that hold its launches; one launch in each way must come before the first capture. The
    layers attend in `way`, at first the first of `ways`."""

    def __init__(self, shape: Shape, tokens: int, *, layers: int, norms_heads: bool) -> None:
        self._step = step = Step(shape, case_of(tokens), layers=layers)
        self.ways = attention_ways(tokens, fuses=can_fuse(step.kv, shape.heads))[: 2 if SMOKE else None]
        self.way = self.ways[0]
        meta = new_step_meta(max_rows=len(step.starts), max_tokens=tokens, device=DEVICE)
        meta = replace(meta, counts=step.counts, positions=step.positions, kv_index=step.kv_index)
        prefill = tokens >= PREFILL_TOKENS
        self._metas: dict[DecodeWay, CudaMeta] = {}
        for way in self.ways:
            work = step.work(way.cut)
            step.build(work)
            self._metas[way] = CudaMeta(
                step=meta, work={None: work}, page_table=step.page_table, prefill=prefill, way=way
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
        return ops.attend(residual, qkv, self._step.kv[layer], self._metas[self.way], **self._options).flatten(1)

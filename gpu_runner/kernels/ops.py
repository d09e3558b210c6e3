"""The operations the model is made of, and what attention must know of a step. Each runs where its tensors live.

The cuts are those of fused kernels: residual add with RMSNorm; query/key norm with rotary embedding and the write into
the KV pages; attention over pages; SiLU with the product. Only the tensors a caller passes change: `residual` in
`fused_add_rms_norm` and `kv_layer` in `qk_norm_rope_write`.

The KV cache is one tensor `[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]`, index 0 of the second
dimension holding keys and 1 values; a `kv_layer` is one layer of it. Page 0 is the dummy: writes that must not land
anywhere go there, and nothing read from it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_runner.kernels import reference


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """One step over R rows and T tokens, flat: first one token for each decode row, then the prefill rows' chunks.

    Row i's tokens have positions `row_start[i] .. row_start[i] + row_len[i] - 1` and attend to all of the row's
    positions up to their own. Tokens after the last row's are padding: they are computed, and mean nothing.
    """

    num_decode_rows: int
    row_start: NDArray[np.int32]  # [R], host
    row_len: NDArray[np.int32]  # [R], host; 1 for decode rows
    row_slot: Tensor  # [R] int64, row of `page_table`
    positions: Tensor  # [T] int64
    kv_index: Tensor  # [T] int64, page * page_size + offset: where the token's key and value are written
    page_table: Tensor  # [num_slots, pages_per_seq] int32, page ids in order of position; 0 = dummy


def rope_cos_sin(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotation of each token, shared by all layers: cosines then sines, float32.

    positions: [T] int64. inv_freq: [head_dim / 2] float32, radians per position. Returns [T, head_dim].
    """
    return reference.rope_cos_sin(positions, inv_freq)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich, 2019) over the last dimension, computed in float32. x: [T, hidden]."""
    return reference.rms_norm(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then the norm of `residual`. x, residual: [T, hidden]."""
    return reference.fused_add_rms_norm(x, residual, weight, eps)


def qk_norm_rope_write(
    qkv: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    kv_index: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Norm each query and key head (where a weight is given), rotate both, write keys and values into their pages.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, then k, then v. cos_sin: [T, head_dim] of
    `rope_cos_sin`; a head's first half is rotated against its second half. q_norm, k_norm: [head_dim].
    Returns the queries, [T, num_heads, head_dim].
    """
    return reference.qk_norm_rope_write(
        qkv, cos_sin, kv_layer, kv_index, num_heads=num_heads, q_norm=q_norm, k_norm=k_norm, eps=eps
    )


def paged_attention(q: Tensor, kv_layer: Tensor, meta: BatchMeta, *, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of each row's tokens over the row's pages, which already hold those tokens' keys and values.

    q: [T, num_heads, head_dim]; query head h reads KV head h // (num_heads / num_kv_heads). window: a token sees only
    the last `window` positions, its own included; None = all. Returns [T, num_heads, head_dim].
    """
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


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 * intermediate], gate first. Returns [T, intermediate]."""
    return reference.silu_mul(gate_up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [T, in], weight: [out, in] contiguous, bias: [out]. Returns [T, out]."""
    return reference.linear(x, weight, bias)

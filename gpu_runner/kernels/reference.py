"""The operations of `ops` in plain torch, obviously right: what the CPU runs and kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels.ops import BatchMeta

BLOCK_BYTES = 4 * 1024 * 1024
"""Keys gathered at once for decode rows. Larger blocks leave the cache, and cost fresh memory from the system."""


def rope_cos_sin(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotation of each token, cosines then sines, [T, head_dim] float32. positions: [T]. inv_freq: [head_dim / 2]."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich, 2019) over the last dimension, computed in float32. x: [T, hidden]."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


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
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> Tensor:
    """The first half of `ModelOps.attend`; returns the queries. cos_sin: of `rope_cos_sin`. kv_index: [T], page *
    page_size + offset. norm: what computes `rms_norm`."""
    _, _, num_kv_heads, page_size, head_dim = kv_layer.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = norm(q, q_norm, eps)
    if k_norm is not None:
        k = norm(k, k_norm, eps)
    page, offset = kv_index // page_size, kv_index % page_size
    kv_layer[0, page, :, offset] = _rotate(k, cos_sin)
    kv_layer[1, page, :, offset] = v
    return _rotate(q, cos_sin)


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [T, heads, head_dim]."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def paged_attention(q: Tensor, kv_layer: Tensor, meta: BatchMeta, *, scale: float, window: int | None = None) -> Tensor:
    """The second half of `ModelOps.attend`. q: [T, heads, head_dim]. Tokens behind the last row's give zeros."""
    out = torch.zeros_like(q)
    num_decode_rows = meta.num_decode_rows
    position_bytes = kv_layer[0, 0, :, 0].nbytes
    row = 0
    while row < num_decode_rows:
        longest = int(meta.row_start[row:num_decode_rows].max()) + 1
        block = slice(row, min(num_decode_rows, row + max(1, BLOCK_BYTES // (longest * position_bytes))))
        pages = meta.page_table[meta.row_slot[block]]
        out[block] = _decode_attention(q[block], kv_layer, meta.positions[block], longest, pages, scale, window)
        row = block.stop
    token = num_decode_rows
    for row in range(num_decode_rows, len(meta.row_len)):
        start, count = int(meta.row_start[row]), int(meta.row_len[row])
        pages = meta.page_table[meta.row_slot[row]]
        out[token : token + count] = _chunk_attention(q[token : token + count], kv_layer, start, pages, scale, window)
        token += count
    return out


def _decode_attention(
    q: Tensor, kv_layer: Tensor, position: Tensor, longest: int, pages: Tensor, scale: float, window: int | None
) -> Tensor:
    """One query per row: all rows at once. q: [R, heads, head_dim], position: [R] its query's, each below `longest`
    (known to the host, so that nothing waits for the device), pages: [R, pages_per_seq]."""
    rows, _, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    key_position = torch.arange(longest, device=q.device)
    last = position[:, None]
    # Past its end a row reads its last position again, masked: nothing it does not own may enter, were it NaN.
    k, v = gather(kv_layer, pages, torch.minimum(key_position, last))
    seen = key_position <= last
    if window is not None:
        seen &= key_position > last - window
    # The heads of a group take the place of query positions, so that a group reads its keys once.
    grouped = q.view(rows, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return out.reshape(q.shape)


def _chunk_attention(
    q: Tensor, kv_layer: Tensor, start: int, pages: Tensor, scale: float, window: int | None
) -> Tensor:
    """One row's chunk. q: [count, heads, head_dim], pages: [pages_per_seq]."""
    end = start + len(q)
    position = torch.arange(end, device=q.device)
    k, v = gather(kv_layer, pages[None], position[None])
    own = position[start:, None]
    seen = position <= own
    if window is not None:
        seen &= position > own - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=seen, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out[0].transpose(0, 1)


def gather(kv_layer: Tensor, pages: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at `position` [R, L] of rows with `pages` [R, pages_per_seq]: two [R, kv_heads, L, head_dim]."""
    _, num_pages, num_kv_heads, page_size, head_dim = kv_layer.shape
    page = pages.to(torch.int64).gather(1, position // page_size)
    head = torch.arange(num_kv_heads, device=kv_layer.device)
    line = (page[:, None] * num_kv_heads + head[:, None]) * page_size + (position % page_size)[:, None]
    flat = kv_layer.view(2, num_pages * num_kv_heads * page_size, head_dim)
    shape = (*line.shape, head_dim)
    return flat[0].index_select(0, line.flatten()).view(shape), flat[1].index_select(0, line.flatten()).view(shape)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 * intermediate], gate first. Returns [T, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up

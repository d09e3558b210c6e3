"""Attention of decode rows over paged keys and values: flash-decoding (Dao et al., 2023) with ranges cut on the device.

A program takes one range of one row's keys for one KV head, and all query heads that share it, so that keys and values
are read once. A row in one range is finished there and then. Otherwise each program leaves its normalised sum and the
base-2 logarithm of its weight, and the one that arrives last merges them: no second kernel, and no wait.

    row 3, KV head 0   | range 0 ... partial, arrived 1 |
                       | range 1 ......... partial, arrived 3 -> merge, out, arrived = 0 |
                       | range 2 ..... partial, arrived 2 |

`arrived` is zero again when the kernel ends, so every layer and step finds it so.

A step that has decode rows only needs no other kernel for its attention: a program norms and rotates its own queries,
and the one with a row's last range its newest key, which it writes to its page with the value and has its softmax begin
with. So the loop reads what earlier steps wrote only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from gpu_runner.kernels.attention_decode_kernel import decode_kernel
from gpu_runner.kernels.attention_parts import LOG2_E
from gpu_runner.kernels.norm_rope import VALUES_PER_THREAD
from gpu_runner.kernels.work_list import ITEM_WORDS, MAX_SPLITS, WorkList

DOT_ROWS = 16
"""The fewest rows of a tensor-core product: query heads of a group are padded to it."""


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """block_tokens: keys of one tile. prefetch_pages: pages of a range, at most 32 * num_warps, that are asked into L2
    while the kernel before still runs."""

    block_tokens: int
    num_warps: int
    num_stages: int
    prefetch_pages: int


def decode_tiling(head_dim: int, element_bytes: int = 2) -> DecodeTiling:
    """Tiles of 16 KiB for keys and values together: several programs fit on a multiprocessor and hide each other's
    start. Float32 products run outside the tensor cores; only small tiles fit the registers."""
    if element_bytes == 4:
        return DecodeTiling(block_tokens=16, num_warps=4, num_stages=2, prefetch_pages=4)
    if head_dim <= 64:
        return DecodeTiling(block_tokens=64, num_warps=2, num_stages=3, prefetch_pages=4)
    return DecodeTiling(block_tokens=32, num_warps=2, num_stages=3, prefetch_pages=4)


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    counts: Tensor,
    page_table: Tensor,
    scale: float,
    tiling: DecodeTiling | None = None,
    pdl: bool = True,
) -> None:
    """Attention of a step's decode rows, whose keys and values are in their pages already, into `out`.

    q, out: [T, num_heads, head_dim] contiguous, of kv_layer's dtype; row i of the batch is token i. kv_layer: [2,
    num_pages, num_kv_heads, page_size, head_dim]. work: built for this step and the layer's window. counts: as
    `build_work_list` takes it. page_table: [num_slots, pages_per_seq] int32. head_dim: a power of two.

    Writes the rows below counts[0] and zeros to the padding, tokens counts[2] .. T - 1; leaves the rest. Fixed inside a
    graph: all addresses and shapes. Launches decode_items(T) x num_kv_heads programs.

    pdl: list and page table are read before the wait. So the kernel launched just before must be another than their
    writers, and let this one start only behind its own wait, as the one that writes keys and values does.
    """
    _launch(q, kv_layer, out, work, counts, page_table, scale, tiling, pdl)


def rotating_decode_attention(
    qkv: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    positions: Tensor,
    kv_index: Tensor,
    counts: Tensor,
    page_table: Tensor,
    rotation: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    tiling: DecodeTiling | None = None,
    pdl: bool = True,
) -> None:
    """Attention of a step that has decode rows only, into `out`; their keys and values into their pages.

    The arguments, and what may be read before the wait, are those of `fused_decode_attention`, but for the keys before
    the newest: they are read behind it. Any number of query heads may share a KV head.
    """
    _launch(
        *(qkv, kv_layer, out, work, counts, page_table, scale, tiling, pdl),
        positions=positions,
        kv_index=kv_index,
        rotation=rotation,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )


def _launch(
    source: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    work: WorkList,
    counts: Tensor,
    page_table: Tensor,
    scale: float,
    tiling: DecodeTiling | None,
    pdl: bool,
    *,
    positions: Tensor | None = None,
    kv_index: Tensor | None = None,
    rotation: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """source: the queries; with `rotation` the rows that hold them and the newest keys and values."""
    num_tokens, num_heads, head_dim = out.shape
    _, _, num_kv_heads, page_size, _ = kv_layer.shape
    tiling = tiling or decode_tiling(head_dim, out.element_size())
    options: dict[str, Any] = {"launch_pdl": True} if pdl and out.is_cuda else {}
    group = num_heads // num_kv_heads
    used_rows = triton.next_power_of_2(group)
    group_rows = max(DOT_ROWS, used_rows)
    one_access = 32 * tiling.num_warps * VALUES_PER_THREAD // (head_dim // 2)
    decode_kernel[(work.decode_items(num_tokens) * num_kv_heads,)](
        source,
        kv_layer,
        out,
        positions,
        kv_index,
        rotation,
        q_norm,
        k_norm,
        page_table,
        counts,
        work.items,
        work.lengths,
        work.partial_out,
        work.partial_lse,
        work.arrived,
        kv_layer.stride(0),
        page_table.stride(0),
        num_tokens,
        0 if rotation is None else len(rotation),
        eps,
        scale * LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=group_rows,
        # As many values a thread as `qk_norm_rope_write` takes: sums of squares then add in the same order.
        ROTATED_ROWS=max(used_rows, min(group_rows, one_access)),
        HEAD_DIM=head_dim,
        PAGE=page_size,
        ROTATE=rotation is not None,
        HAS_NORM=q_norm is not None,
        BLOCK=tiling.block_tokens,
        STAGES=tiling.num_stages,
        ITEM_WORDS=ITEM_WORDS,
        MAX_SPLITS=MAX_SPLITS,
        PREFETCH_PAGES=tiling.prefetch_pages if out.is_cuda else 0,
        PREFETCH_LANES=32 * tiling.num_warps,
        PDL=bool(options),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **options,
    )

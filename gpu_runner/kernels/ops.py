"""What a decoder layer is made of, cut where kernels can be fused; two implementations per kind of device, of which one
gives a token the same bits in any batch.

    attention = attend(residual)               norm, qkv product, query/key norm, rotary embedding, keys and values into
                                               their pages
    residual += linear(attention)              linear_add
    h         = norm_gate_up(residual)         norm, product; SiLU and product epilogue
    residual += linear(h)                      linear_add

What writes the residual is told which `NormedLinear` reads it next, so that a norm needs no kernel: see `residual`.

The KV cache is one tensor `[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]`, index 0 of the second
dimension holding keys and 1 values; a `kv_layer` is one layer of it. Page 0 is the dummy: writes that must not land
anywhere go there, and nothing read from it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_runner.kernels.residual import NormedLinear, Residual


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


class ModelOps(Protocol):
    """T tokens, flat. Weights are [out, in]; norms are computed in float32 and rounded to the weights' type.

    `meta` is what the implementation's own step prepared: see `BatchMeta` for the reference.
    """

    def embed(
        self, token_ids: Tensor, embedding: Tensor, reader: NormedLinear, *, out: Tensor | None = None
    ) -> Residual:
        """The first residual, in `out`, [T, hidden], or else a tensor of its own. reader: what it is for next."""
        ...

    def attend(
        self,
        residual: Residual,
        linear: NormedLinear,
        kv_layer: Tensor,
        meta: Any,
        *,
        inv_freq: Tensor,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Of linear(rms_norm(residual)) norm each query and key head (where a weight is given), rotate both, write keys
        and values into their pages; causal attention of each row's tokens over the row's pages, those tokens' included.

        linear: (num_heads + 2 * num_kv_heads) * head_dim rows, heads of q, then k, then v; query head h reads KV head
        h // (num_heads / num_kv_heads). inv_freq: [head_dim / 2] float32, radians per position, the same tensor for all
        layers and steps; a head's first half is rotated against its second half. q_norm, k_norm: [head_dim], with eps.
        window: a token sees only the last `window` positions, its own included; None = all. Returns [T, num_heads,
        head_dim].
        """
        ...

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Residual, reader: NormedLinear | None
    ) -> None:
        """residual += linear(x). x: [T, in]. reader: what the sum is for next; None behind the last layer."""
        ...

    def norm_gate_up(self, residual: Residual, linear: NormedLinear) -> Tensor:
        """silu(gate) * up of linear(rms_norm(residual)); weight: gate rows, then up rows. Returns [T, out / 2]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, hidden]."""
        ...

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """[S, vocab] float32."""
        ...

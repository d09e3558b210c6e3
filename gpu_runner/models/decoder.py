"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: what differs between them is in the config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels import ops
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. qkv: rows of q, then k, then v; gate_up: rows of gate, then up; the rest as in checkpoints."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, num_heads * head_dim]
    o_bias: Tensor | None
    post_attention_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights, on one device. `lm_head` is `embedding` itself where the model ties them."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]


class Decoder:
    """Runs the model over a flat batch. Call under `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._inv_freq = config.rope.inv_freq(config.head_dim).to(weights.embedding.device)
        self._scale = config.head_dim**-0.5

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; a tied head counts once."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def forward(self, token_ids: Tensor, meta: BatchMeta, kv_cache: Tensor) -> Tensor:
        """Compute T tokens, writing their keys and values into `kv_cache`, of the shape `ops` documents.

        token_ids: [T] int64. Returns the hidden states after the final norm, [T, hidden].
        """
        eps = self.config.rms_norm_eps
        layers = self._weights.layers
        next_norms = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        cos_sin = ops.rope_cos_sin(meta.positions, self._inv_freq)
        residual = F.embedding(token_ids, self._weights.embedding)
        x = ops.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            x = self._attention(x, layer, kv_cache[index], cos_sin, meta, self.config.layer_windows[index])
            x = ops.fused_add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
            x = ops.linear(x, layer.down, layer.down_bias)
            x = ops.fused_add_rms_norm(x, residual, next_norms[index], eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden] rows of `forward`'s result. Returns [S, vocab] float32."""
        return ops.linear(hidden, self._weights.lm_head).to(torch.float32)

    def _attention(
        self, x: Tensor, layer: LayerWeights, kv_layer: Tensor, cos_sin: Tensor, meta: BatchMeta, window: int | None
    ) -> Tensor:
        q = ops.qk_norm_rope_write(
            ops.linear(x, layer.qkv, layer.qkv_bias),
            cos_sin,
            kv_layer,
            meta.kv_index,
            num_heads=self.config.num_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.rms_norm_eps,
        )
        heads = ops.paged_attention(q, kv_layer, meta, scale=self._scale, window=window)
        return ops.linear(heads.flatten(1), layer.o, layer.o_bias)

    def _tensors(self) -> list[Tensor]:
        weights = self._weights
        tensors = [weights.embedding, weights.final_norm]
        if weights.lm_head is not weights.embedding:
            tensors.append(weights.lm_head)
        for layer in weights.layers:
            tensors += [tensor for name in layer.__slots__ if (tensor := getattr(layer, name)) is not None]
        return tensors

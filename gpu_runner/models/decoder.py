"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: what differs between them is in the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpu_runner.kernels.ops import ModelOps
from gpu_runner.kernels.residual import NormedLinear
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

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: ModelOps) -> None:
        self.config = config
        self._ops = ops
        self._weights = weights
        eps = config.rms_norm_eps
        self._qkv = [NormedLinear(layer.input_norm, eps, layer.qkv, layer.qkv_bias) for layer in weights.layers]
        self._gate_up = [
            NormedLinear(layer.post_attention_norm, eps, layer.gate_up, layer.gate_up_bias) for layer in weights.layers
        ]
        self._inv_freq = config.rope.inv_freq(config.head_dim).to(weights.embedding.device)
        self._scale = config.head_dim**-0.5

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; a tied head counts once."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def forward(self, token_ids: Tensor, meta: Any, kv_cache: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Compute T tokens, writing their keys and values into `kv_cache`, of the shape `kernels.ops` documents.

        token_ids: [T]. meta: the step as `ops` takes it. residual: [T, hidden], what is to hold residuals; None for a
        tensor of its own. Returns the last residual, for `logits`.
        """
        ops, config, weights = self._ops, self.config, self._weights
        readers = [*self._qkv[1:], None]
        residuals = ops.embed(token_ids, weights.embedding, self._qkv[0], out=residual)
        for layer, qkv, gate_up, reader, kv_layer, window in zip(
            weights.layers, self._qkv, self._gate_up, readers, kv_cache, config.layer_windows, strict=True
        ):
            heads = ops.attend(
                residuals,
                qkv,
                kv_layer,
                meta,
                inv_freq=self._inv_freq,
                num_heads=config.num_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.rms_norm_eps,
                scale=self._scale,
                window=window,
            )
            ops.linear_add(heads.flatten(1), layer.o, layer.o_bias, residuals, gate_up)
            inner = ops.norm_gate_up(residuals, gate_up)
            ops.linear_add(inner, layer.down, layer.down_bias, residuals, reader)
        return residuals.values

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head. hidden: [S, hidden] rows of `forward`'s result. Returns [S, vocab] float32."""
        return self._ops.logits(*self.head_factors(hidden))

    def head_factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits are x @ weight.T of what this returns: x, hidden after the final norm, and the head's weight."""
        weights = self._weights
        return self._ops.rms_norm(hidden, weights.final_norm, self.config.rms_norm_eps), weights.lm_head

    def linear_weights(self) -> tuple[Tensor, ...]:
        """Of a layer, and the head: one of each shape."""
        layer = self._weights.layers[0]
        return layer.qkv, layer.o, layer.gate_up, layer.down, self._weights.lm_head

    def _tensors(self) -> list[Tensor]:
        weights = self._weights
        tensors = [weights.embedding, weights.final_norm]
        if weights.lm_head is not weights.embedding:
            tensors.append(weights.lm_head)
        for layer in weights.layers:
            tensors += [tensor for name in layer.__slots__ if (tensor := getattr(layer, name)) is not None]
        return tensors

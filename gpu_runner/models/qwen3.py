"""Qwen3 (dense): a norm on each query and key head in place of Qwen2's biases, and a head_dim of its own."""

from __future__ import annotations

from gpu_runner.models.family import Family, Traits, windows_of_layers
from gpu_runner.models.fields import Fields


def _from_hf(fields: Fields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qk_norm=True, qkv_bias=bias, o_bias=bias, layer_windows=windows_of_layers(fields))


QWEN3 = Family(
    hf_architecture="Qwen3ForCausalLM",
    from_hf=_from_hf,
    gguf_architecture="qwen3",
    from_gguf=lambda tensors: Traits(qk_norm=True),
    default_head_dim=128,
)

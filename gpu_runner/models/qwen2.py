"""Qwen2 and Qwen2.5: biases on Q, K and V; a sliding window on the upper layers where the config asks for it."""

from __future__ import annotations

from gpu_runner.models.family import Family, Traits, windows_of_layers
from gpu_runner.models.fields import Fields


def _from_hf(fields: Fields) -> Traits:
    return Traits(qkv_bias=True, layer_windows=windows_of_layers(fields))


QWEN2 = Family(
    hf_architecture="Qwen2ForCausalLM",
    from_hf=_from_hf,
    gguf_architecture="qwen2",
    from_gguf=lambda tensors: Traits(qkv_bias=True),
)

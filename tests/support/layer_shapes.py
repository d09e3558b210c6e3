"""Models that people serve, by the shapes of their layers: what kernels and their choices must take.

Numbers are those of the models' `config.json`. `layers_of` makes the config of a few such layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_runner.models.config import Llama3Scaling, ModelConfig, RopeConfig
from gpu_runner.models.family import Windows

NUM_LAYERS = 2
MAX_POSITION = 131_072
_LLAMA_ROPE = RopeConfig(base=10_000.0)
_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
_LLAMA3_ROPE = RopeConfig(base=500_000.0, llama3=_LLAMA3)
_QWEN_ROPE = RopeConfig(base=1_000_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """windows: of the layers of `layers_of`."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope: RopeConfig
    qk_norm: bool = False
    qkv_bias: bool = False
    windows: Windows = (None,) * NUM_LAYERS


def _llama(
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    *,
    rope: RopeConfig = _LLAMA_ROPE,
    **traits: Any,
) -> LayerShape:
    return LayerShape(
        hidden=hidden, inner=inner, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, rope=rope, **traits
    )


def _llama3(hidden: int, inner: int, heads: int, head_dim: int) -> LayerShape:
    return _llama(hidden, inner, heads, 8, head_dim, 128_256, rope=_LLAMA3_ROPE)


def _qwen2(
    hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int = 128, vocab: int = 151_936, **traits: Any
) -> LayerShape:
    return _llama(hidden, inner, heads, kv_heads, head_dim, vocab, rope=_QWEN_ROPE, qkv_bias=True, **traits)


def _qwen3(hidden: int, inner: int, heads: int) -> LayerShape:
    return _llama(hidden, inner, heads, 8, 128, 151_936, rope=_QWEN_ROPE, qk_norm=True)


SHAPES: dict[str, LayerShape] = {
    "Llama-3.2-1B": _llama3(2048, 8192, 32, 64),
    "Llama-3.2-3B": _llama3(3072, 8192, 24, 128),
    "Llama-3.1-8B": _llama3(4096, 14_336, 32, 128),
    "Llama-3.1-70B": _llama3(8192, 28_672, 64, 128),
    "Llama-2-7B": _llama(4096, 11_008, 32, 32, 128, 32_000),
    "Llama-2-13B": _llama(5120, 13_824, 40, 40, 128, 32_000),
    "TinyLlama-1.1B": _llama(2048, 5632, 32, 4, 64, 32_000),
    "Yi-1.5-6B": _llama(4096, 11_008, 32, 4, 128, 64_000),
    "DeepSeek-Coder-1.3B": _llama(2048, 5504, 16, 16, 128, 32_256),
    "SmolLM2-135M": _llama(576, 1536, 9, 3, 64, 49_152),
    "SmolLM2-360M": _llama(960, 2560, 15, 5, 64, 49_152),
    "SmolLM2-1.7B": _llama(2048, 8192, 32, 32, 64, 49_152),
    "Mistral-7B-v0.1": _llama(4096, 14_336, 32, 8, 128, 32_000, windows=(4096,) * NUM_LAYERS),
    "Mistral-Nemo": _llama(5120, 14_336, 32, 8, 128, 131_072),
    "Qwen2.5-0.5B": _qwen2(896, 4864, 14, 2, 64),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 12, 2),
    "Qwen2.5-1.5B, the upper layers with windows": _qwen2(1536, 8960, 12, 2, windows=(None, 1024)),
    "Qwen2.5-3B": _qwen2(2048, 11_008, 16, 2),
    "Qwen2.5-7B": _qwen2(3584, 18_944, 28, 4, vocab=152_064),
    "Qwen2.5-14B": _qwen2(5120, 13_824, 40, 8, vocab=152_064),
    "Qwen2.5-32B": _qwen2(5120, 27_648, 40, 8, vocab=152_064),
    "Qwen3-0.6B": _qwen3(1024, 3072, 16),
    "Qwen3-1.7B": _qwen3(2048, 6144, 16),
    "Qwen3-4B": _qwen3(2560, 9728, 32),
    "Qwen3-8B": _qwen3(4096, 12_288, 32),
    "Qwen3-14B": _qwen3(5120, 17_408, 40),
    "Qwen3-32B": _qwen3(5120, 25_600, 64),
}


def layers_of(shape: LayerShape, *, vocab_size: int | None = None) -> ModelConfig:
    """NUM_LAYERS layers. vocab_size: in place of the model's."""
    return ModelConfig(
        source="a test",
        architecture="a test's",
        vocab_size=vocab_size or shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=NUM_LAYERS,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        rope=shape.rope,
        layer_windows=shape.windows,
        max_position=MAX_POSITION,
        eos_ids=(),
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
    )
